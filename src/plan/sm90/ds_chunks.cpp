#include "plan/sm90/ds_chunks.h"

#include <algorithm>

#include "plan/arithmetic.h"

namespace tandem::plan {
namespace {

// Returns the number of heads of a chunk, at most `most`. Equal chunks need the least memory, unless `most` leaves
// fewer SMs idle in the last wave of each chunk. With a mask tiles differ in length and fill such waves.
int64_t even_chunk_heads(int64_t heads, int64_t n_blocks, int64_t most, bool has_mask) {
  const int64_t even = ceil_div(heads, ceil_div(heads, most));
  const auto waves = [&](int64_t n) { return ceil_div(n * n_blocks, kH200Sms); };
  const auto all_waves = [&](int64_t chunk) { return heads / chunk * waves(chunk) + waves(heads % chunk); };
  return has_mask || all_waves(even) <= all_waves(most) ? even : most;
}

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

// A chunk of a few hundred tiles fills the GPU and stays in the L2 cache if sequences are short. Only without a mask
// one head may be divided, because its tiles are equal. Two heads per tile halve
// the traffic of dk and dv, which pays under a causal mask with short tiles.
ChunkSizes choose_ds_chunk(const Problem& p, const Sm90BackwardConfig& config, const Sm90BackwardTuning& tuning) {
  const int64_t m_blocks = ceil_div(p.seqlen_q, config.tile_m), n_blocks = ceil_div(p.seqlen_k, config.cta_keys());
  const int64_t block_bytes = int64_t{2} * config.cta_keys() * config.tile_m, heads = p.batch * p.heads_q;
  const int64_t floats =
      p.batch * (p.seqlen_q * p.heads_q * p.head_dim + p.seqlen_k * p.heads_k * (p.head_dim + p.head_dim_v));
  const int64_t most =
      std::max({tuning.ds_bytes_per_gradient * floats, tuning.min_ds_bytes, tuning.ds_chunk_tiles * block_bytes}) /
      block_bytes;
  const bool has_mask = config.options.bounded_left || config.options.bounded_right;
  ChunkSizes chunk;
  chunk.n_blocks = chunk.row_n_blocks = n_blocks;
  const int64_t rows = set_rows(p, config, m_blocks, &chunk), head_blocks = rows * chunk.row_n_blocks;
  if (head_blocks <= most) {
    const int64_t fitting = std::min(most / head_blocks, heads);
    const int64_t wanted =
        std::max(ceil_div(tuning.ds_chunk_tiles, n_blocks), tuning.ds_chunk_bytes / (head_blocks * block_bytes));
    chunk.heads = std::clamp(fitting, int64_t{1}, wanted);
    const bool pairs_heads = p.group() % 2 == 0 && config.options.bounded_right && !config.options.bounded_left &&
                             m_blocks <= tuning.two_head_tile_max_m_blocks;
    if (pairs_heads && round_up(wanted, 2) <= fitting) chunk.heads = round_up(wanted, 2), chunk.tile_heads = 2;
    chunk.heads = round_up(even_chunk_heads(heads, n_blocks, chunk.heads, has_mask), chunk.tile_heads);
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
