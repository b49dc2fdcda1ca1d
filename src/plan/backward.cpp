#include "plan/backward.h"

#include <algorithm>

#include "base/text.h"
#include "config/block_mask.h"
#include "plan/check.h"
#include "plan/forward.h"
#include "problem/bound_expression.h"

namespace tandem::plan {
namespace {

constexpr int64_t kLongest = int64_t{1} << 28;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t step) { return ceil_div(a, step) * step; }

int pad_head_dim(int64_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

Status check_sizes(const Problem& p) {
  if (p.seqlen_q > kLongest) {
    return Status::unsupported(
        str_cat("q.seqlen (", p.seqlen_q, ") must be at most 2^28 on a GPU: split the queries over several calls"));
  }
  if (p.seqlen_k > kLongest) {
    return Status::unsupported(
        str_cat("k.seqlen (", p.seqlen_k, ") must be at most 2^28 on a GPU: split the keys over several calls"));
  }
  const int64_t blocks = std::max(std::max(p.seqlen_q, p.seqlen_k), p.packed_q() ? p.total_q : 0) / 64 + 2;
  constexpr int64_t kMaxBlocks = (int64_t{1} << 27) - 1;  // a launch may have a dozen CTAs for each
  if (p.heads_q > 0 && p.batch > kMaxBlocks / blocks / p.heads_q) {
    return Status::unsupported(
        str_cat("batch (", p.batch, ") and q.heads (", p.heads_q,
                ") must give fewer than 2^27 tiles of 64 queries or keys on a GPU: split the call over batch"));
  }
  return {};
}

bool wants_captured(const Problem& p) { return p.score_mod && p.score_mod->cells > 0; }

// Gradients of a score_mod's tensors are exact up to a number of scores that takes a GPU seconds.
Status check_captured(const Problem& p) {
  if (!wants_captured(p)) return {};
  const auto reads = static_cast<int64_t>(p.score_mod->program->captures.size());
  const double most = static_cast<double>(int64_t{1} << kSumsLog2);
  double scores = 1;
  for (const int64_t x : {p.total_q, p.seqlen_k, p.heads_q, reads}) scores *= static_cast<double>(x);
  constexpr int64_t kMaxCells = int64_t{1} << 38;  // less than half of a grid of 2^31 CTAs
  if (p.score_mod->cells > kMaxCells) {
    return Status::unsupported(
        str_cat("score_mod.tensors[].gradient (", p.score_mod->cells,
                " elements in total) must be at most 2^38 elements on a GPU: pass NULL for some"));
  }
  if (scores < most) return {};
  return Status::unsupported(str_cat("score_mod.tensors[].gradient must be NULL on a GPU for 2^", kSumsLog2,
                                     " or more scores and elements that each reads (here q.seqlen ", p.seqlen_q,
                                     ", k.seqlen ", p.seqlen_k, ", q.heads ", p.heads_q, ", elements ", reads,
                                     "): split the call over batch or heads, with accumulate"));
}

// True if the main kernel can add the sums of tiles: its dS is the gradient of the expression's result.
bool captured_per_tile(const Problem& p) {
  return wants_captured(p) && p.score_mod->program->captured_per_tile && p.score_mod->program->passes() &&
         p.softcap == 0 && (p.dq || p.dk);
}

// The same for expressions whose scores are evaluated one by one.
bool captured_per_score(const Problem& p) {
  return wants_captured(p) && !captured_per_tile(p) && p.score_mod->program->captured_per_score && (p.dq || p.dk);
}

// True for float32 or accumulated gradients: dk and dv are then stored in pairs of columns.
bool stores_directly(const Problem& p) {
  return p.accumulate || (p.dk && p.dk.dtype == DType::f32) || (p.dv && p.dv.dtype == DType::f32);
}

constexpr int64_t kH200Sms = 132, kB200Sms = 148;

// The number of CTAs (or CTA pairs) that share the iterations of an n_block. Splits help if n_blocks are fewer than
// multiprocessors, or too unequal: a causal mask or grouped heads make some long. The result assumes a whole H200 and,
// with batch_invariant, does not depend on other sequences.
int choose_m_splits(const Problem& p, int tile_m, int tile_n, int ctas) {
  constexpr int64_t kLeastSteps = 2, kMaxSplits = 16, kTilesOfEach = 3;
  if (p.batch_invariant || p.total_q == 0) return 1;
  const int64_t tiles = std::max<int64_t>(1, ceil_div(p.seqlen_k, tile_n) * p.heads_k * p.batch);
  const int64_t steps = p.group() * ceil_div(p.seqlen_q, tile_m), at_once = kH200Sms / ctas;
  const int64_t m_splits = std::clamp(std::min(at_once / tiles, steps / kLeastSteps), int64_t{1}, kMaxSplits);
  if (!needs_right_mask(p) || needs_left_mask(p)) return static_cast<int>(m_splits);
  // Split by heads, because parts that begin within a head's m_blocks would wait for the preceding n_block's.
  int64_t heads = 1;
  while (heads < p.group() && (heads * tiles < kTilesOfEach * at_once || p.group() % heads != 0)) ++heads;
  return static_cast<int>(std::max(m_splits, std::min(heads, kMaxSplits)));
}

// The bytes that an iteration reads and adds per query, which should fit the L2 cache: q, dout and the sums of dq.
int64_t bytes_of_query(int64_t head_dim, int64_t head_dim_v) { return 2 * (head_dim + head_dim_v) + 4 * head_dim; }

// True if a causal mask may use spt. Active n_blocks then spread over all m_blocks of a head, which the L2
// cache must hold; Hopper therefore splits long groups by query head (split_q_heads). It changes the order of sums, so
// that with batch_invariant the answer must not depend on lengths.
template <class T>
bool may_use_spt(const Problem& p, const T& t) {
  if (t.block_mask || p.total_q == 0 || (p.batch_invariant && p.group() > 1)) return false;
  if (p.batch_invariant) return p.window_right != TANDEM_UNBOUNDED && p.window_left == TANDEM_UNBOUNDED;
  return t.bounded_right && !t.bounded_left;
}
bool uses_spt(const Problem& p, const Sm90BackwardConfig& t) {
  if (!may_use_spt(p, t)) return false;
  if (p.batch_invariant) return true;
  if ((t.m_split && p.group() == 1) || t.short_q) return false;
  const int64_t most = t.head_dim > 192 && p.group() == 1 ? 16 << 20 : 32 << 20;
  if (p.seqlen_q * bytes_of_query(t.head_dim, t.head_dim_v) > most) return false;
  // Accumulating dk and dv in memory per query head is cheap only relative to long iterations.
  constexpr int64_t kLong = 4096;
  const int64_t tiles = ceil_div(p.seqlen_k, t.tile_n()) * p.heads_q * p.batch;
  return p.group() == 1 || (p.seqlen_q >= kLong && tiles * t.ctas() >= kH200Sms);
}
// The limit is Hopper's; a B200 has twice its L2 cache.
bool uses_spt(const Problem& p, const Sm100BackwardConfig& t) {
  constexpr int64_t kMax = 32 << 20;
  if (!may_use_spt(p, t)) return false;
  return p.batch_invariant || p.group() * p.seqlen_q * bytes_of_query(t.head_dim, t.head_dim_v) <= kMax;
}

// True if one n_block has all keys and its CTAs see every query: dq is then stored directly. Lengths and diagonals must
// be known on the host, and registers must suffice. False with batch_invariant, because the other schedule gives other
// bits.
bool has_single_n_block(const Problem& p, const Sm90BackwardConfig& t) {
  if (p.batch_invariant || p.accumulate || p.dq.dtype == DType::f32) return false;
  if (t.bias != Bias::none || t.score_mod || t.mask_mod || t.dropout || (t.softcap && t.alibi)) return false;
  if (p.seqlen_k == 0 || p.seqlen_k > t.cta_keys() || t.varlen || t.block_mask || t.bounded_left) return false;
  if (!t.bounded_right) return true;
  const bool known = !p.diagonal_offsets && p.diagonal_offset == 0;
  return known && p.window_right >= 0 && (!p.bottom_right || p.seqlen_k >= p.seqlen_q);
}

// The size of the dS chunks (strips) of wide heads. No heads: dS would exceed its limit.
struct DsChunks {
  int64_t heads = 0, n_blocks = 0, row_n_blocks = 0, bytes = 0;
  int64_t tile_heads = 1;  // query heads of a group that one tile handles
  bool folds = false;

  int64_t count(int64_t all_heads, int64_t all_n_blocks) const {
    return ceil_div(all_heads, heads) * ceil_div(all_n_blocks, n_blocks);
  }
};

// The maximum number of sums over n_blocks for dq of an m_block. With a window they begin at the window.
int64_t count_dq_accums(int64_t n_blocks, int64_t row_n_blocks, const Sm90BackwardConfig& t) {
  return ceil_div(t.bounded_left ? row_n_blocks : n_blocks, t.dq_sum_n_blocks());
}
// The CTAs of the dq kernel for one strip.
int64_t dq_ctas(const DsChunks& s, int64_t m_blocks, const Sm90BackwardConfig& t) {
  return s.heads * ceil_div(m_blocks, t.dq_cta_m_blocks()) * count_dq_accums(s.n_blocks, s.row_n_blocks, t);
}

// The heads of a strip, at most `most`. Equal strips need the least memory. They are not used if multiprocessors would
// then idle longer in the last rounds; under a mask unequal tiles balance that.
int64_t chunk_heads_within(int64_t heads, int64_t n_blocks, int64_t most, bool bounded) {
  const int64_t even = ceil_div(heads, ceil_div(heads, most));
  auto rounds = [&](int64_t n) { return ceil_div(n * n_blocks, kH200Sms); };
  auto all_rounds = [&](int64_t chunk) { return heads / chunk * rounds(chunk) + rounds(heads % chunk); };
  return bounded || all_rounds(even) <= all_rounds(most) ? even : most;
}

// The dS of a strip may take 1.5 times the bytes of float32 gradients, or some hundred tiles. A head is split into
// several strips only without a mask, which would unbalance them; sums do not depend on strips. If a causal mask's
// strip has enough tiles, each handles two query heads, which halves the additions to dk and dv.
DsChunks choose_ds_chunks(const Problem& p, const Sm90BackwardConfig& t) {
  constexpr int64_t kTiles = 512, kLongMBlocks = 128;
  const int64_t m_blocks = ceil_div(p.seqlen_q, t.tile_m), n_blocks = ceil_div(p.seqlen_k, t.cta_keys());
  const int64_t block_bytes = int64_t{2} * t.cta_keys() * t.tile_m, heads = p.batch * p.heads_q;
  const int64_t floats =
      p.batch * (p.seqlen_q * p.heads_q * p.head_dim + p.seqlen_k * p.heads_k * (p.head_dim + p.head_dim_v));
  const int64_t most = std::max(int64_t{6} * floats, kTiles * block_bytes) / block_bytes;
  DsChunks s;
  int64_t rows = m_blocks;
  s.n_blocks = s.row_n_blocks = n_blocks;
  if (t.bounded_left) {
    // The n_blocks of a row, from the first visible one.
    if (p.window_right != TANDEM_UNBOUNDED) {
      const int64_t seen = std::min(p.window_left + p.window_right, p.seqlen_k);  // one bound may be negative
      s.row_n_blocks = std::min(n_blocks, ceil_div(seen + t.tile_m, t.cta_keys()) + 1);
    }
  } else if (t.bounded_right && !p.diagonal_offsets) {
    // Together, the m-th and the m-th last m_block see at most this number of keys, each in whole n_blocks.
    const int64_t beyond = p.window_right + (p.bottom_right ? p.seqlen_k - p.seqlen_q : 0) + p.diagonal_offset;
    const int64_t seen = (m_blocks + 1) * t.tile_m + 2 * std::clamp<int64_t>(beyond, 0, p.seqlen_k);
    const int64_t of_two = std::min(2 * n_blocks, (seen - 2) / t.cta_keys() + 2);
    s.folds = (m_blocks - m_blocks / 2) * of_two < m_blocks * n_blocks;
    if (s.folds) rows -= m_blocks / 2, s.row_n_blocks = of_two;
  }
  const int64_t of_head = rows * s.row_n_blocks;
  if (of_head <= most) {
    const int64_t room = std::min(most / of_head, heads), wanted = ceil_div(kTiles, n_blocks);
    s.heads = std::clamp(room, int64_t{1}, wanted);
    const bool grouped = p.group() % 2 == 0 && t.bounded_right && !t.bounded_left && m_blocks <= kLongMBlocks;
    if (grouped && round_up(wanted, 2) <= room) s.heads = round_up(wanted, 2), s.tile_heads = 2;
    s.heads = round_up(chunk_heads_within(heads, n_blocks, s.heads, t.bounded_right || t.bounded_left), s.tile_heads);
  } else if (!t.bounded_left && !t.bounded_right && most / m_blocks >= t.dq_sum_n_blocks()) {
    s.heads = 1;
    // In whole sums of dq, split evenly.
    const int64_t sums = ceil_div(n_blocks, t.dq_sum_n_blocks()), at_most = most / m_blocks / t.dq_sum_n_blocks();
    s.n_blocks = s.row_n_blocks = ceil_div(sums, ceil_div(sums, at_most)) * t.dq_sum_n_blocks();
  } else {
    return {};
  }
  if (dq_ctas(s, m_blocks, t) > INT32_MAX) return {};
  s.bytes = s.heads * rows * s.row_n_blocks * block_bytes;
  return s;
}

// True if dS of wide heads goes to global memory. Not if lengths or diagonals are known only on the device, with a
// block mask, or for a single n_block. Not with batch_invariant, because dense and packed sequences must give the same
// bits.
bool uses_ds_gmem(const Problem& p, const Sm90BackwardConfig& t) {
  if ((!t.shared_p() && !t.q_subtiles) || t.warpgroup_roles || t.single_n_block || t.varlen || t.block_mask ||
      p.batch_invariant)
    return false;
  if (p.total_q == 0 || p.heads_q == 0 || p.seqlen_k <= t.cta_keys()) return false;
  return choose_ds_chunks(p, t).heads > 0;
}

// split_q_heads: the number of tiles that share the query heads of a group.
int count_head_parts(const Problem& p, const Sm90BackwardConfig& t) {
  return static_cast<int>(p.group() / (t.ds_gmem ? choose_ds_chunks(p, t).tile_heads : 1));
}

// True if warpgroups have separate keys: their accumulators must leave registers for half an iteration's scores.
// Dropout, a bias or an expression need too many registers.
bool uses_q_subtiles(const Problem& p, Sm90BackwardConfig* config) {
  Sm90BackwardConfig t = *config;
  if (!t.shared_p() || t.bias != Bias::none || t.dropout || t.score_mod || t.mask_mod) return false;
  t.head_dim = static_cast<int>(round_up(p.head_dim, 64));
  t.head_dim_v = static_cast<int>(round_up(p.head_dim_v, 64));
  t.q_subtiles = true;
  if (t.head_dim + t.head_dim_v > t.kMaxHalvesDims || !uses_ds_gmem(p, t)) return false;
  t.ds_gmem = true;
  *config = t;
  return true;
}

Sm90BackwardConfig select_sm90_config(const Problem& p) {
  Sm90BackwardConfig t;
  t.head_dim = pad_head_dim(p.head_dim);
  t.head_dim_v = pad_head_dim(p.head_dim_v);
  set_options(p, &t);
  t.scale_outside_exp2 = t.scale_outside_exp2 || (p.bias && !is_near_one(p.softmax_scale));
  t.dropout = static_cast<bool>(p.dropout);
  t.single_n_block = has_single_n_block(p, t);
  // Packed queries may have more rows than the longest length; their dq is zero.
  t.short_q = p.seqlen_q <= t.kShortQ && !p.packed_q() && !t.shared_p() && !t.single_n_block &&
              choose_m_splits(p, t.tile_m, t.tile_n(), t.ctas()) == 1;
  // Short products benefit from more queries per iteration if registers suffice.
  if (t.head_dim <= 64 && t.head_dim_v <= 64 && t.plain_scores() && !t.single_n_block && !t.short_q) t.tile_m = 128;
  // At head_dim 256 additions to dq cost most, and pairs halve them. With batch_invariant the choice does not depend on
  // other sequences.
  t.cluster2 = t.head_dim == 256 && (p.seqlen_k > t.cta_keys() || p.batch_invariant);
  if (uses_q_subtiles(p, &t)) {
    t.cluster2 = false;
  } else {
    // Up to 192, one warpgroup has registers for dk or dv of all keys, and shared memory has capacity for dq.
    t.warpgroup_roles = t.cluster2 && p.head_dim <= 192 && p.head_dim_v <= 192 && t.plain_scores();
    if (t.warpgroup_roles) {
      t.warpgroups = 3;
      t.head_dim = 192;
      t.head_dim_v = static_cast<int>(round_up(p.head_dim_v, 64));
    }
    t.ds_gmem = uses_ds_gmem(p, t);
  }
  if (t.ds_gmem) t.cluster2 = false;
  t.m_split = choose_m_splits(p, t.tile_m, t.tile_n(), t.ctas()) > 1;
  t.spt = !t.single_n_block && !t.ds_gmem && uses_spt(p, t);
  t.split_q_heads = (t.spt || t.ds_gmem) && p.group() > 1;
  // A tile with all query heads of its group stores dk and dv directly.
  if (t.split_q_heads) t.m_split = count_head_parts(p, t) > 1;
  t.store_from_registers = stores_directly(p) && !t.m_split;
  t.captured = wants_captured(p);
  t.captured_per_tile = captured_per_tile(p) && !t.shared_p();
  t.captured_per_score = captured_per_score(p) && !t.shared_p();
  // Wide heads and iterations of many queries leave capacity for fewer buffers.
  while (!t.fits() && t.q_stages > 1) --(t.q_stages > t.dout_stages ? t.q_stages : t.dout_stages);
  return t;
}

// True if two CTAs multiply together. This moves fewer bytes through shared memory per iteration, but n_blocks are
// twice as long, so that padding, masks and imbalance cost more. The result assumes a whole B200, because sums would
// have other bits. With batch_invariant it is false, because the choice depends on other sequences.
bool uses_two_cta(const Problem& p) {
  constexpr int64_t kKeys = Sm100BackwardConfig::kCtaKeys;
  // Per iteration. Pairs run all heads like head_dim 128.
  constexpr int64_t kPairClocks = 2816;
  const int64_t d = round_up(p.head_dim, 16), clocks = 16 * d + 6 * round_up(p.head_dim_v, 16) + 640;
  const auto fits = [](int64_t head_dim) { return head_dim > 64 && head_dim <= 128; };
  if (!fits(p.head_dim) || !fits(p.head_dim_v) || p.seqlen_k <= kKeys || p.batch_invariant) return false;
  const int64_t heads = p.batch * p.heads_k;
  const int64_t tiles = ceil_div(p.seqlen_k, kKeys) * heads, of_pairs = ceil_div(p.seqlen_k, 2 * kKeys) * heads;
  // In a triangle of blocks, pairs see one more block per row.
  const bool masks = needs_left_mask(p) || needs_right_mask(p);
  const int64_t m_blocks = masks ? ceil_div(p.seqlen_q, Sm100BackwardConfig::tile_m) : 0;
  const int64_t rounds = ceil_div(tiles, kB200Sms);
  const int64_t rounds_of_pairs = ceil_div(of_pairs, kB200Sms / 2);
  return rounds_of_pairs * kPairClocks * (masks ? m_blocks + 2 : 1) < rounds * clocks * (masks ? m_blocks + 1 : 1);
}

Sm100BackwardConfig select_sm100_config(const Problem& p) {
  Sm100BackwardConfig t;
  const auto round_dims = [&p, &t](int64_t step) {
    t.head_dim = static_cast<int>(round_up(p.head_dim, step));
    t.head_dim_v = static_cast<int>(round_up(p.head_dim_v, step));
  };
  set_options(p, &t);
  t.dropout = static_cast<bool>(p.dropout);
  t.store_from_registers = stores_directly(p);
  t.captured = wants_captured(p);
  t.captured_per_tile = captured_per_tile(p);
  t.two_cta = uses_two_cta(p);
  if (t.two_cta) {
    round_dims(128);
    t.q_stages = t.dout_stages = t.dq_stages = 1;
    return t;
  }
  round_dims(16);
  // The most buffers that fit: queries first, then dout, then dq.
  for (t.dq_stages = 4; t.dq_stages > 1; t.dq_stages /= 2) {
    for (t.dout_stages = 2; t.dout_stages > 0; --t.dout_stages) {
      for (t.q_stages = 3; t.q_stages > 1; --t.q_stages) {
        if (t.fits()) return t;
      }
    }
  }
  // Wide heads.
  round_dims(64);
  t.accumulators = Accumulators::dk;
  t.q_stages = t.dout_stages = 1;
  t.dq_stages = 2;
  return t;
}

BackwardKernel select_config(const Problem& p, const gpu::Properties& device) {
  if (device.compute_major != 10) return select_sm90_config(p);
  Sm100BackwardConfig t = select_sm100_config(p);
  t.spt = uses_spt(p, t);
  return t;
}

// Heads that run together with a left bound. Their active n_blocks see the rows between the first and the last, and one
// window more. More heads wait less for each other, but their dq must fit the L2 cache. CTA pairs have long iterations,
// so that waiting costs less than memory.
int64_t window_heads(const Problem& p, const BackwardSchedule& t, int64_t at_once) {
  constexpr int64_t kL2Bytes = 24 << 20, kMax = 33;
  const int64_t least = t.tile.ctas > 1 ? 8 : 4;
  const int64_t left = std::min(p.window_left, p.seqlen_q), right = needs_right_mask(p) ? p.window_right : p.seqlen_q;
  const int64_t rows = kL2Bytes / bytes_of_query(t.tile.head_dim, t.tile.head_dim_v) - at_once * t.tile.tile_n;
  return std::clamp<int64_t>(rows / std::max<int64_t>(left + right, t.tile.tile_n), least, kMax);
}

// The number of groups of about `most` heads, equal ones if possible. The n_blocks of a small last group would wait for
// each other at the end, without other work.
int64_t even_groups(int64_t heads, int64_t most) {
  for (int64_t n = most; 4 * n >= 3 * most; --n)
    if (heads % n == 0) return heads / n;
  return ceil_div(heads, most);
}

// The key heads that run together (docs/design/sm90_backward.md). Without a mask, these are the heads whose n_blocks
// run at once, but at most one n_block per iteration. The epilogue counts as iterations, except with few queries.
// Long heads run at least in twos. Causal masks use more heads: their n_blocks are unequal and add in order.
int choose_l2_heads(const Problem& p, const BackwardSchedule& t, int sm_count) {
  constexpr int64_t kPackedHeads = 16, kLeastHeads = 8, kShortSteps = 3, kStepsOfAnEnd = 3, kLongHead = 16;
  const int64_t heads = std::max<int64_t>(p.batch * p.heads_k, 1), at_once = sm_count / t.tile.ctas;
  const int64_t of_head = std::max(int64_t{t.n_blocks} * t.m_splits, int64_t{1});
  const int64_t end = t.tile.short_q ? 0 : kStepsOfAnEnd;
  const int64_t steps = std::max<int64_t>(p.group() * t.sequence_m_blocks / t.m_splits + end, 1);
  int64_t wanted = std::max<int64_t>(at_once / std::min(of_head, steps), 1), groups = 1;
  if (needs_left_mask(p)) {
    groups = ceil_div(heads, window_heads(p, t, at_once));
  } else if (needs_right_mask(p)) {
    if (t.tile.tile_m > 64) wanted *= kShortSteps;
    wanted = std::max(wanted, varlen(p) ? kPackedHeads : kLeastHeads) * t.m_splits / p.group();
    groups = heads / std::max<int64_t>(wanted, 1);
  } else {
    if (of_head >= kLongHead && of_head <= steps)
      wanted = std::max<int64_t>(t.tile.head_dim > 64 ? wanted : 2 * wanted, 2);
    const bool even = std::holds_alternative<Sm100BackwardConfig>(t.tile.kernel);
    groups = even ? even_groups(heads, wanted) : ceil_div(heads, wanted);
  }
  return static_cast<int>(ceil_div(heads, std::max<int64_t>(groups, 1)));
}

// All heads except the last ones. The last heads keep all multiprocessors busy while the longest n_block of another
// head finishes. The result assumes a whole device and, with batch_invariant, does not depend on other sequences.
int count_spt_heads(const Problem& p, const BackwardSchedule& t, const gpu::Properties& device) {
  const int64_t heads = p.batch * (t.tile.dkv_semaphores > 0 ? p.heads_q : p.heads_k);
  if (p.batch_invariant) return static_cast<int>(heads);
  const int64_t whole = device.compute_major == 10 ? kB200Sms : kH200Sms;
  const int64_t last = ceil_div(2 * whole / t.tile.ctas, t.n_blocks + 1);  // half see an m_block
  return static_cast<int>(std::max<int64_t>(heads - last, 0));
}

// Without dq all tiles are one strip.
void set_ds_chunks(const Problem& p, BackwardSchedule* schedule) {
  BackwardSchedule& t = *schedule;
  DsChunks chunks = choose_ds_chunks(p, t.tile.for_hopper());
  if (!p.dq) chunks = {.heads = p.batch * p.heads_q, .n_blocks = t.n_blocks, .tile_heads = chunks.tile_heads};
  t.chunk_heads = static_cast<int>(chunks.heads);
  t.chunk_n_blocks = static_cast<int>(chunks.n_blocks);
  t.ds_row_stride = static_cast<int>(chunks.row_n_blocks);
  t.pack_triangle = chunks.folds;
  t.ds_chunks = chunks.count(p.batch * p.heads_q, t.n_blocks);
  t.ds_chunk_bytes = chunks.bytes;
  const int64_t heads = chunks.heads / chunks.tile_heads, parts = t.tile.dkv_semaphores > 0 ? 1 : t.m_splits;
  t.grid = static_cast<int>(std::min<int64_t>(t.grid, heads * chunks.n_blocks * parts));
}

void make_schedule(const Problem& p, const gpu::Properties& device, BackwardSchedule* schedule) {
  BackwardSchedule& t = *schedule;
  t.tile = select_config(p, device);
  const int ctas = t.tile.ctas, sms = usable_sms(p, device, ctas);
  t.sequence_m_blocks = static_cast<int>(ceil_div(p.seqlen_q, t.tile.tile_m));
  // Packed: the last m_block of each sequence may be partial.
  t.m_blocks = static_cast<int>(p.packed_q() ? p.total_q / t.tile.tile_m + p.batch + 1 : p.batch * t.sequence_m_blocks);
  if (p.total_q == 0) t.m_blocks = 0;
  t.n_blocks = static_cast<int>(ceil_div(p.seqlen_k, t.tile.tile_n));
  t.m_splits = t.tile.dkv_semaphores > 0   ? count_head_parts(p, t.tile.for_hopper())
               : t.tile.dkv_accum_ctas > 0 ? choose_m_splits(p, t.tile.tile_m, t.tile.tile_n, ctas)
                                           : 1;
  t.tiles = static_cast<int>(t.n_blocks * p.heads_k * p.batch * t.m_splits);
  t.l2_heads = choose_l2_heads(p, t, sms);
  t.spt_heads = count_spt_heads(p, t, device);
  const bool twice = t.tile.two_pass && p.dv && (p.dq || p.dk);  // tiles of dv after the tiles of dk
  t.grid = ctas * std::min(sms / ctas, t.tiles * (twice ? 2 : 1));
  if (t.tile.ds_gmem) set_ds_chunks(p, &t);
  if (t.tile.captured && !t.tile.captured_per_score && p.total_q > 0)
    t.captured_blocks = p.batch * p.heads_q * ctas * t.n_blocks;
  if (!p.dbias) return;
  const int64_t* const shape = p.dbias.shape;
  t.dbias_blocks =
      shape[0] * shape[1] * (shape[2] == 1 ? 1 : t.sequence_m_blocks) * (shape[3] == 1 ? 1 : ctas * t.n_blocks);
}

bool has_main(const Problem& p, const BackwardSchedule& t) { return t.tiles > 0 && (p.dq || p.dk || p.dv); }

// Launches that list the iterations of a block mask, for the main kernel and the kernels that compute scores again.
void add_step_launches(const Problem& p, BackwardSchedule* schedule, Plan* plan) {
  BackwardSchedule& t = *schedule;
  if (!t.tile.block_mask || t.tiles == 0) return;
  t.list_batch = lists_of(p, 0);
  t.list_heads = lists_of(p, 1);
  t.list_words = 2 + p.group() * t.sequence_m_blocks;
  const auto rows = static_cast<uint32_t>(t.list_batch * t.list_heads * t.sequence_m_blocks);
  if (rows > 0)
    plan->launches.push_back({.entry = t.tile.mark_n_blocks_entry, .grid = rows, .block = kListBlocksThreads});
  plan->launches.push_back({.entry = static_cast<uint8_t>(t.tile.mark_n_blocks_entry + 1),
                            .grid = static_cast<uint32_t>(p.batch * p.heads_k * t.n_blocks),
                            .block = kListBlocksThreads});
}

// Launches of the main kernel and the later ones. These may begin before it has ended, unless their CTAs would then
// wait on multiprocessors that a limit reserves for other work.
void add_launches(const Problem& p, const BackwardSchedule& t, uint32_t blocks, Plan* plan) {
  if (has_main(p, t)) {
    plan->launches.push_back({.entry = kMainEntry,
                              .grid = static_cast<uint32_t>(t.grid),
                              .block = static_cast<uint32_t>(t.tile.threads),
                              .shared_bytes = static_cast<uint32_t>(t.tile.smem_bytes),
                              .overlap_previous = blocks > 0});
  }
  const bool may_overlap = p.sm_limit == 0;
  if (t.tile.ds_gmem && has_main(p, t) && p.dq) {
    const Sm90BackwardConfig& kernel = t.tile.for_hopper();
    const DsChunks chunk = {.heads = t.chunk_heads, .n_blocks = t.chunk_n_blocks, .row_n_blocks = t.ds_row_stride};
    plan->launches.push_back({.entry = dq_entry(kernel),
                              .grid = static_cast<uint32_t>(dq_ctas(chunk, t.sequence_m_blocks, kernel)),
                              .block = static_cast<uint32_t>(t.tile.threads),
                              .shared_bytes = static_cast<uint32_t>(kernel.dq_smem_bytes()),
                              .overlap_previous = may_overlap});
    plan->repeat = {plan->launches.size() - 2, plan->launches.size(), t.ds_chunks};
  }
  const auto threads = static_cast<uint32_t>(t.tile.postprocess_threads);
  const bool accumulates_dkv = t.m_splits > 1 && (p.dk || p.dv);
  const uint32_t converted = (p.dq && !t.tile.single_n_block && !t.tile.ds_gmem ? blocks : 0) +
                             (accumulates_dkv ? t.tile.ctas * (t.tiles / t.m_splits) * t.tile.dkv_accum_ctas : 0);
  if (converted > 0) {
    plan->launches.push_back({.kernel = kPrepostKernel,
                              .entry = kPostprocessEntry,
                              .grid = converted,
                              .block = threads,
                              .overlap_previous = may_overlap});
  }
  if (p.dsink && p.heads_q > 0) {
    plan->launches.push_back({.kernel = kPrepostKernel,
                              .entry = kDsinkEntry,
                              .grid = static_cast<uint32_t>(p.heads_q),
                              .block = 32,
                              .overlap_previous = may_overlap});
  }
  if (t.dbias_blocks > 0) {
    plan->kernels.push_back(kernel_of(p, t.tile.kernel, Unit::dbias));
    plan->launches.push_back({.kernel = kDbiasKernel,
                              .entry = kDbiasEntry,
                              .grid = static_cast<uint32_t>(t.dbias_blocks),
                              .block = static_cast<uint32_t>(t.tile.score_threads),
                              .shared_bytes = static_cast<uint32_t>(t.tile.dbias_smem_bytes),
                              .overlap_previous = may_overlap && !plan->launches.empty()});
  }
  if (t.captured_blocks > 0) {
    plan->launches.push_back({.entry = kCapturedEntry,
                              .grid = static_cast<uint32_t>(t.captured_blocks),
                              .block = static_cast<uint32_t>(t.tile.score_threads),
                              .shared_bytes = static_cast<uint32_t>(t.tile.captured_smem_bytes),
                              .overlap_previous = may_overlap && !plan->launches.empty()});
  }
  if (t.tile.captured) {
    plan->launches.push_back(
        {.entry = kCapturedEntry + 1,
         .grid = static_cast<uint32_t>(ceil_div(p.score_mod->cells, int64_t{kPostprocessCapturedThreads})),
         .block = kPostprocessCapturedThreads,
         .overlap_previous = may_overlap && !plan->launches.empty()});
  }
}

}  // namespace

Status BackwardPass::check(const Problem& p, const gpu::Properties& device) const {
  TANDEM_TRY(check_options(p));
  if (p.block_mask) {
    const BackwardKernel tile = select_config(p, device);
    TANDEM_TRY(check_blocks(p, tile.tile_m, tile.tile_n / tile.ctas));
  }
  TANDEM_TRY(check_head_dim("q", p.head_dim));
  TANDEM_TRY(check_head_dim("v", p.head_dim_v));
  const bool no_queries = p.total_q == 0, no_keys = p.total_k == 0;
  const struct {
    const char* name;
    const View& view;
    bool packed, empty;
  } tensors[] = {{"q", p.q, p.packed_q(), no_queries},       {"k", p.k, p.packed_k(), no_keys},
                 {"v", p.v, p.packed_k(), no_keys},          {"out", p.out, p.packed_q(), no_queries},
                 {"dout", p.dout, p.packed_q(), no_queries}, {"dq", p.dq, p.packed_q(), no_queries},
                 {"dk", p.dk, p.packed_k(), no_keys},        {"dv", p.dv, p.packed_k(), no_keys}};
  for (const auto& [name, view, packed, empty] : tensors) {
    if (view) TANDEM_TRY(check_tensor(name, view, packed, empty));
  }
  TANDEM_TRY(check_index("cu_seqlens_q", p.cu_seqlens_q));
  TANDEM_TRY(check_index("cu_seqlens_k", p.cu_seqlens_k));
  TANDEM_TRY(check_index("seqused_q", p.seqused_q));
  TANDEM_TRY(check_index("seqused_k", p.seqused_k));
  TANDEM_TRY(check_index("diagonal_offsets", p.diagonal_offsets));
  TANDEM_TRY(check_captured(p));
  return check_sizes(p);
}

void BackwardPass::plan(const Problem& p, const gpu::Properties& device, Plan* plan) const {
  BackwardSchedule& t = plan->backward;
  make_schedule(p, device, &t);
  for (const Unit unit : {Unit::main, Unit::prepost}) plan->kernels.push_back(kernel_of(p, t.tile.kernel, unit));
  const int64_t blocks = p.total_q > 0 ? p.heads_q * t.m_blocks : 0;
  const auto count = static_cast<uint32_t>(blocks);
  // Without queries there is no delta, and only the counter is zeroed.
  const int delta = count > 0 ? 0 : kMemset;
  if (count > 0) {
    plan->launches.push_back({.kernel = kPrepostKernel,
                              .entry = kPreprocessEntry,
                              .grid = count,
                              .block = static_cast<uint32_t>(t.tile.preprocess_threads)});
  } else {
    plan->fills.push_back({0, 3 * sizeof(int)});
  }
  const int before_steps = static_cast<int>(plan->launches.size());
  add_step_launches(p, &t, plan);
  const int main = static_cast<int>(plan->launches.size());
  add_launches(p, t, count, plan);
  size_t end = 0;
  const auto region = [&](const char* name, int64_t bytes, int writer) {
    const size_t begin = end;
    plan->regions.push_back({name, begin, static_cast<size_t>(bytes), writer});
    end = begin + static_cast<size_t>(ceil_div(bytes, 128) * 128);
    return begin;
  };
  region("workspace.counter", 3 * sizeof(int), delta);
  t.dq_semaphore_offset =
      region("workspace.dq_semaphore", blocks * t.tile.dq_semaphores * static_cast<int64_t>(sizeof(int)), delta);
  t.lse_delta_offset =
      region("workspace.lse_delta", blocks * 2 * t.tile.tile_m * static_cast<int64_t>(sizeof(float)), delta);
  // Only the sums of strips to which several CTAs add.
  const bool adds = t.tile.ds_gmem ? p.dq && count_dq_accums(t.n_blocks, t.ds_row_stride, t.tile.for_hopper()) > 1
                                   : !t.tile.single_n_block;
  const int64_t sums = has_main(p, t) && adds ? blocks * t.tile.dq_floats : 0;
  t.dq_accum_offset = region("workspace.dq_accum", sums * static_cast<int64_t>(sizeof(float)), main);
  if (t.tile.ds_gmem && has_main(p, t) && p.dq) t.ds_offset = region("workspace.ds", t.ds_chunk_bytes, main);
  if (t.m_splits > 1 && (p.dk || p.dv)) {
    const int64_t n_blocks = has_main(p, t) ? int64_t{t.tile.ctas} * t.tiles / t.m_splits : 0;
    const int64_t floats = n_blocks * t.tile.dkv_floats * (t.tile.dkv_semaphores > 0 ? 1 : t.m_splits);
    t.dkv_semaphore_count = static_cast<int>(n_blocks * t.tile.dkv_semaphores);
    t.dkv_semaphore_offset =
        region("workspace.dkv_semaphore", t.dkv_semaphore_count * static_cast<int64_t>(sizeof(int)), delta);
    t.dkv_accum_offset = region("workspace.dkv_accum", floats * static_cast<int64_t>(sizeof(float)), main);
  }
  if (p.dsink) {
    t.dsink_offset = region("workspace.dsink", blocks * static_cast<int64_t>(sizeof(float)), delta);
  }
  if (p.dout.dtype == DType::f32) {
    const int64_t rows = p.packed_q() ? p.total_q : p.batch * p.seqlen_q;
    t.dout_offset = region("workspace.dout", rows * p.heads_q * p.head_dim_v * size_of(p.dtype), delta);
  }
  if (t.tile.captured) {
    const int64_t words = p.score_mod->cells * kCellWords;
    t.captured_offset = region("workspace.captured", words * static_cast<int64_t>(sizeof(uint64_t)), kMemset);
    plan->fills.push_back({t.captured_offset, plan->regions.back().bytes});
  }
  if (t.list_words > 0) {
    const int64_t rows = int64_t{t.list_batch} * t.list_heads * t.sequence_m_blocks;
    const int64_t lists = p.batch * p.heads_k * t.n_blocks, bytes = static_cast<int64_t>(sizeof(int));
    t.table_offset = region("workspace.table", rows * t.n_blocks * bytes, before_steps);
    t.steps_offset = region("workspace.steps", lists * t.list_words * bytes, main - 1);
  }
  plan->workspace_bytes = kWorkspaceAlignment - 1 + end;
}

}  // namespace tandem::plan
