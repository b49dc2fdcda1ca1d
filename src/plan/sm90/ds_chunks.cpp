#include "plan/sm90/ds_chunks.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <ranges>

#include "plan/arithmetic.h"

namespace tandem::plan {
namespace {

// Sets the row length of dS, and returns the number of rows per head.
int64_t set_rows(const Problem& p, const Sm90BackwardConfig& config, int64_t m_blocks, ChunkSizes* chunk) {
  const int64_t n_blocks = chunk->n_blocks;
  if (config.options.bounded_left) {
    if (p.window_right != TANDEM_UNBOUNDED) {
      const int64_t visible = std::min(p.window_left + p.window_right, p.seqlen_k);  // one bound may be negative
      chunk->row_n_blocks = std::min(n_blocks, ceil_div(visible + config.tile_m, config.cta_keys()) + 1);
    }
    return m_blocks;
  }
  if (!config.options.bounded_right || p.diagonal_offsets) return m_blocks;
  // Row m and the m-th last row together see a constant number of keys, so that both fit in one row of dS.
  const int64_t offset = p.window_right + (p.bottom_right ? p.seqlen_k - p.seqlen_q : 0) + p.diagonal_offset;
  const int64_t visible = (m_blocks + 1) * config.tile_m + 2 * std::clamp<int64_t>(offset, 0, p.seqlen_k);
  const int64_t both = std::min(2 * n_blocks, (visible - 2) / config.cta_keys() + 2);
  chunk->pack_triangle = (m_blocks - m_blocks / 2) * both < m_blocks * n_blocks;
  if (!chunk->pack_triangle) return m_blocks;
  chunk->row_n_blocks = both;
  return m_blocks - m_blocks / 2;
}

struct ChunkChoice {
  int64_t heads, fitting;  // all; at most in a chunk
  int64_t tile_heads, n_blocks, head_blocks, block_bytes;
  bool has_mask;
  const Sm90DsTimes& times() const { return has_mask ? kSm90MaskedDsTimes : kSm90FullDsTimes; }
};

// Returns the predicted microseconds of a chunk's main kernel and of the dq that no idle SM computes meanwhile. Without
// a mask tiles run in waves, and dq of the last wave's tiles begins after them.
double predict_chunk(const ChunkChoice& c, int64_t heads) {
  const Sm90DsTimes& times = c.times();
  const int64_t count = heads * c.n_blocks / c.tile_heads;
  const auto tiles = static_cast<double>(count), sms = static_cast<double>(kH200Sms);
  const double iterations = static_cast<double>(c.head_blocks * c.tile_heads) / static_cast<double>(c.n_blocks);
  double waves = std::max(tiles * (1 + times.dq) / sms, std::max(1.0, tiles / sms + times.tail)) + times.tail;
  if (!c.has_mask) {
    const int64_t whole = ceil_div(count, kH200Sms);
    const double last = tiles - static_cast<double>((whole - 1) * kH200Sms);
    waves = std::max(static_cast<double>(whole), (tiles + times.dq * (tiles - last)) / sms) + times.dq * last / sms;
  }
  return waves * (times.iteration * iterations + times.tile) + times.chunk;
}

// Returns the predicted microseconds of all chunks, with this number of heads each. Larger chunks waste less of the
// last wave, but their dS leaves the L2 cache.
double predict_chunks(const ChunkChoice& c, int64_t heads) {
  const int64_t whole = c.heads / heads, rest = c.heads % heads;
  double time = static_cast<double>(whole) * predict_chunk(c, heads);
  if (rest > 0) time += predict_chunk(c, rest);
  const Sm90DsTimes& times = c.times();
  double size = static_cast<double>(heads * c.head_blocks * c.block_bytes) / times.l2_bytes, doublings = 0;
  for (; size > 1 && doublings < times.l2_doublings; size /= 2) doublings += std::min(size - 1, 1.0);
  return time * (1 + times.l2 * doublings);
}

// Returns the number of heads of the smallest chunk whose predicted time is near the least. Equal chunks need less
// memory.
int64_t choose_chunk_heads(const ChunkChoice& c, const Sm90BackwardTuning& tuning) {
  const auto heads_of = [&](int64_t tiles) {
    const int64_t heads = round_up(ceil_div(tiles, c.n_blocks), c.tile_heads);
    return std::clamp(heads, c.tile_heads, c.fitting / c.tile_heads * c.tile_heads);
  };
  const auto equal = [&](int64_t heads) {
    return std::min(heads, round_up(ceil_div(c.heads, ceil_div(c.heads, heads)), c.tile_heads));
  };
  if (tuning.ds_chunk_tiles) return equal(heads_of(*tuning.ds_chunk_tiles));
  struct Candidate {
    int64_t heads;
    double time;
  };
  std::array<Candidate, 2 * std::size(kSm90DsChunkTiles)> candidates;
  size_t count = 0;
  for (const int64_t tiles : kSm90DsChunkTiles) {
    const int64_t heads = heads_of(tiles);
    for (const int64_t candidate : {equal(heads), heads})
      candidates[count++] = {candidate, predict_chunks(c, candidate)};
  }
  const double least = std::ranges::min(candidates, {}, &Candidate::time).time * c.times().worth;
  const auto is_near = [&](const Candidate& candidate) { return candidate.time <= least; };
  return std::ranges::min(candidates | std::views::filter(is_near), {}, &Candidate::heads).heads;
}

struct HeadTiles {
  int64_t m_blocks, tiles, fitting;  // tiles: with one head each; fitting: heads of a chunk at most
};

// Returns the number of query heads of a group in a tile. Several heads reduce the traffic of dk and dv. Without a mask
// the number has the least predicted time. Under a causal mask two heads need short tiles and enough of them, and more
// heads need few queries.
int64_t choose_tile_heads(const Problem& p, const Sm90BackwardConfig& config, const Sm90BackwardTuning& tuning,
                          const HeadTiles& all) {
  if (tuning.tile_heads && p.group() % *tuning.tile_heads == 0)
    return std::min<int64_t>(*tuning.tile_heads, all.fitting);
  if (config.options.bounded_left || all.m_blocks > tuning.two_head_tile_max_m_blocks) return 1;
  const auto predict = [&](int64_t heads) {
    const double accumulation = heads < p.group() ? kSm90DkvAccumulation : 0;
    const double tile =
        kSm90FullDsTimes.tile + accumulation + kSm90FullDsTimes.iteration * static_cast<double>(heads * all.m_blocks);
    return tile * static_cast<double>(ceil_div(all.tiles / heads, kH200Sms));
  };
  const bool may_pair = all.tiles >= tuning.two_head_tile_min_tiles;
  int64_t best = 1;
  for (int64_t heads = 2; heads <= std::min(p.group(), all.fitting); ++heads) {
    if (p.group() % heads != 0) continue;
    const bool is_short =
        all.m_blocks * heads <= tuning.short_tile_iterations && all.tiles >= heads * tuning.short_tile_min_tiles;
    const bool is_better =
        config.options.bounded_right ? is_short || (heads == 2 && may_pair) : predict(heads) < predict(best);
    if (is_better) best = heads;
  }
  return best;
}

// Returns the n_blocks of a sum of dq with the least predicted time. More sums of an m_block use more SMs, but add to
// memory one after the other. With a mask the longest sums begin first, and an m_block sees half of the n_blocks.
int64_t choose_sum_n_blocks(const ChunkSizes& chunk, int64_t m_blocks, const Sm90BackwardConfig& config,
                            const Sm90BackwardTuning& tuning) {
  const int64_t most = config.max_dq_sum_n_blocks(), ctas = chunk.heads * ceil_div(m_blocks, config.dq_cta_m_blocks());
  if (tuning.dq_sum_n_blocks) return std::clamp<int64_t>(*tuning.dq_sum_n_blocks, 1, most);
  const int64_t n_blocks = config.options.bounded_left ? chunk.row_n_blocks : chunk.n_blocks;
  const bool has_mask = config.options.bounded_left || config.options.bounded_right;
  const double n_block = kSm90DqTimes.keys * config.cta_keys() / 64, sms = kH200Sms;
  const auto predict = [&](int64_t sums) {
    const auto longest = static_cast<double>(ceil_div(n_blocks, sums)), count = static_cast<double>(sums);
    const double waves = static_cast<double>(ceil_div(ctas * sums, kH200Sms));
    const double all = static_cast<double>(ctas * n_blocks) / (2 * sms);
    const double time = n_block * (has_mask ? std::max(longest, all) : waves * longest);
    return time + count * kSm90DqTimes.sum + (count - 1) * static_cast<double>(ctas) * kSm90DqTimes.bytes;
  };
  const int64_t first = ceil_div(n_blocks, most);
  int64_t best = first;
  double least = tuning.worth * predict(first);
  for (int64_t sums = first + 1; sums <= std::min(tuning.max_dq_sums, n_blocks); ++sums)
    if (predict(sums) < least) best = sums, least = predict(sums);
  return best == first ? most : ceil_div(n_blocks, best);
}

}  // namespace

int64_t count_dq_accums(int64_t n_blocks, const ChunkSizes& chunk, const Sm90BackwardConfig& config) {
  return ceil_div(config.options.bounded_left ? chunk.row_n_blocks : n_blocks, chunk.sum_n_blocks);
}

int64_t count_dq_ctas(const ChunkSizes& chunk, int64_t m_blocks, const Sm90BackwardConfig& config) {
  return chunk.heads * ceil_div(m_blocks, config.dq_cta_m_blocks()) * count_dq_accums(chunk.n_blocks, chunk, config);
}

// dS goes through memory in chunks of whole heads. Only without a mask one head may be divided, because its tiles are
// equal.
ChunkSizes choose_ds_chunk(const Problem& p, const Sm90BackwardConfig& config, const Sm90BackwardTuning& tuning) {
  const int64_t m_blocks = ceil_div(p.seqlen_q, config.tile_m), n_blocks = ceil_div(p.seqlen_k, config.cta_keys());
  const int64_t block_bytes = int64_t{2} * config.cta_keys() * config.tile_m, heads = p.batch * p.heads_q;
  const int64_t floats =
      p.batch * (p.seqlen_q * p.heads_q * p.head_dim + p.seqlen_k * p.heads_k * (p.head_dim + p.head_dim_v));
  const int64_t least_tiles = tuning.ds_chunk_tiles.value_or(512);
  const int64_t most =
      std::max({tuning.ds_bytes_per_gradient * floats, tuning.min_ds_bytes, least_tiles * block_bytes}) / block_bytes;
  const bool has_mask = config.options.bounded_left || config.options.bounded_right;
  ChunkSizes chunk;
  chunk.n_blocks = chunk.row_n_blocks = n_blocks;
  const int64_t rows = set_rows(p, config, m_blocks, &chunk), head_blocks = rows * chunk.row_n_blocks;
  if (head_blocks <= most) {
    const int64_t fitting = std::min(most / head_blocks, heads);
    chunk.tile_heads = choose_tile_heads(p, config, tuning, {m_blocks, heads * n_blocks, fitting});
    chunk.heads =
        choose_chunk_heads({heads, fitting, chunk.tile_heads, n_blocks, head_blocks, block_bytes, has_mask}, tuning);
    chunk.sum_n_blocks = choose_sum_n_blocks(chunk, m_blocks, config, tuning);
  } else if (!has_mask && most / m_blocks >= config.max_dq_sum_n_blocks()) {
    // A part of one head: whole sums of dq, in parts as equal as these allow.
    chunk.heads = 1;
    chunk.sum_n_blocks = config.max_dq_sum_n_blocks();
    const int64_t accums = ceil_div(n_blocks, chunk.sum_n_blocks), most_accums = most / m_blocks / chunk.sum_n_blocks;
    chunk.n_blocks = chunk.row_n_blocks = ceil_div(accums, ceil_div(accums, most_accums)) * chunk.sum_n_blocks;
  } else {
    return {};
  }
  if (count_dq_ctas(chunk, m_blocks, config) > INT32_MAX) return {};
  chunk.bytes = chunk.heads * rows * chunk.row_n_blocks * block_bytes;
  return chunk;
}

}  // namespace tandem::plan
