// Every call that a GPU does not support, and the message of its refusal.
#include <gtest/gtest.h>

#include "plan/make_blocks.h"
#include "plan/plan.h"
#include "problem/bound_expression.h"
#include "unit/plan/problems.h"

namespace tandem::test {
namespace {

Problem served() { return dense({.batch = 2, .seqlen_q = 100, .seqlen_k = 200, .heads_q = 8, .heads_k = 2}); }

void refused(const Problem& p, const std::string& beginning, const gpu::Properties& device = hopper()) {
  const Status status = plan::check(p, device);
  EXPECT_EQ(status.code, TANDEM_UNSUPPORTED) << beginning;
  EXPECT_EQ(status.message.rfind(beginning, 0), 0u) << status.message;
  // first the rule, then the reason or remedy
  EXPECT_NE(status.message.find(": "), std::string::npos) << status.message;
}
void accepted(const Problem& p, const gpu::Properties& device = hopper()) {
  const Status status = plan::check(p, device);
  EXPECT_TRUE(status.ok()) << status.message;
}

TEST(PlanCheck, ServesTheUsual) {
  accepted(served());
  accepted(causal(served()));
  Problem p = served();
  p.dtype = DType::f16;
  p.softcap = 30;
  p.num_splits = 1;
  accepted(p);
  accepted(packed({.batch = 5, .seqlen_q = 100, .seqlen_k = 100}, 300, 400));
  accepted(dense({.batch = 0}));
  for (int64_t dim = 8; dim <= 256; dim += 8) {
    accepted(dense({.seqlen_q = 5, .seqlen_k = 5, .head_dim = dim, .head_dim_v = 264 - dim}));
  }
}

TEST(PlanCheck, OtherDevices) {
  gpu::Properties device = hopper();
  device.name = "Other";
  for (const auto& [major, minor] : {std::pair{8, 0}, {8, 9}, {9, 1}, {10, 1}, {11, 0}, {12, 0}}) {
    device.compute_major = major;
    device.compute_minor = minor;
    refused(served(),
            "device (Other, compute capability " + std::to_string(major) + "." + std::to_string(minor) + ") must",
            device);
  }
}

TEST(PlanCheck, Blackwells) {
  gpu::Properties device = blackwell();
  for (int64_t dim = 8; dim <= 256; dim += 8)
    accepted(dense({.seqlen_q = 5, .seqlen_k = 5, .head_dim = dim, .head_dim_v = 264 - dim}), device);
  device.compute_minor = 3;
  accepted(served(), device);
  Problem p = served();
  p.dropout.p = 0.5;
  accepted(p);
  accepted(p, device);
}

TEST(PlanCheck, Options) {
  const auto spoilt = [](void (*spoil)(Problem&)) {
    Problem p = served();
    spoil(p);
    return p;
  };
  refused(spoilt([](Problem& p) { p.dtype = DType::f32; }), "q.dtype (float32) must be bfloat16 or float16");
  refused(spoilt([](Problem& p) { p.dtype = DType::f64; }), "q.dtype (float64) must be bfloat16 or float16");
  refused(spoilt([](Problem& p) { p.page_table.present = true, p.page_table.page_size = 24; }),
          "k.page_size (24) must be a multiple of 16 on a GPU");
  refused(spoilt([](Problem& p) { p.page_table = {.batch = int64_t{1} << 31, .page_size = 16, .present = true}; }),
          "page_table.strides[0] (2147483648) must be below 2^31 on a GPU");
  refused(spoilt([](Problem& p) { p.page_table = {.page_size = 16, .present = true}, p.pass = TANDEM_BACKWARD; }),
          "page_table must be NULL in the backward");
  refused(spoilt([](Problem& p) { p.num_splits = 2, p.batch_invariant = true; }),
          "num_splits (2) must be 0 or 1 with batch_invariant");
}

Problem modified(const std::string& text, size_t tensors = 0, int64_t cells = 0) {
  return test::modified(served(), text, tensors, cells);
}

TEST(PlanCheck, Modifications) {
  accepted(modified("score * 2"));
  accepted(modified("score * 2", 8), blackwell());
  refused(modified("score", 9), "score_mod.tensor_count (9) must be at most 8 on a GPU");
  accepted(backward(modified("score + t0", 1, 1)));
  accepted(backward(modified("score + t0", 1, 1)), blackwell());
  Problem many = backward(modified("score + t0", 1, 1));
  many.heads_q = many.heads_k = int64_t{1} << 12;
  many.total_q = many.seqlen_q = many.seqlen_k = int64_t{1} << 14;
  refused(many, "score_mod.tensors[].gradient must be NULL on a GPU for 2^39 or more scores");
  many.total_q = int64_t{1} << 36, many.seqlen_k = int64_t{1} << 28;  // 2^64 for each head
  refused(many, "score_mod.tensors[].gradient must be NULL on a GPU for 2^39 or more scores");
  refused(backward(modified("score + t0", 1, (int64_t{1} << 38) + 1)),
          "score_mod.tensors[].gradient (274877906945 elements in total) must be at most 2^38 elements on a GPU: ");
}

TEST(PlanCheck, BlockMasks) {
  const auto blocks = [](int64_t block_q, int64_t block_k) {
    Problem p = served();
    p.block_mask.block_q = block_q;
    p.block_mask.block_k = block_k;
    p.block_mask.partial.present = true;
    return p;
  };
  const int64_t all = served().seqlen_k;
  accepted(blocks(64, 32));
  accepted(blocks(128, 384));
  accepted(blocks(int64_t{1} << 62, all));
  refused(blocks(96, 64), "mask_block_q (96) and mask_block_k (64) must be multiples of 64 and 32 on this GPU");
  refused(blocks(64, 48), "mask_block_q (64) and mask_block_k (48) must be multiples of 64 and 32 on this GPU");
  accepted(blocks(128, 256), blackwell());
  refused(blocks(64, 128), "mask_block_q (64) and mask_block_k (128) must be multiples of 128 and 128 on this GPU",
          blackwell());
  Problem padded = blocks(128, 128);
  padded.seqused_k.present = true;
  for (const gpu::Properties& device : {hopper(), blackwell()}) {
    accepted(padded, device);
    accepted(backward(padded), device);
  }
  for (const gpu::Properties& device : {hopper(), blackwell()}) accepted(backward(blocks(128, 128)), device);
  accepted(backward(blocks(64, 128)));
  refused(backward(blocks(64, 64)),
          "mask_block_q (64) and mask_block_k (64) must be multiples of 64 and 128 on this GPU");
}

TEST(PlanCheck, MakingBlockMasks) {
  MakeBlocksProblem m;
  m.mask_mod = modified("score").score_mod;
  m.batch = m.heads = 1;
  m.seqlen_q = 1 << 28;
  EXPECT_TRUE(plan::check_make_blocks(m, hopper()).ok());
  m.seqlen_q = (1 << 28) + 1;
  EXPECT_EQ(plan::check_make_blocks(m, blackwell()).message.rfind("seqlen_q (268435457) and seqlen_k (0) must be", 0),
            0u);
  m.seqlen_q = 1;
  m.batch = 1 << 16;
  m.blocks_q = 1 << 15;
  EXPECT_EQ(plan::check_make_blocks(m, hopper()).message.rfind("rows of lists (2147483648) must be below 2^31", 0), 0u);
}

// An expression selects the kernel; its values do not.
TEST(PlanCheck, KernelsOfModifications) {
  const auto kernel = [](const Problem& p) { return plan::make_plan(p, hopper()).kernels[0]; };
  const Problem one = modified("score * 2"), same = modified("score * 2"), other = modified("score * 3");
  const Problem plain = served();
  EXPECT_EQ(kernel(one).id, kernel(same).id);
  EXPECT_NE(kernel(one).id, kernel(other).id);
  EXPECT_NE(kernel(one).id, kernel(plain).id);
  EXPECT_NE(plan::name_of(kernel(one)), plan::name_of(kernel(other)));
  const std::string unit = plan::translation_unit(kernel(one));
  for (const char* part : {".score_mod = true", ".mask_mod = false", "float score_mod(", "float score_slope(",
                           "(const __grid_constant__ ModifiedForwardParams p)"}) {
    EXPECT_NE(unit.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(plan::translation_unit(kernel(plain)).find("Modified"), std::string::npos);
}

TEST(PlanCheck, Backward) {
  const auto spoilt = [](void (*spoil)(Problem&)) {
    Problem p = backward(served());
    spoil(p);
    return p;
  };
  accepted(backward(served()));
  accepted(backward(causal(served())));
  accepted(backward(served()), blackwell());
  accepted(backward(dense({.head_dim = 192})), blackwell());
  accepted(backward(dense({.head_dim_v = 256})), blackwell());
  refused(backward(dense({.head_dim = 264})), "q.head_dim (264) must be a multiple of 8 up to 256", blackwell());
  accepted(spoilt([](Problem& p) { p.accumulate = true; }));
  accepted(spoilt([](Problem& p) { p.diagonal_offsets.present = true; }));
  accepted(spoilt([](Problem& p) { p.out.dtype = p.dout.dtype = DType::f32; }));
  accepted(spoilt([](Problem& p) { p.dk = p.k, p.dk.dtype = DType::f32; }));
  accepted(spoilt([](Problem& p) { p.dropout.p = 0.5; }));
  accepted(spoilt([](Problem& p) { p.diagonal_offsets.present = true; }), blackwell());
  accepted(spoilt([](Problem& p) { p.out.dtype = p.dout.dtype = DType::f32; }), blackwell());
  accepted(spoilt([](Problem& p) { p.accumulate = true; }), blackwell());
  accepted(spoilt([](Problem& p) { p.dk = p.k, p.dk.dtype = DType::f32; }), blackwell());
  accepted(spoilt([](Problem& p) { p.dbias.present = true; }), blackwell());
  accepted(spoilt([](Problem& p) { p.dropout.p = 0.5; }), blackwell());
  refused(
      spoilt([](Problem& p) { p.dropout = {.p = 0.5, .seed_ptr = reinterpret_cast<const uint64_t*>(uintptr_t{4})}; }),
      "dropout_seed_ptr (address 4 modulo 64) must be a multiple of 8");
  refused(spoilt([](Problem& p) { p.dk.row = 12; }), "dk.strides[1] (12) must be a multiple of 8");
  refused(spoilt([](Problem& p) { p.dout.head = 12; }), "dout.strides[2] (12) must be a multiple of 8");
}

TEST(PlanCheck, HeadDims) {
  for (const int64_t dim : {1, 4, 20, 100, 255, 257, 264, 512}) {
    refused(dense({.head_dim = dim}), "q.head_dim (" + std::to_string(dim) + ") must be a multiple of 8 up to 256");
    refused(dense({.head_dim_v = dim}), "v.head_dim (" + std::to_string(dim) + ") must be a multiple of 8 up to 256");
  }
}

TEST(PlanCheck, StridesAndAddresses) {
  const struct {
    View Problem::*view;
    std::string name;
  } tensors[] = {{&Problem::q, "q"}, {&Problem::k, "k"}, {&Problem::v, "v"}, {&Problem::out, "out"}};
  for (const auto& tensor : tensors) {
    Problem p = served();
    View& view = p.*tensor.view;
    int i = 0;
    for (int64_t View::*stride : {&View::batch, &View::row, &View::head}) {
      const int64_t good = view.*stride;
      view.*stride = good + 4;
      const std::string place = tensor.name + ".strides[" + std::to_string(i++) + "] (";
      refused(p, place + std::to_string(good + 4) + ") must be a multiple of 8");
      view.*stride = int64_t{1} << 39;
      refused(p, place + "549755813888) must be");
      view.*stride = -good;
      refused(p, place + std::to_string(-good) + ") must be");
      view.*stride = 0;
      accepted(p);  // an expanded tensor
      view.*stride = good;
    }
    view.data = reinterpret_cast<std::byte*>(uintptr_t{0x1008});
    refused(p, tensor.name + ".data + byte_offset (address 8 modulo 64) must be a multiple of 16");
    view.data = reinterpret_cast<std::byte*>(uintptr_t{0x1010});
    accepted(p);
  }
  Problem p = packed({.batch = 2, .seqlen_q = 10, .seqlen_k = 10}, 20, 20);
  p.q.row = 12;
  refused(p, "q.strides[0] (12)");
  p.q.row = 16;
  p.v.head = 12;
  refused(p, "v.strides[1] (12)");
  p.v.head = 16;
  p.cu_seqlens_k.stride = int64_t{1} << 31;
  refused(p, "cu_seqlens_k.strides[0] (2147483648) must be below 2^31");

  Problem no_keys = dense({.seqlen_q = 5, .seqlen_k = 0});
  no_keys.k.data = no_keys.v.data = reinterpret_cast<std::byte*>(uintptr_t{0x1002});
  accepted(no_keys);
}

TEST(PlanCheck, Sizes) {
  accepted(dense({.seqlen_q = int64_t{1} << 28}));
  refused(dense({.seqlen_q = (int64_t{1} << 28) + 1}), "q.seqlen (268435457) times the query heads of a key head (1)");
  accepted(dense({.seqlen_q = int64_t{1} << 25, .heads_q = 8}));
  refused(dense({.seqlen_q = (int64_t{1} << 25) + 1, .heads_q = 8}), "q.seqlen (33554433) times the query heads of a");
  refused(dense({.seqlen_k = (int64_t{1} << 28) + 1}), "k.seqlen (268435457) must be at most 2^28");
  refused(dense({.batch = 1 << 20, .heads_q = 1 << 9}),
          "batch (1048576) and q.heads (512) must give fewer than 2^29 tiles");
  accepted(dense({.batch = 1 << 20, .heads_q = 1 << 8}));
  refused(backward(dense({.batch = 1 << 20, .heads_q = 1 << 6})),
          "batch (1048576) and q.heads (64) must give fewer than 2^27 tiles");
  accepted(backward(dense({.batch = 1 << 20, .heads_q = 1 << 5})));
}

}  // namespace
}  // namespace tandem::test
