// Problems and devices for tests of plans, without tensors.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "gpu/device.h"
#include "problem/bound_expression.h"
#include "problem/problem.h"

namespace tandem::test {

struct Sizes {
  int64_t batch = 1, seqlen_q = 1, seqlen_k = 1, heads_q = 1, heads_k = 1, head_dim = 128, head_dim_v = 128;
};

inline View compact(int64_t seqlen, int64_t heads, int64_t dim, bool packed = false) {
  View view;
  view.dtype = DType::bf16;
  view.head = dim;
  view.row = heads * dim;
  view.batch = packed ? 0 : seqlen * heads * dim;
  view.present = true;
  return view;
}

inline Problem dense(const Sizes& s) {
  Problem p;
  p.dtype = DType::bf16;
  p.batch = s.batch;
  p.heads_q = s.heads_q;
  p.heads_k = s.heads_k;
  p.seqlen_q = s.seqlen_q;
  p.seqlen_k = s.seqlen_k;
  p.total_q = s.batch * s.seqlen_q;
  p.total_k = s.batch * s.seqlen_k;
  p.head_dim = s.head_dim;
  p.head_dim_v = s.head_dim_v;
  p.q = compact(s.seqlen_q, s.heads_q, s.head_dim);
  p.k = compact(s.seqlen_k, s.heads_k, s.head_dim);
  p.v = compact(s.seqlen_k, s.heads_k, s.head_dim_v);
  p.out = compact(s.seqlen_q, s.heads_q, s.head_dim_v);
  p.softmax_scale = 0.125;
  return p;
}

// seqlen_q and seqlen_k are the longest lengths.
inline Problem packed(const Sizes& s, int64_t total_q, int64_t total_k) {
  Problem p = dense(s);
  p.total_q = total_q;
  p.total_k = total_k;
  for (View* view : {&p.q, &p.k, &p.v, &p.out}) view->batch = 0;
  p.cu_seqlens_q.present = p.cu_seqlens_k.present = true;
  return p;
}

inline Problem causal(Problem p) {
  p.window_right = 0;
  return p;
}

// All gradients of a dense problem.
inline Problem backward(Problem p) {
  p.pass = TANDEM_BACKWARD;
  p.dout = p.out;
  p.dq = p.q;
  p.dk = p.k;
  p.dv = p.v;
  p.lse = {.dtype = DType::f32, .batch = p.heads_q * p.seqlen_q, .row = 1, .head = p.seqlen_q, .present = true};
  return p;
}

// Adds an expression over `tensors` tensors, whose gradients have `cells` elements.
inline Problem modified(Problem p, const std::string& text, size_t tensors, int64_t cells) {
  score_mod::Signature names;
  for (size_t n = 0; n < tensors; ++n) {
    names.tensors.push_back({"t" + std::to_string(n), score_mod::Type::real, 0, score_mod::Element::f32});
  }
  const auto mod = std::make_shared<BoundExpression>();
  mod->cells = cells;
  EXPECT_TRUE(score_mod::read_program(text, names, &mod->program).ok());
  p.score_mod = {.present = true, .read = mod};
  return p;
}

inline gpu::Properties hopper() {
  gpu::Properties p;
  p.name = "NVIDIA H200";
  p.compute_major = 9;
  p.sm_count = 132;
  p.max_dynamic_smem_bytes = 232448;
  p.driver_version = 13000;
  p.l2_bytes = int64_t{50} << 20;
  return p;
}

inline gpu::Properties blackwell() {
  gpu::Properties p = hopper();
  p.name = "NVIDIA B200";
  p.compute_major = 10;
  p.sm_count = 148;
  p.l2_bytes = int64_t{126} << 20;
  return p;
}

inline Problem with_blocks(Problem p, int64_t block_q, int64_t block_k, int64_t heads = 1) {
  p.block_mask.block_q = block_q;
  p.block_mask.block_k = block_k;
  p.block_mask.partial = {.shape = {1, heads, 8, 4}, .count_shape = {1, 1, 8}, .present = true};
  return p;
}

}  // namespace tandem::test
