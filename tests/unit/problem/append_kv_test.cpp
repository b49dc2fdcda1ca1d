// Every rule of an append is broken once, and valid calls are accepted.
#include "problem/append_kv.h"

#include <gtest/gtest.h>

#include "unit/problem/call.h"

namespace tandem::test {
namespace {

constexpr tandem_dtype kI64{TANDEM_INT, 64, 1};

// Two sequences of 3 new keys and queries, in pages of 4.
struct Append {
  Held k, v, k_cache, v_cache, q, q_out, table, seqlens, batch_idx, sums, cos, sin, offsets, slots, positions;
  tandem_append_kv_args args{};

  Append() {
    k.make({2, 3, 2, 8}, kF32), v.make({2, 3, 2, 6}, kF32);
    k_cache.make({6, 4, 2, 8}, kF32), v_cache.make({6, 4, 2, 6}, kF32);
    q.make({2, 3, 4, 8}, kF32), q_out.make({2, 3, 4, 8}, kF32);
    table.make({2, 3}, kI32), seqlens.make({2}, kI32), batch_idx.make({2}, kI32), sums.make({3}, kI32);
    cos.make({12, 4}, kF32), sin.make({12, 4}, kF32), offsets.make({2}, kI32);
    slots.make({5}, kI64), positions.make({5}, kI64);
    args.size = sizeof args;
    args.k = &k.handle, args.v = &v.handle, args.k_cache = &k_cache.handle, args.v_cache = &v_cache.handle;
    args.page_table = &table.handle, args.cache_seqlens = &seqlens.handle;
    args.q = &q.handle, args.q_out = &q_out.handle;
    args.rotary_cos = &cos.handle, args.rotary_sin = &sin.handle;
  }
  Append(const Append&) = delete;

  // 5 tokens with slots, of 6 rows.
  void by_slot() {
    k.make({6, 2, 8}, kF32), v.make({6, 2, 6}, kF32), q.make({6, 4, 8}, kF32), q_out.make({6, 4, 8}, kF32);
    args.page_table = args.cache_seqlens = nullptr;
    args.slot_mapping = &slots.handle, args.positions = &positions.handle;
  }

  std::string refusal() const {
    AppendKvProblem problem;
    const Status status = make_append_kv_problem(&args, {TANDEM_CPU, 0}, &problem);
    return status.ok() ? "accepted" : status.message;
  }
};

struct Rule {
  void (*spoil)(Append&);
  const char* says;
};

const Rule rules[] = {
    {[](Append& a) { a.args.size = 8; }, "args.size (8) must be sizeof(tandem_append_kv_args)"},
    {[](Append& a) { a.args.v = nullptr; }, "v (NULL) must be given with k"},
    {[](Append& a) { a.args.k = nullptr; }, "k (NULL) must be given with v"},
    {[](Append& a) { a.args.v_cache = nullptr; }, "v_cache (NULL) must be given with k"},
    {[](Append& a) { a.args.q_out = nullptr; }, "q_out (NULL) must be given with q"},
    {[](Append& a) { a.args.rotary_sin = nullptr; }, "rotary_sin (NULL) must be given with rotary_cos"},
    {[](Append& a) { a.args.rotary_cos = a.args.rotary_sin = nullptr; }, "rotary_cos (NULL) must be given with q"},
    {[](Append& a) {
       a.args.rotary_cos = a.args.rotary_sin = a.args.q = a.args.q_out = nullptr;
       a.args.rotary_seqlens = &a.offsets.handle;
     },
     "rotary_seqlens must be NULL with rotary_cos (NULL)"},
    {[](Append& a) { a.args.k = a.args.v = a.args.k_cache = a.args.v_cache = nullptr; },
     "page_table must be NULL with k (NULL)"},
    {[](Append& a) { a.args.k = a.args.v = a.args.k_cache = a.args.v_cache = a.args.q = a.args.q_out = nullptr; },
     "k and q (NULL) must not both be NULL"},
    {[](Append& a) { a.args.slot_mapping = &a.slots.handle; }, "page_table must be NULL with slot_mapping"},
    {[](Append& a) { a.by_slot(), a.args.slot_mapping = nullptr; }, "slot_mapping (NULL) must be given with k"},
    {[](Append& a) { a.by_slot(), a.args.positions = nullptr; }, "positions (NULL) must be given with rotary_cos"},
    {[](Append& a) { a.by_slot(), a.args.single_q_position = 1; }, "single_q_position (1) must be 0 with positions"},
    {[](Append& a) { a.by_slot(), a.positions.make({4}, kI64); },
     "positions.length (4) must equal slot_mapping.length (5)"},
    {[](Append& a) {
       a.by_slot(), a.k.make({4, 2, 8}, kF32), a.v.make({4, 2, 6}, kF32);
     },
     "k.total (4) must be at least slot_mapping.length (5)"},
    {[](Append& a) { a.by_slot(), a.slots.make({5}, kI32); }, "slot_mapping.dtype (int32) must be int64"},
    {[](Append& a) {
       a.k.make({6, 2, 8}, kF32);
     },
     "k.ndim (3) must be 4"},
    {[](Append& a) {
       a.k.make({2, 3, 2, 8}, kI32);
     },
     "k.dtype (int32) must be float32"},
    {[](Append& a) {
       a.v.make({2, 3, 2, 6}, kBf16);
     },
     "v.dtype (bfloat16) must be float32"},
    {[](Append& a) {
       a.v.make({2, 4, 2, 6}, kF32);
     },
     "v.seqlen (4) must equal k.seqlen (3)"},
    {[](Append& a) {
       a.v.make({2, 3, 3, 6}, kF32);
     },
     "v.heads (3) must equal k.heads (2)"},
    {[](Append& a) {
       a.k.make({2, 3, 2, 520}, kF32);
     },
     "k.head_dim (520) must be 1 to 512"},
    {[](Append& a) {
       a.k_cache.make({6, 4, 2, 9}, kF32);
     },
     "k_cache.head_dim (9) must equal k.head_dim (8)"},
    {[](Append& a) {
       a.v_cache.make({6, 5, 2, 6}, kF32);
     },
     "v_cache.page_size (5) must equal k_cache.page_size (4)"},
    {[](Append& a) {
       a.v_cache.make({6, 4, 2, 6}, kBf16);
     },
     "v_cache.dtype (bfloat16) must be float32"},
    {[](Append& a) {
       a.k_cache.set_strides({64, 16, 0, 1});
     },
     "make its elements overlap"},
    {[](Append& a) {
       a.k_cache.set_strides({64, 16, 1, 2});
     },
     "k_cache.strides[3] (2) must be 1"},
    {[](Append& a) {
       a.q.make({3, 3, 4, 8}, kF32);
     },
     "q.batch (3) must be the number of sequences in k (2)"},
    {[](Append& a) {
       a.q.make({2, 3, 4, 6}, kF32);
     },
     "q.head_dim (6) must equal k.head_dim (8)"},
    {[](Append& a) {
       a.q_out.make({2, 3, 4, 8}, kBf16);
     },
     "q_out.dtype (bfloat16) must be float32"},
    {[](Append& a) { a.seqlens.make({3}, kI32); }, "cache_seqlens.batch (3) must be 2"},
    {[](Append& a) {
       a.table.make({3, 3}, kI32);
     },
     "page_table.batch (3) must be 2"},
    {[](Append& a) {
       a.args.page_table = nullptr, a.k_cache.make({1, 4, 2, 8}, kF32), a.v_cache.make({1, 4, 2, 6}, kF32);
     },
     "k_cache.rows (1) must be at least the number of sequences (2)"},
    {[](Append& a) { a.args.cu_seqlens_new = &a.sums.handle; }, "k.ndim (4) must be 3"},
    {[](Append& a) { a.sums.make({0}, kI32), a.args.cu_seqlens_new = &a.sums.handle; },
     "cu_seqlens_new.length (0) must be at least 1"},
    {[](Append& a) {
       a.sin.make({11, 4}, kF32);
     },
     "rotary_sin.table_rows (11) must equal rotary_cos.table_rows (12)"},
    {[](Append& a) {
       a.cos.make({12, 5}, kF32), a.sin.make({12, 5}, kF32);
     },
     "rotary_cos.columns (5) must be at most head_dim / 2, with head_dim (8)"},
    {[](Append& a) {
       a.cos.make({12, 4}, kBf16);
     },
     "rotary_cos.dtype (bfloat16) must be float32"},
    {[](Append& a) {
       a.k_cache.handle.device = {TANDEM_CUDA, 0};
     },
     "k_cache.device (type 2"},
    {[](Append& a) { a.k.lie_in(a.k_cache, 8); }, "k_cache.data overlaps k"},
    {[](Append& a) { a.v_cache.lie_in(a.k_cache, 0); }, "k_cache.data overlaps v_cache"},
    {[](Append& a) { a.q_out.lie_in(a.q, 8); }, "q_out.data overlaps q"},
};

TEST(AppendKvRules, EachIsRefusedWithASentence) {
  for (const Rule& rule : rules) {
    Append append;
    ASSERT_EQ(append.refusal(), "accepted");
    rule.spoil(append);
    EXPECT_NE(append.refusal().find(rule.says), std::string::npos) << append.refusal() << "\n  wanted: " << rule.says;
  }
  AppendKvProblem problem;
  EXPECT_NE(make_append_kv_problem(nullptr, {TANDEM_CPU, 0}, &problem).message.find("args (NULL)"), std::string::npos);
}

TEST(AppendKvRules, ValidCallsAreAccepted) {
  Append append;
  append.q_out.lie_in(append.q, 0);
  EXPECT_EQ(append.refusal(), "accepted");
  append.args.cache_batch_idx = &append.batch_idx.handle, append.table.make({5, 3}, kI32);
  EXPECT_EQ(append.refusal(), "accepted");
  Append slots;
  slots.by_slot();
  EXPECT_EQ(slots.refusal(), "accepted");
  Append rotation;
  rotation.args.k = rotation.args.v = rotation.args.k_cache = rotation.args.v_cache = rotation.args.page_table =
      nullptr;
  EXPECT_EQ(rotation.refusal(), "accepted");
}

}  // namespace
}  // namespace tandem::test
