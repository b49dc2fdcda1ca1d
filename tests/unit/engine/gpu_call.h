// Calls on a fake GPU with a fake compiler, for tests of the host's part of such calls.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/context.h"
#include "engine/gpu.h"
#include "plan/forward.h"
#include "unit/engine/fake_device.h"
#include "unit/jit/temporary.h"
#include "unit/problem/call.h"

namespace tandem::test {

// Three query heads per key head, so that no two of them share a tile.
inline constexpr Sizes kSmall{
    .batch = 2, .seqlen_q = 100, .seqlen_k = 200, .heads_q = 6, .heads_k = 2, .head_dim = 72, .head_dim_v = 40};

// bf16 tensors with fake device addresses. Each row begins at a multiple of 16 bytes.
struct GpuCall : Call {
  GpuCall() {
    device = {TANDEM_CUDA, 3};
    args.dout = args.dlse = args.dq = args.dk = args.dv = args.seqused_q = args.seqused_k = nullptr;
  }
  void make_on_gpu(Held& held, std::vector<int64_t> sizes, tandem_dtype dtype) {
    held.make(std::move(sizes), dtype);
    held.memory.resize(held.memory.size() + 2);
    held.handle.data = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(held.memory.data()) + 15) & ~uintptr_t{15});
    held.handle.device = device;
  }
  void dense_on_gpu(const Sizes& s) {
    make_on_gpu(q, {s.batch, s.seqlen_q, s.heads_q, s.head_dim}, kBf16);
    make_on_gpu(k, {s.batch, s.seqlen_k, s.heads_k, s.head_dim}, kBf16);
    make_on_gpu(v, {s.batch, s.seqlen_k, s.heads_k, s.head_dim_v}, kBf16);
    make_on_gpu(out, {s.batch, s.seqlen_q, s.heads_q, s.head_dim_v}, kBf16);
    make_on_gpu(lse, {s.batch, s.heads_q, s.seqlen_q}, kF32);
  }
  void indices(Held& held, const tandem_tensor* tandem_attention_args::*field, const std::vector<int32_t>& values) {
    held.make(values);
    held.handle.device = device;
    args.*field = &held.handle;
  }
  void packed_on_gpu(const std::vector<int32_t>& q_offsets, const std::vector<int32_t>& k_offsets, const Sizes& s) {
    make_on_gpu(q, {q_offsets.back(), s.heads_q, s.head_dim}, kBf16);
    make_on_gpu(k, {k_offsets.back(), s.heads_k, s.head_dim}, kBf16);
    make_on_gpu(v, {k_offsets.back(), s.heads_k, s.head_dim_v}, kBf16);
    make_on_gpu(out, {q_offsets.back(), s.heads_q, s.head_dim_v}, kBf16);
    make_on_gpu(lse, {s.heads_q, q_offsets.back()}, kF32);
    indices(cu_seqlens_q, &tandem_attention_args::cu_seqlens_q, q_offsets);
    indices(cu_seqlens_k, &tandem_attention_args::cu_seqlens_k, k_offsets);
    args.max_seqlen_q = s.seqlen_q;
    args.max_seqlen_k = s.seqlen_k;
  }
};

class GpuCalls : public testing::Test {
 protected:
  void SetUp() override { context = make_context(FAKE_NVRTC); }

  std::unique_ptr<tandem_context> make_context(const std::string& nvrtc) {
    Env env;
    env.nvrtc = nvrtc;
    env.temporary = folder.path();
    auto engine = std::make_unique<GpuEngine>("cuda:3", std::make_unique<FakeDevice>(&gpu), env,
                                              jit::Cache::Options{.folder = ""});
    return std::make_unique<tandem_context>(std::move(engine), tandem_device{TANDEM_CUDA, 3});
  }
  // Runs the call with a poisoned workspace of exactly the requested size, at an odd address.
  tandem_status run(GpuCall& call) {
    size_t bytes = 0;
    const tandem_status status = tandem_workspace_size(context.get(), TANDEM_FORWARD, &call.args, &bytes);
    if (status != TANDEM_OK) return status;
    workspace.assign(bytes + 1, 0x5a);
    return tandem_forward(context.get(), &call.args, workspace.data() + 1, bytes, stream);
  }
  void runs(GpuCall& call) { ASSERT_EQ(run(call), TANDEM_OK) << tandem_last_error(); }
  const ForwardParams& params() const { return gpu.launched.back().params; }
  // The tile of the tuning table.
  static plan::ForwardSchedule plan_of(const GpuCall& call) {
    Problem problem;
    EXPECT_TRUE(call.make(&problem).ok());
    return plan::make_plan(problem, hopper()).forward;
  }
  static uint32_t keys_of(const GpuCall& call) { return static_cast<uint32_t>(plan_of(call).tile.tile_n); }

  TemporaryFolder folder;
  FakeGpu gpu;
  std::unique_ptr<tandem_context> context;
  std::vector<unsigned char> workspace;
  gpu::Stream stream = &workspace;
};

}  // namespace tandem::test
