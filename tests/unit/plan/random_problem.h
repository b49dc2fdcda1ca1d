// Random problems of every size, for tests of plans.
#pragma once

#include <algorithm>

#include "support/random.h"
#include "unit/plan/problems.h"

namespace tandem::test {

// Returns 0, 1, a number near the edges of tiles, or the maximum.
inline int64_t random_count(Random& r, int64_t most) {
  switch (r.between(0, 7)) {
    case 0: return r.between(0, 1);
    case 1: return most;
    case 2: return r.between(0, most);
    case 3: return std::min(most, int64_t{64} * r.between(0, 80) + r.between(0, 1));
    default: return std::min(most, int64_t{1} << r.between(0, 30)) + (r.chance(0.2) ? -1 : 0);
  }
}

inline int64_t random_dim(Random& r) {
  static constexpr int64_t kUsual[] = {64, 128, 192, 256};
  return r.chance(0.6) ? kUsual[r.between(0, 3)] : 8 * r.between(1, 32);
}

inline Problem random_problem(Random& r) {
  constexpr int64_t kLongest = int64_t{1} << 28;
  Sizes s;
  s.batch = random_count(r, r.chance(0.1) ? 1 << 20 : 64);
  s.heads_k = random_count(r, r.chance(0.1) ? 1 << 16 : 16);
  s.heads_q = s.heads_k * r.between(1, r.chance(0.5) ? 1 : 16);
  s.seqlen_q = random_count(r, r.chance(0.1) ? kLongest : 1 << 15);
  s.seqlen_k = r.chance(0.4) ? s.seqlen_q : random_count(r, r.chance(0.1) ? kLongest : 1 << 15);
  s.head_dim = random_dim(r);
  s.head_dim_v = r.chance(0.7) ? s.head_dim : random_dim(r);
  const bool is_packed = r.chance(0.2);
  Problem p = is_packed ? packed(s, std::min(s.batch * s.seqlen_q, random_count(r, kLongest)),
                                 std::min(s.batch * s.seqlen_k, random_count(r, kLongest)))
                        : dense(s);
  if (r.chance(0.7)) {
    p = backward(p);
    if (r.chance(0.1)) p.dq = {};
    if (r.chance(0.1)) p.dk = p.dv = {};
    if (r.chance(0.1)) p.dq.dtype = DType::f32;
    if (r.chance(0.1)) p.dout.dtype = DType::f32;
    if (r.chance(0.1)) p.dsink = {.dtype = DType::f32, .head = 1, .present = true};
    p.accumulate = r.chance(0.05);
  }
  if (r.chance(0.5)) p.window_right = r.chance(0.6) ? 0 : r.between(0, kLongest);
  if (r.chance(0.3)) p.window_left = r.between(0, r.chance(0.5) ? 2000 : kLongest);
  if (p.window_left != TANDEM_UNBOUNDED && p.window_right != TANDEM_UNBOUNDED && r.chance(0.3)) {
    const int64_t beyond = r.between(-kLongest, kLongest);  // the diagonal
    p.window_left += beyond, p.window_right -= beyond;
  }
  if (r.chance(0.2)) p.bottom_right = false;
  if (!p.bottom_right && r.chance(0.5)) p.diagonal_offset = r.between(-kFarDiagonal, kFarDiagonal);
  if (r.chance(0.1)) p.softcap = 30;
  if (r.chance(0.1)) p.alibi_slopes = {.dtype = DType::f32, .head = 1, .present = true};
  if (r.chance(0.1)) p.dropout.p = 0.5;
  if (r.chance(0.1)) p.seqused_k.present = true;
  if (r.chance(0.1)) p.bias = {.dtype = DType::bf16, .shape = {1, 1, 1, p.seqlen_k}, .present = true};
  if (p.bias && p.pass == TANDEM_BACKWARD && r.chance(0.5)) p.dbias = p.bias;
  p.batch_invariant = r.chance(0.1);
  if (r.chance(0.2) && !p.batch_invariant) p.num_splits = static_cast<int32_t>(r.between(2, 40));
  if (r.chance(0.1)) p.sm_limit = static_cast<int32_t>(r.between(1, 200));
  return p;
}

// The engine's check before it plans.
inline bool writes_something(const Problem& p) {
  const bool queries = p.total_q > 0 && p.heads_q > 0, keys = p.total_k > 0 && p.heads_k > 0;
  if (p.pass == TANDEM_FORWARD) return queries;
  return (p.dq && queries) || ((p.dk || p.dv) && keys) || p.dbias || p.dsink;
}

}  // namespace tandem::test
