// Compilation before serving starts: the fake device counts the kernels that are loaded.
#include "support/random.h"
#include "unit/engine/gpu_call.h"

namespace tandem::test {
namespace {

constexpr Sizes kMost{
    .batch = 6, .seqlen_q = 300, .seqlen_k = 700, .heads_q = 4, .heads_k = 2, .head_dim = 64, .head_dim_v = 64};

TEST_F(GpuCalls, PrepareServingCompilesEveryLength) {
  GpuCall call;
  call.dense_on_gpu(kMost);
  call.args.causal = 1;
  ASSERT_EQ(tandem_prepare_serving(context.get(), &call.args), TANDEM_OK) << tandem_last_error();
  const int loads = gpu.loads;
  EXPECT_GT(loads, 3);
  EXPECT_TRUE(gpu.launched.empty());
  gpu.capturing = true;  // a cold kernel would be refused
  Random r(3);
  for (int n = 0; n < 1000; ++n) {
    Sizes s = kMost;
    s.batch = r.between(1, kMost.batch), s.seqlen_q = r.between(1, kMost.seqlen_q);
    s.seqlen_k = r.between(1, kMost.seqlen_k);
    call.dense_on_gpu(s);
    runs(call);
  }
  EXPECT_EQ(gpu.loads, loads);
  EXPECT_EQ(tandem_prepare_append_kv(context.get()), TANDEM_OK);
  EXPECT_EQ(gpu.loads, loads) << "the kernel of tandem_append_kv was not prepared";
}

TEST_F(GpuCalls, PrepareServingRefusesShapesWithLengths) {
  GpuCall call;
  call.dense_on_gpu(kMost);
  call.make_on_gpu(call.bias, {1, kMost.heads_q, kMost.seqlen_q, kMost.seqlen_k}, kF32);
  call.args.bias = &call.bias.handle;
  EXPECT_EQ(tandem_prepare_serving(context.get(), &call.args), TANDEM_UNSUPPORTED);
  EXPECT_NE(std::string(tandem_last_error()).find("bias must be NULL, because its shape has lengths"),
            std::string::npos);
  EXPECT_EQ(gpu.loads, 0);
}

TEST_F(GpuCalls, AColdAppendIsRefusedDuringCapture) {
  GpuCall call;
  Held caches[2], slots;
  for (Held* held : {&call.k, &call.v}) call.make_on_gpu(*held, {3, 2, 64}, kBf16);
  for (Held& held : caches) call.make_on_gpu(held, {4, 16, 2, 64}, kBf16);
  call.make_on_gpu(slots, {3}, {TANDEM_INT, 64, 1});
  tandem_append_kv_args args{};
  args.size = sizeof args;
  args.k = &call.k.handle, args.v = &call.v.handle, args.slot_mapping = &slots.handle;
  args.k_cache = &caches[0].handle, args.v_cache = &caches[1].handle;
  gpu.capturing = true;
  EXPECT_EQ(tandem_append_kv(context.get(), &args, stream), TANDEM_COLD_KERNEL);
  EXPECT_NE(std::string(tandem_last_error()).find("append_kv is not loaded yet: call tandem_prepare_append_kv"),
            std::string::npos);
  ASSERT_EQ(tandem_prepare_append_kv(context.get()), TANDEM_OK) << tandem_last_error();
  EXPECT_EQ(tandem_append_kv(context.get(), &args, stream), TANDEM_OK) << tandem_last_error();
  ASSERT_EQ(gpu.launched.size(), 1u);
  EXPECT_EQ(gpu.launched[0].kernel, "append_kv");
  EXPECT_EQ(gpu.launched[0].launch.stream, stream);
  EXPECT_EQ(gpu.launched[0].launch.grid.x, 3u);
  EXPECT_EQ(gpu.synchronisations, 0);
}

}  // namespace
}  // namespace tandem::test
