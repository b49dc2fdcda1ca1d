// Calls that are valid although they look unusual, and the contents of their Problem.
#include <gtest/gtest.h>

#include <cmath>

#include "unit/problem/call.h"

namespace tandem::test {
namespace {

// A flipped tensor lies below its first element.
TEST(Accepted, NegativeStrides) {
  Call call;
  call.dense();
  call.k.set_strides({80, -16, 8, 1});
  call.k.handle.byte_offset = 4 * 16 * sizeof(float);
  call.bias.set_strides({0, 15, 5, -1});
  call.bias.handle.byte_offset = 4 * sizeof(float);
  call.out.set_strides({72, -24, 6, 1});
  call.out.handle.byte_offset = 2 * 24 * sizeof(float);
  Problem p;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  EXPECT_EQ(p.k.at(0, 4, 0), static_cast<std::byte*>(call.k.handle.data));
  EXPECT_EQ(p.bias.at(0, 0, 0, 4), static_cast<std::byte*>(call.bias.handle.data));
  call.out.lie_in(call.k, 0);
  call.out.set_strides({72, -24, 6, 1});
  call.out.handle.byte_offset = 2 * 24 * sizeof(float);
  EXPECT_NE(call.refusal().find("overlaps"), std::string::npos) << call.refusal();
}

// Bounds near the limits of int64 must satisfy the rule on their sum before clamping.
TEST(Accepted, WindowsNearTheLimits) {
  constexpr int64_t far = INT64_MAX - 1, half = int64_t{1} << 62;
  const struct {
    int64_t left, right;
    const char* refusal;  // empty: valid
  } cases[] = {{far, -far, ""},
               {-far, far, ""},
               {half, -half, ""},
               {half, -half - 1, "window_left (4611686018427387904) + window_right (-4611686018427387905)"},
               {half, -far, "window_left (4611686018427387904) + window_right (-9223372036854775806)"},
               {INT64_MIN, 0, "window_left (-9223372036854775808) + window_right (0)"},
               {INT64_MIN, INT64_MIN, "window_left (-9223372036854775808) + window_right (-9223372036854775808)"},
               {3, -4, "window_left (3) + window_right (-4)"}};
  for (const auto& [left, right, refusal] : cases) {
    Call call;
    call.dense();
    call.args.causal = 0;
    call.args.window = TANDEM_WINDOW_LEFT | TANDEM_WINDOW_RIGHT;
    call.args.window_left = left;
    call.args.window_right = right;
    EXPECT_NE(call.refusal().find(*refusal != 0 ? refusal : "accepted"), std::string::npos) << call.refusal();
  }
}

TEST(Accepted, DenseProblem) {
  Call call;
  call.dense();
  call.pass = TANDEM_BACKWARD;
  Problem p;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.heads_q, 4);
  EXPECT_EQ(p.heads_k, 2);
  EXPECT_EQ(p.group(), 2);
  EXPECT_EQ(p.seqlen_q, 3);
  EXPECT_EQ(p.seqlen_k, 5);
  EXPECT_EQ(p.total_q, 6);
  EXPECT_EQ(p.total_k, 10);
  EXPECT_EQ(p.head_dim, 8);
  EXPECT_EQ(p.head_dim_v, 6);
  EXPECT_DOUBLE_EQ(p.softmax_scale, 1 / std::sqrt(8.0));
  EXPECT_EQ(p.q.at(1, 2, 3), static_cast<std::byte*>(call.q.handle.data) + (96 + 2 * 32 + 3 * 8) * 4);
  EXPECT_EQ(p.lse.at(1, 2, 3), static_cast<std::byte*>(call.lse.handle.data) + (12 + 2 + 3 * 3) * 4);
  EXPECT_EQ(p.bias.stride[0], 0);
  EXPECT_EQ(p.bias.at(1, 2, 1, 4), static_cast<std::byte*>(call.bias.handle.data) + (30 + 5 + 4) * 4);
  EXPECT_EQ(p.alibi_slopes.at(1, 3), static_cast<std::byte*>(call.alibi_slopes.handle.data) + 7 * 4);
  EXPECT_EQ(p.sink.at(1, 3), static_cast<std::byte*>(call.sink.handle.data) + 3 * 4);
  const Sequence s = sequence_of(p, 1);
  EXPECT_EQ(s.batch_index, 1);
  EXPECT_EQ(s.q_len, 2);
  EXPECT_EQ(s.q_rows, 3);
  EXPECT_EQ(s.k_len, 5);
  EXPECT_EQ(s.diagonal, 3);
  EXPECT_FALSE(p.banded());
}

TEST(Accepted, PackedProblem) {
  Call call;
  call.packed();
  call.args.max_seqlen_k = 5;
  Problem p;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.total_q, 5);
  EXPECT_EQ(p.seqlen_q, 5);  // max_seqlen_q is absent: the total bounds the length
  EXPECT_EQ(p.seqlen_k, 5);
  EXPECT_EQ(p.q.batch, 0);
  EXPECT_EQ(p.q.at(1, 4, 1), static_cast<std::byte*>(call.q.handle.data) + (4 * 32 + 8) * 4);
  EXPECT_EQ(p.lse.at(1, 4, 1), static_cast<std::byte*>(call.lse.handle.data) + (5 + 4) * 4);
  const Sequence s = sequence_of(p, 1);
  EXPECT_EQ(s.q_begin, 2);
  EXPECT_EQ(s.q_rows, 3);
  EXPECT_EQ(s.q_len, 2);
  EXPECT_EQ(s.k_begin, 3);
  EXPECT_EQ(s.k_len, 4);

  // A call and its workspace_size see the same bounds.
  call.with_data = false;
  Problem without;
  ASSERT_TRUE(call.make(&without).ok());
  EXPECT_EQ(without.seqlen_q, p.seqlen_q);
  EXPECT_EQ(without.seqlen_k, p.seqlen_k);
}

TEST(Accepted, PagedProblem) {
  Call call;
  call.paged();
  Problem p;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  EXPECT_EQ(p.seqlen_k, 12);
  EXPECT_EQ(p.page_table.page_size, 4);
  EXPECT_EQ(p.page_table.pages, 6);
  EXPECT_EQ(sequence_of(p, 1).k_len, 9);

  call.args.max_seqlen_k = 10;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  EXPECT_EQ(p.seqlen_k, 10);
}

TEST(Accepted, Window) {
  Call call;
  call.dense();
  call.args.seqused_q = call.args.seqused_k = nullptr;
  call.args.window = TANDEM_WINDOW_LEFT | TANDEM_WINDOW_RIGHT;
  call.args.window_left = 1;
  call.args.window_right = 0;
  Problem p;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  KeySpan keys = visible_keys(p, sequence_of(p, 0), 1);  // the diagonal is 2: keys 2 and 3
  EXPECT_EQ(keys.begin, 2);
  EXPECT_EQ(keys.end, 4);

  call.args.alignment = TANDEM_TOP_LEFT;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  keys = visible_keys(p, sequence_of(p, 0), 1);
  EXPECT_EQ(keys.begin, 0);
  EXPECT_EQ(keys.end, 2);

  // A causal call uses the smaller bound.
  call.args.causal = 1;
  call.args.window_right = 3;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  EXPECT_EQ(p.window_right, 0);
  call.args.window_right = -1;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  EXPECT_EQ(p.window_right, -1);

  // The constant means no bound, with its bit or without. Very large bounds have no effect.
  call.args.causal = 0;
  call.args.window_left = call.args.window_right = TANDEM_UNBOUNDED;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  EXPECT_FALSE(p.banded());
  call.args.window = 0;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  EXPECT_FALSE(p.banded());
  call.args.window = TANDEM_WINDOW_LEFT | TANDEM_WINDOW_RIGHT;
  call.args.window_left = 1 - INT64_MAX;
  call.args.window_right = INT64_MAX - 1;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  keys = visible_keys(p, sequence_of(p, 0), 2);
  EXPECT_EQ(keys.begin, keys.end);
  call.args.window_left = INT64_MAX - 1;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  keys = visible_keys(p, sequence_of(p, 0), 2);
  EXPECT_EQ(keys.begin, 0);
  EXPECT_EQ(keys.end, 5);
}

TEST(Accepted, Options) {
  Call call;
  call.dense();
  call.args.softmax_scale = -0.25;
  call.args.softcap = 30;
  call.args.dropout_p = 0.25;
  call.args.dropout_seed = 1;
  call.args.dropout_offset = 2;
  Problem p;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  EXPECT_EQ(p.softmax_scale, -0.25);
  EXPECT_EQ(p.softcap, 30);
  EXPECT_EQ(p.dropout.seed, 1u);
  EXPECT_EQ(p.dropout.offset, 2u);
  call.args.dropout_seed_ptr = &call.seed;
  call.args.dropout_offset_ptr = &call.offset;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  EXPECT_EQ(p.dropout.seed, 7u);
  EXPECT_EQ(p.dropout.offset, 9u);
}

TEST(Accepted, Types) {
  for (const tandem_dtype t : {kF64, kF32, kF16, kBf16}) {
    Call call;
    call.dense();
    call.pass = TANDEM_BACKWARD;
    const std::vector<Held*> typed = {&call.q,  &call.k,  &call.v,    &call.out,   &call.dout, &call.dq,
                                      &call.dk, &call.dv, &call.bias, &call.dbias, &call.sink, &call.dsink};
    for (Held* held : typed) held->make(held->shape, t);
    EXPECT_EQ(call.refusal(), "accepted");
    if (t.bits == 64) {
      call.lse.make({2, 4, 3}, kF64);
      EXPECT_EQ(call.refusal(), "accepted");
    }
    call.bias.make({2, 1, 1, 5}, kBool);
    call.args.dbias = nullptr;
    EXPECT_EQ(call.refusal(), "accepted");
  }
}

TEST(Accepted, HeadDims) {
  for (const int64_t dim : {1, 2, 7, 511, 512}) {
    Call call;
    call.dense();
    call.q.make({2, 3, 4, dim}, kF16);
    call.k.make({2, 5, 2, dim}, kF16);
    call.v.make({2, 5, 2, 513 - dim}, kF16);
    call.out.make({2, 3, 4, 513 - dim}, kF16);
    EXPECT_EQ(call.refusal(), "accepted");
  }
}

TEST(Accepted, NothingToDo) {
  for (const int64_t batch : {0, 2}) {
    for (const int64_t sq : {0, 3}) {
      for (const int64_t sk : {0, 5}) {
        for (const int64_t heads : {0, 2}) {
          Call call;
          call.dense();
          call.pass = TANDEM_BACKWARD;
          call.q.make({batch, sq, 2 * heads, 8}, kF32);
          call.k.make({batch, sk, heads, 8}, kF32);
          call.v.make({batch, sk, heads, 6}, kF32);
          call.out.make({batch, sq, 2 * heads, 6}, kF32);
          call.dout.make({batch, sq, 2 * heads, 6}, kF32);
          call.lse.make({batch, 2 * heads, sq}, kF32);
          call.dlse.make({batch, 2 * heads, sq}, kF32);
          call.dq.make(call.q.shape, kF32);
          call.dk.make(call.k.shape, kF32);
          call.dv.make(call.v.shape, kF32);
          call.bias.make({batch, 1, sq, sk}, kF32);
          call.dbias.make({batch, 1, sq, sk}, kF32);
          call.sink.make({2 * heads}, kF32);
          call.dsink.make({2 * heads}, kF32);
          call.alibi_slopes.make({batch, 2 * heads}, kF32);
          call.seqused_q.make(std::vector<int32_t>(static_cast<size_t>(batch)));
          call.seqused_k.make(std::vector<int32_t>(static_cast<size_t>(batch)));
          // A tensor without elements needs no memory.
          for (Held* held : {&call.q, &call.k, &call.out, &call.dk, &call.seqused_q}) {
            for (const int64_t size : held->shape) {
              if (size == 0) held->handle.data = nullptr;
            }
          }
          EXPECT_EQ(call.refusal(), "accepted") << batch << sq << sk << heads;
        }
      }
    }
  }
}

TEST(Accepted, EmptyBatchPacked) {
  Call call;
  call.packed();
  call.q.make({0, 4, 8}, kF32);
  call.k.make({0, 2, 8}, kF32);
  call.v.make({0, 2, 6}, kF32);
  call.out.make({0, 4, 6}, kF32);
  call.lse.make({4, 0}, kF32);
  call.cu_seqlens_q.make({0});
  call.cu_seqlens_k.make({0});
  call.seqused_q.make(std::vector<int32_t>{});
  call.seqused_k.make(std::vector<int32_t>{});
  call.args.alibi_slopes = nullptr;
  EXPECT_EQ(call.refusal(), "accepted");
}

// Frameworks store any value in the stride of a dimension of size 1.
TEST(Accepted, StridesOfSizeOne) {
  Call call;
  call.dense();
  call.pass = TANDEM_BACKWARD;
  for (Held* held : {&call.q, &call.k, &call.v, &call.out, &call.dout, &call.dq, &call.dk, &call.dv}) {
    held->make({1, 3, 1, 1}, kF32);
    held->set_strides({INT64_MAX, 1, -5, 7});
  }
  for (Held* held : {&call.lse, &call.dlse}) {
    held->make({1, 1, 3}, kF32);
    held->set_strides({-1, 0, 1});
  }
  call.args.bias = call.args.dbias = nullptr;
  call.sink.make({1}, kF32);
  call.dsink.make({1}, kF32);
  call.alibi_slopes.make({1, 1}, kF32);
  call.alibi_slopes.set_strides({INT64_MIN, INT64_MAX});
  call.seqused_q.make({3});
  call.seqused_k.make({2});
  call.seqused_k.set_strides({-9});
  EXPECT_EQ(call.refusal(), "accepted");
  Problem p;
  ASSERT_TRUE(call.make(&p).ok());
  EXPECT_EQ(p.q.batch, 0);
  EXPECT_EQ(p.q.head, 0);
  EXPECT_EQ(p.q.row, 1);
}

TEST(Accepted, Layouts) {
  Call call;
  call.dense();
  call.q.set_strides({96, 8, 24, 1});    // (batch, heads, seqlen, head_dim)
  call.out.set_strides({72, 6, 18, 1});  // outputs may have this layout, too
  call.k.set_strides({0, 16, 8, 1});     // one sequence of keys for the whole batch
  call.v.set_strides({0, 6, 0, 1});      // one key head for all heads
  call.lse.set_strides({12, 1, 4});      // (batch, seqlen, heads)
  call.bias.set_strides({0, 0, 0, 1});
  call.seqused_k.make({5, 9, 3, 9});
  call.seqused_k.shape = {2};
  call.seqused_k.handle.shape = call.seqused_k.shape.data();
  call.seqused_k.set_strides({2});
  EXPECT_EQ(call.refusal(), "accepted");
  Problem p;
  ASSERT_TRUE(call.make(&p).ok());
  EXPECT_EQ(sequence_of(p, 1).k_len, 3);
}

TEST(Accepted, ByteOffset) {
  Call call;
  call.dense();
  call.q.memory.resize(200);
  call.q.handle.data = call.q.memory.data();
  call.q.handle.byte_offset = 12;
  Problem p;
  ASSERT_TRUE(call.make(&p).ok()) << call.refusal();
  EXPECT_EQ(p.q.data, reinterpret_cast<std::byte*>(call.q.memory.data()) + 12);
}

// q, k and v, and their gradients, as frameworks split them from one projection: along the row, or within each head.
TEST(Accepted, InterleavedGradients) {
  for (const bool by_head : {false, true}) {
    for (const int64_t shift : {0, 1}) {
      Call call;
      call.dense();
      call.pass = TANDEM_BACKWARD;
      call.args.bias = call.args.dbias = nullptr;
      call.args.seqused_q = call.args.seqused_k = nullptr;
      Held inputs, gradients;
      inputs.make({2, 5, 3, 4, 8}, kF32);
      gradients.make({2, 5, 3, 4, 8}, kF32);
      const int64_t apart = by_head ? 8 : 32;
      const auto split = [&](Held& held, const Held& whole, int64_t part) {
        held.make({2, 5, 4, 8}, kF32);
        held.set_strides({480, 96, by_head ? 24 : 8, 1});
        held.lie_in(whole, part * apart - (part == 2 ? shift : 0));
      };
      split(call.q, inputs, 0), split(call.k, inputs, 1), split(call.v, inputs, 2);
      split(call.dq, gradients, 0), split(call.dk, gradients, 1), split(call.dv, gradients, 2);
      for (Held* held : {&call.out, &call.dout}) held->make({2, 5, 4, 8}, kF32);
      for (Held* held : {&call.lse, &call.dlse}) held->make({2, 4, 5}, kF32);
      if (shift == 0) {
        EXPECT_EQ(call.refusal(), "accepted");
      } else {
        const std::string bytes = std::to_string(4 * (shift - apart));
        EXPECT_NE(call.refusal().find("dk.data (byte " + bytes + " from dv.data) overlaps dv"), std::string::npos)
            << call.refusal();
      }
    }
  }
}

// The first three functions of the interface may be called before the tensors are allocated.
TEST(Accepted, WithoutData) {
  for (const auto base : {&Call::dense, &Call::packed, &Call::paged}) {
    Call call;
    (call.*base)();
    call.with_data = false;
    for (Held* held : {&call.q, &call.k, &call.v, &call.out, &call.lse, &call.cu_seqlens_q, &call.cu_seqlens_k,
                       &call.seqused_q, &call.seqused_k, &call.page_table, &call.sink, &call.bias}) {
      held->handle.data = nullptr;
      held->handle.byte_offset = 1;
    }
    call.args.dropout_p = 0.5;
    call.args.dropout_seed_ptr = reinterpret_cast<const uint64_t*>(uintptr_t{8});
    EXPECT_EQ(call.refusal(), "accepted");
  }
}

// The forward pass does not read the arguments that only the backward pass needs.
TEST(Accepted, ForwardIgnoresGradients) {
  Call call;
  call.dense();
  call.dq.handle.dtype = {99, 1, 0};
  call.dq.handle.shape = nullptr;
  call.dout.handle.ndim = -1;
  call.args.dbias = &call.q.handle;
  EXPECT_EQ(call.refusal(), "accepted");
}

TEST(Accepted, GradientsAreOptional) {
  Call call;
  call.dense();
  call.pass = TANDEM_BACKWARD;
  call.args.dq = call.args.dk = call.args.dv = call.args.dbias = call.args.dsink = call.args.dlse = nullptr;
  EXPECT_EQ(call.refusal(), "accepted");
}

// Index tensors of another device are never read, because their data is no address of the host.
TEST(Accepted, DeviceDataIsNotRead) {
  Call call;
  call.packed();
  call.device = {TANDEM_CUDA, 1};
  uintptr_t address = uintptr_t{1} << 40;
  for (Held* held : {&call.q, &call.k, &call.v, &call.out, &call.lse, &call.sink, &call.alibi_slopes,
                     &call.cu_seqlens_q, &call.cu_seqlens_k, &call.seqused_q, &call.seqused_k}) {
    held->handle.device = call.device;
    held->handle.data = reinterpret_cast<void*>(address += 1 << 20);
  }
  call.args.max_seqlen_q = call.args.max_seqlen_k = 4;
  call.args.dropout_p = 0.5;
  call.args.dropout_seed_ptr = reinterpret_cast<const uint64_t*>(address);
  EXPECT_EQ(call.refusal(), "accepted");
}

}  // namespace
}  // namespace tandem::test
