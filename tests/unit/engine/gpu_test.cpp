// The host's part of calls on a GPU: compilations, kernel parameters and refusals. The device is a fake that records
// calls, and the compiler is a fake that counts compilations.
#include <numbers>
#include <thread>

#include "unit/engine/gpu_call.h"

namespace tandem::test {
namespace {

bool says(const std::string& fragment) { return std::string(tandem_last_error()).find(fragment) != std::string::npos; }

void map_is(const gpu::TensorMapSpec& map, const void* address, const std::vector<uint64_t>& dims,
            const std::vector<uint64_t>& byte_strides, const std::vector<uint32_t>& box) {
  EXPECT_EQ(map.address, address);
  ASSERT_EQ(map.rank, static_cast<int>(dims.size()));
  for (size_t i = 0; i < dims.size(); ++i) {
    EXPECT_EQ(map.dims[i], dims[i]) << "dimension " << i;
    EXPECT_EQ(map.box[i], box[i]) << "dimension " << i;
    if (i > 0) {
      EXPECT_EQ(map.byte_strides[i], byte_strides[i - 1]) << "dimension " << i;
    }
    EXPECT_EQ(map.element_strides[i], 1u);
  }
  EXPECT_EQ(map.swizzle, gpu::Swizzle::b128);
  EXPECT_EQ(map.oob_fill, gpu::OobFill::zero);
}

TEST_F(GpuCalls, DescribeThemselves) {
  EXPECT_STREQ(tandem_context_description(context.get()),
               "cuda:3, NVIDIA H200, 132 SMs, driver 13.0, kernels compiled by NVRTC 13.7");
  EXPECT_EQ(tandem_context_threads(context.get()), 1);
  EXPECT_EQ(device_of(*context).properties().sm_count, 132);
  EXPECT_NE(make_context("/nowhere/libnvrtc.so")->description.find("no NVRTC"), std::string::npos);
}

TEST_F(GpuCalls, WarmCallsOnlyLaunch) {
  GpuCall call;
  call.dense_on_gpu(kSmall);
  for (int i = 0; i < 5; ++i) runs(call);
  EXPECT_EQ(gpu.loads, 1);
  EXPECT_EQ(gpu.allocations, 0);
  EXPECT_EQ(gpu.synchronisations, 0);
  EXPECT_EQ(gpu.captures_asked, 1);  // the cold call
  EXPECT_EQ(gpu.launched.size(), 5u);
  for (const FakeGpu::Launched& each : gpu.launched) {
    EXPECT_EQ(each.kernel, "forward");
    EXPECT_EQ(each.launch.stream, stream);
    EXPECT_EQ(each.launch.grid.x, static_cast<uint32_t>(plan_of(call).tiles));
    EXPECT_EQ(each.launch.block.x, static_cast<uint32_t>(plan_of(call).tile.threads()));
    EXPECT_EQ(each.launch.dynamic_smem_bytes, static_cast<uint32_t>(plan_of(call).tile.smem_bytes()));
  }
  Sizes more = kSmall;
  more.batch = 5;
  call.dense_on_gpu(more);
  runs(call);
  EXPECT_EQ(gpu.loads, 1);  // the same kernel
  call.args.causal = 1;
  runs(call);
  EXPECT_EQ(gpu.loads, 2);
}

TEST_F(GpuCalls, PrepareCompilesAhead) {
  GpuCall call;
  call.dense_on_gpu(kSmall);
  ASSERT_EQ(tandem_prepare(context.get(), TANDEM_FORWARD, &call.args), TANDEM_OK) << tandem_last_error();
  EXPECT_EQ(gpu.loads, 1);
  EXPECT_TRUE(gpu.launched.empty());
  gpu.capturing = true;
  runs(call);
  EXPECT_EQ(gpu.loads, 1);
}

TEST_F(GpuCalls, ColdKernelIsRefusedDuringCapture) {
  GpuCall call;
  call.dense_on_gpu(kSmall);
  gpu.capturing = true;
  EXPECT_EQ(run(call), TANDEM_COLD_KERNEL);
  EXPECT_TRUE(says(plan::name_of(plan_of(call).tile) + " is not loaded yet: call tandem_prepare"))
      << tandem_last_error();
  EXPECT_EQ(gpu.loads, 0);
  EXPECT_TRUE(gpu.launched.empty());
}

// A call without the gradient of a bias does not wait for the dbias kernel. A call with that gradient gets both
// kernels.
TEST_F(GpuCalls, TheGradientOfABiasIsAKernelOfItsOwn) {
  GpuCall call;
  call.dense_on_gpu(kSmall);
  call.pass = TANDEM_BACKWARD;
  call.make_on_gpu(call.dout, {kSmall.batch, kSmall.seqlen_q, kSmall.heads_q, kSmall.head_dim_v}, kBf16);
  call.make_on_gpu(call.dq, {kSmall.batch, kSmall.seqlen_q, kSmall.heads_q, kSmall.head_dim}, kBf16);
  for (Held* held : {&call.bias, &call.dbias})
    call.make_on_gpu(*held, {1, kSmall.heads_q, kSmall.seqlen_q, kSmall.seqlen_k}, kF32);
  call.args.dout = &call.dout.handle;
  call.args.dq = &call.dq.handle;
  call.args.bias = &call.bias.handle;
  const auto prepare = [&] { return tandem_prepare(context.get(), TANDEM_BACKWARD, &call.args); };
  ASSERT_EQ(prepare(), TANDEM_OK) << tandem_last_error();
  EXPECT_EQ(gpu.loads, 2);  // with the kernels before and after the main kernel

  call.args.dbias = &call.dbias.handle;
  gpu.capturing = true;
  size_t bytes = 0;
  ASSERT_EQ(tandem_workspace_size(context.get(), TANDEM_BACKWARD, &call.args, &bytes), TANDEM_OK);
  workspace.assign(bytes, 0x5a);
  EXPECT_EQ(tandem_backward(context.get(), &call.args, workspace.data(), bytes, stream), TANDEM_COLD_KERNEL);
  EXPECT_TRUE(says("_dbias is not loaded yet: call tandem_prepare")) << tandem_last_error();
  gpu.capturing = false;
  ASSERT_EQ(prepare(), TANDEM_OK) << tandem_last_error();
  EXPECT_EQ(gpu.loads, 3);
  ASSERT_EQ(prepare(), TANDEM_OK);
  EXPECT_EQ(gpu.loads, 3);

  context = make_context(FAKE_NVRTC);
  ASSERT_EQ(prepare(), TANDEM_OK) << tandem_last_error();
  EXPECT_EQ(gpu.loads, 6);
}

TEST_F(GpuCalls, NoCompilerIsASentence) {
  context = make_context("/nowhere/libnvrtc.so");
  GpuCall call;
  call.dense_on_gpu(kSmall);
  EXPECT_EQ(run(call), TANDEM_NO_COMPILER);
  EXPECT_TRUE(says("/nowhere/libnvrtc.so")) << tandem_last_error();
  EXPECT_TRUE(gpu.launched.empty());
}

TEST_F(GpuCalls, ManyThreadsLoadOnce) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      GpuCall call;
      call.dense_on_gpu(kSmall);
      for (int repeat = 0; repeat < 20; ++repeat) {
        call.args.causal = repeat % 2;
        size_t bytes = 0;
        EXPECT_EQ(tandem_workspace_size(context.get(), TANDEM_FORWARD, &call.args, &bytes), TANDEM_OK);
        std::vector<char> own(bytes + 1);
        EXPECT_EQ(tandem_forward(context.get(), &call.args, own.data(), bytes, nullptr), TANDEM_OK);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(gpu.loads, 2);
  EXPECT_EQ(gpu.launched.size(), 160u);
}

TEST_F(GpuCalls, DenseMapsAndParameters) {
  GpuCall call;
  call.dense_on_gpu(kSmall);
  call.lse.set_strides({6 * 300, 300, 2});
  call.lse.memory.resize(2000);
  call.lse.handle.data = call.lse.memory.data();
  call.args.causal = 1;
  call.args.softmax_scale = 0.5;
  call.args.alignment = TANDEM_TOP_LEFT;
  runs(call);
  ASSERT_EQ(gpu.maps.size(), 4u);
  map_is(gpu.maps[0], call.q.handle.data, {72, 1, 100, 6, 2}, {16, 864, 144, 86400}, {64, 1, 64, 1, 1});
  map_is(gpu.maps[1], call.k.handle.data, {72, 200, 2, 2}, {288, 144, 57600}, {64, keys_of(call), 1, 1});
  map_is(gpu.maps[2], call.v.handle.data, {40, 200, 2, 2}, {160, 80, 32000}, {64, keys_of(call), 1, 1});
  map_is(gpu.maps[3], call.out.handle.data, {40, 1, 100, 6, 2}, {16, 480, 80, 48000}, {64, 1, 64, 1, 1});
  const ForwardParams& p = params();
  EXPECT_EQ(p.q.opaque[0], 0x0101010101010101u);
  EXPECT_EQ(p.out.opaque[15], 0x0404040404040404u);
  EXPECT_EQ(p.lse, call.lse.handle.data);
  EXPECT_EQ(p.lse_batch, 1800);
  EXPECT_EQ(p.lse_head, 300);
  EXPECT_EQ(p.lse_row, 2);
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.heads_q, 6);
  EXPECT_EQ(p.heads_k, 2);
  EXPECT_EQ(p.seqlen_q, 100);
  EXPECT_EQ(p.seqlen_k, 200);
  EXPECT_EQ(p.head_dim_v, 40);
  EXPECT_EQ(p.pack_gqa, 1);
  EXPECT_EQ(p.m_blocks, plan_of(call).m_blocks);
  EXPECT_EQ(p.tiles, 12 * p.m_blocks);
  EXPECT_EQ(p.counter, nullptr);
  EXPECT_EQ(p.tile_list, nullptr);
  EXPECT_EQ(p.bottom_right, 0);
  EXPECT_EQ(p.window_right, 0);
  EXPECT_EQ(p.window_left, plan::kFarWindow);
  EXPECT_FLOAT_EQ(p.scale, 0.5f);
  EXPECT_FLOAT_EQ(p.scale_log2, 0.72134752f);
  EXPECT_EQ(p.cu_seqlens_q, nullptr);
  EXPECT_EQ(p.bias, nullptr);
  EXPECT_EQ(p.sink, nullptr);
  EXPECT_TRUE(gpu.fills.empty());
}

TEST_F(GpuCalls, HeadsTogether) {
  GpuCall call;
  call.dense_on_gpu(
      {.batch = 3, .seqlen_q = 5, .seqlen_k = 40, .heads_q = 16, .heads_k = 2, .head_dim = 128, .head_dim_v = 128});
  call.args.lse = nullptr;
  runs(call);
  map_is(gpu.maps[0], call.q.handle.data, {128, 8, 5, 2, 3}, {256, 4096, 2048, 20480}, {64, 8, 8, 1, 1});
  map_is(gpu.maps[3], call.out.handle.data, {128, 8, 5, 2, 3}, {256, 4096, 2048, 20480}, {64, 8, 8, 1, 1});
  EXPECT_EQ(params().pack_gqa, 8);
  EXPECT_EQ(params().m_blocks, 1);
  EXPECT_EQ(params().tiles, 6);
  EXPECT_EQ(params().lse, nullptr);
}

TEST_F(GpuCalls, ExpandedKeys) {
  GpuCall call;
  call.dense_on_gpu(
      {.batch = 2, .seqlen_q = 5, .seqlen_k = 40, .heads_q = 2, .heads_k = 2, .head_dim = 64, .head_dim_v = 64});
  call.k.set_strides({0, 128, 0, 1});
  runs(call);
  map_is(gpu.maps[1], call.k.handle.data, {64, 40, 2, 2}, {256, 0, 0}, {64, keys_of(call), 1, 1});
}

TEST_F(GpuCalls, CounterIsCleared) {
  GpuCall call;
  call.dense_on_gpu(
      {.batch = 20, .seqlen_q = 300, .seqlen_k = 300, .heads_q = 8, .heads_k = 8, .head_dim = 16, .head_dim_v = 16});
  call.args.causal = 1;
  runs(call);
  ASSERT_NE(params().counter, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(params().counter) % 16, 0u);
  EXPECT_EQ(*params().counter, 0);
  EXPECT_GE(reinterpret_cast<unsigned char*>(params().counter), workspace.data());
  EXPECT_EQ(gpu.launched.size(), 1u);
}

TEST_F(GpuCalls, PackedCallsMakeTheirScheduleFirst) {
  GpuCall call;
  call.packed_on_gpu({0, 30, 30, 330}, {0, 10, 50, 400},
                     {.seqlen_q = 300, .seqlen_k = 350, .heads_q = 8, .heads_k = 2, .head_dim = 128, .head_dim_v = 64});
  call.indices(call.seqused_k, &tandem_attention_args::seqused_k, {10, 0, 7});
  runs(call);
  ASSERT_EQ(gpu.launched.size(), 2u);
  EXPECT_EQ(gpu.launched[0].kernel, "schedule");
  EXPECT_EQ(gpu.launched[0].launch.block.x, 1024u);
  EXPECT_EQ(gpu.launched[0].launch.grid.x, 1u);
  EXPECT_EQ(gpu.launched[1].kernel, "forward");
  map_is(gpu.maps[0], call.q.handle.data, {128, 4, 330, 2, 1}, {256, 2048, 1024, 16}, {64, 4, 16, 1, 1});
  map_is(gpu.maps[1], call.k.handle.data, {128, 400, 2, 1}, {512, 256, 16}, {64, keys_of(call), 1, 1});
  map_is(gpu.maps[2], call.v.handle.data, {64, 400, 2, 1}, {256, 128, 16}, {64, keys_of(call), 1, 1});
  for (const FakeGpu::Launched& each : gpu.launched) {
    const ForwardParams& p = each.params;
    EXPECT_EQ(p.cu_seqlens_q, call.cu_seqlens_q.handle.data);
    EXPECT_EQ(p.cu_seqlens_k, call.cu_seqlens_k.handle.data);
    EXPECT_EQ(p.cu_seqlens_k_stride, 1);
    EXPECT_EQ(p.seqused_q, nullptr);
    EXPECT_EQ(p.seqused_k, call.seqused_k.handle.data);
    EXPECT_EQ(p.batch, 3);
    EXPECT_EQ(p.total_q, 330);
    EXPECT_EQ(p.total_k, 400);
    EXPECT_EQ(p.seqlen_q, 300);
    EXPECT_EQ(p.seqlen_k, 350);
    EXPECT_EQ(p.lse_head, 330);
    EXPECT_EQ(p.lse_batch, 0);
    EXPECT_EQ(p.tiles, 0);
    EXPECT_EQ(p.m_blocks, plan_of(call).m_blocks);
    ASSERT_NE(p.tile_list, nullptr);
    EXPECT_LE(reinterpret_cast<unsigned char*>(p.tile_list + p.m_blocks), workspace.data() + workspace.size());
    EXPECT_EQ(reinterpret_cast<std::byte*>(p.tile_list) - reinterpret_cast<std::byte*>(p.counter), 32);
  }
  EXPECT_TRUE(gpu.fills.empty());  // the schedule sets the counter
}

TEST_F(GpuCalls, OptionsReachTheKernel) {
  GpuCall call;
  call.dense_on_gpu(kSmall);
  call.make_on_gpu(call.bias, {1, 6, 1, 200}, kBf16);
  call.make_on_gpu(call.sink, {6}, kBf16);
  call.make_on_gpu(call.alibi_slopes, {2, 6}, kF32);
  call.args.bias = &call.bias.handle;
  call.args.sink = &call.sink.handle;
  call.args.alibi_slopes = &call.alibi_slopes.handle;
  call.args.softcap = 20;
  call.args.window = TANDEM_WINDOW_LEFT | TANDEM_WINDOW_RIGHT;
  call.args.window_left = 30;
  call.args.window_right = -4;
  runs(call);
  const ForwardParams& p = params();
  EXPECT_EQ(p.bias, call.bias.handle.data);
  EXPECT_EQ(p.bias_batch, 0);
  EXPECT_EQ(p.bias_head, 200);
  EXPECT_EQ(p.bias_row, 0);
  EXPECT_EQ(p.bias_column, 1);
  EXPECT_EQ(p.sink, call.sink.handle.data);
  EXPECT_EQ(p.sink_is_f32, 0);
  EXPECT_EQ(p.sink_head, 1);
  EXPECT_EQ(p.alibi_slopes, call.alibi_slopes.handle.data);
  EXPECT_EQ(p.alibi_batch, 6);
  EXPECT_EQ(p.alibi_head, 1);
  EXPECT_FLOAT_EQ(p.softcap_log2, 20 / std::numbers::ln2_v<float>);
  EXPECT_FLOAT_EQ(p.scale_softcap, p.scale_log2 / 10);
  EXPECT_EQ(p.window_left, 30);
  EXPECT_EQ(p.window_right, -4);
  EXPECT_EQ(p.bottom_right, 1);
}

TEST_F(GpuCalls, Float32OutAndExplicitDiagonal) {
  GpuCall call;
  call.dense_on_gpu(kSmall);
  call.make_on_gpu(call.out, {2, 100, 6, 40}, kF32);
  call.args.causal = 1;
  call.args.alignment = TANDEM_EXPLICIT;
  call.args.diagonal_offset = -7;
  runs(call);
  ASSERT_EQ(gpu.maps.size(), 4u);
  EXPECT_EQ(gpu.maps[0].type, gpu::TensorType::bf16);
  EXPECT_EQ(gpu.maps[3].type, gpu::TensorType::f32);
  map_is(gpu.maps[3], call.out.handle.data, {40, 1, 100, 6, 2}, {16, 960, 160, 96000}, {32, 1, 64, 1, 1});
  EXPECT_EQ(params().out_data, call.out.handle.data);
  EXPECT_EQ(params().bottom_right, 0);
  EXPECT_EQ(params().diagonal_offset, -7);
  EXPECT_EQ(params().diagonal_offsets, nullptr);
  call.args.diagonal_offset = INT64_MAX;
  runs(call);
  EXPECT_EQ(params().diagonal_offset, kFarDiagonal);
  call.indices(call.seqused_q, &tandem_attention_args::diagonal_offsets, {3, INT32_MIN});
  runs(call);
  EXPECT_EQ(params().diagonal_offset, int64_t{1} << 33);  // no int32 entry can reach zero from there
  EXPECT_EQ(params().diagonal_offsets, call.seqused_q.ints());
  call.args.alignment = TANDEM_BOTTOM_RIGHT;
  EXPECT_EQ(run(call), TANDEM_INVALID_ARGUMENT);
}

// Absent keys, values and bias are zeros in the workspace.
TEST_F(GpuCalls, NoKeys) {
  GpuCall call;
  call.dense_on_gpu({.batch = 2, .seqlen_q = 5, .seqlen_k = 0, .heads_q = 2, .heads_k = 2});
  call.k.handle.data = call.v.handle.data = nullptr;
  call.make_on_gpu(call.bias, {2, 2, 5, 0}, kF32);
  call.args.bias = &call.bias.handle;
  runs(call);
  ASSERT_EQ(gpu.maps.size(), 4u);
  for (const int i : {1, 2}) {
    const auto* zeros = static_cast<const unsigned char*>(gpu.maps[static_cast<size_t>(i)].address);
    map_is(gpu.maps[static_cast<size_t>(i)], zeros, {8, 1, 1, 1}, {16, 16, 16}, {64, keys_of(call), 1, 1});
    EXPECT_GT(zeros, workspace.data());
    EXPECT_LE(zeros + 16, workspace.data() + workspace.size());
    for (int byte = 0; byte < 16; ++byte) EXPECT_EQ(zeros[byte], 0);
  }
  const ForwardParams& p = params();
  EXPECT_EQ(p.seqlen_k, 0);
  EXPECT_EQ(p.bias, gpu.maps[1].address);
  for (const int64_t stride : {p.bias_batch, p.bias_head, p.bias_row, p.bias_column}) EXPECT_EQ(stride, 0);

  call.args.bias = nullptr;
  call.packed_on_gpu({0, 3, 5}, {0, 0, 0}, {.seqlen_q = 3, .seqlen_k = 1, .heads_q = 2, .heads_k = 2});
  call.k.handle.data = call.v.handle.data = nullptr;
  runs(call);
  EXPECT_EQ(gpu.launched.back().params.total_k, 0);
  EXPECT_EQ(gpu.fills.size(), 2u);
}

// "name + offset of its tensor, bytes". w: kernels may write it. u: it is unwritten.
std::vector<std::string> described(const std::vector<gpu::NamedBuffer>& buffers, const void* base) {
  std::vector<std::string> texts;
  for (const gpu::NamedBuffer& b : buffers) {
    const bool scratch = std::string(b.name).starts_with("workspace.");
    const auto offset = static_cast<const char*>(b.address) - static_cast<const char*>(base);
    texts.push_back(std::string(b.name) + (scratch ? " at " + std::to_string(offset) : "") + " " +
                    std::to_string(b.bytes) + (b.writable ? " w" : "") + (b.initialised ? "" : "u"));
  }
  return texts;
}
using Texts = std::vector<std::string>;

TEST_F(GpuCalls, BuffersAreNamedForTheirUser) {
  GpuCall call;
  call.dense_on_gpu(kSmall);
  runs(call);
  EXPECT_TRUE(gpu.launched.back().buffers.empty());

  gpu.wants_buffers = true;
  call.make_on_gpu(call.bias, {1, 6, 1, 200}, kBf16);
  call.make_on_gpu(call.sink, {6}, kBf16);
  call.make_on_gpu(call.alibi_slopes, {2, 6}, kF32);
  call.args.bias = &call.bias.handle;
  call.args.sink = &call.sink.handle;
  call.args.alibi_slopes = &call.alibi_slopes.handle;
  call.k.set_strides({0, 2 * 80, 80, 1});  // the batches share keys, and rows have gaps
  runs(call);
  EXPECT_EQ(described(gpu.launched.back().buffers, nullptr),
            (Texts{"q 172800", "k 63984", "v 64000", "out 96000 wu", "lse 4800 wu", "bias 2400", "alibi_slopes 48",
                   "sink 12"}));
  EXPECT_EQ(gpu.launched.back().buffers[1].address, call.k.handle.data);
}

TEST_F(GpuCalls, BuffersOfPackedCalls) {
  gpu.wants_buffers = true;
  GpuCall call;
  call.packed_on_gpu({0, 30, 30, 330}, {0, 0, 0, 0},
                     {.seqlen_q = 300, .seqlen_k = 1, .heads_q = 8, .heads_k = 2, .head_dim = 128, .head_dim_v = 64});
  call.indices(call.seqused_k, &tandem_attention_args::seqused_k, {0, 0, 0});
  call.args.lse = nullptr;
  runs(call);
  ASSERT_EQ(gpu.launched.size(), 2u);
  const int* const counter = params().counter;
  const std::string work = std::to_string(static_cast<int>(sizeof(ListedTile)) * params().m_blocks);
  EXPECT_EQ(described(gpu.launched[0].buffers, counter),
            (Texts{"cu_seqlens_q 16", "cu_seqlens_k 16", "seqused_k 12", "workspace.counter at 0 8 wu",
                   "workspace.zeros at 16 16 w", "workspace.tile_list at 32 " + work + " wu"}));
  EXPECT_EQ(
      described(gpu.launched[1].buffers, counter),
      (Texts{"q 675840", "out 337920 wu", "cu_seqlens_q 16", "cu_seqlens_k 16", "seqused_k 12",
             "workspace.counter at 0 8 w", "workspace.zeros at 16 16 w", "workspace.tile_list at 32 " + work + " w"}));
}

TEST_F(GpuCalls, NothingToWrite) {
  for (const Sizes& sizes :
       {Sizes{.batch = 0}, Sizes{.seqlen_q = 0, .seqlen_k = 7}, Sizes{.heads_q = 0, .heads_k = 0}}) {
    GpuCall call;
    call.dense_on_gpu(sizes);
    runs(call);
    EXPECT_EQ(tandem_prepare(context.get(), TANDEM_FORWARD, &call.args), TANDEM_OK) << tandem_last_error();
  }
  GpuCall packed;
  packed.packed_on_gpu({0, 0, 0}, {0, 40, 70}, {.seqlen_q = 0, .seqlen_k = 40});
  runs(packed);
  EXPECT_EQ(gpu.loads, 0);
  EXPECT_TRUE(gpu.launched.empty());
}

TEST_F(GpuCalls, Refusals) {
  GpuCall call;
  call.dense_on_gpu(kSmall);
  for (Held* held : {&call.dout, &call.dlse, &call.dq}) held->handle = {};
  call.make_on_gpu(call.dout, call.out.shape, kBf16);
  call.args.dout = &call.dout.handle;
  call.args.num_splits = 2;
  call.args.batch_invariant = 1;
  EXPECT_EQ(tandem_check(context.get(), TANDEM_FORWARD, &call.args), TANDEM_UNSUPPORTED);
  EXPECT_TRUE(says("num_splits (2)")) << tandem_last_error();
  EXPECT_EQ(run(call), TANDEM_UNSUPPORTED);
  EXPECT_EQ(tandem_prepare(context.get(), TANDEM_FORWARD, &call.args), TANDEM_UNSUPPORTED);
  call.args.num_splits = call.args.batch_invariant = 0;

  call.q.handle.byte_offset = 8;
  EXPECT_EQ(tandem_check(context.get(), TANDEM_FORWARD, &call.args), TANDEM_OK);  // data is ignored
  EXPECT_EQ(tandem_forward(context.get(), &call.args, nullptr, 0, nullptr), TANDEM_UNSUPPORTED);
  EXPECT_TRUE(says("q.data + byte_offset")) << tandem_last_error();
  call.q.handle.byte_offset = 0;

  call.k.handle.device.index = 0;
  EXPECT_EQ(run(call), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("k.device (type 2, index 0) must be the context's (type 2, index 3)")) << tandem_last_error();
  call.k.handle.device.index = 3;

  GpuCall ragged;
  ragged.dense_on_gpu({.batch = 2, .seqlen_q = 300, .seqlen_k = 300});
  ragged.indices(ragged.seqused_k, &tandem_attention_args::seqused_k, {200, 3});
  EXPECT_EQ(tandem_forward(context.get(), &ragged.args, nullptr, 0, nullptr), TANDEM_WORKSPACE_TOO_SMALL);
  EXPECT_TRUE(gpu.launched.empty());

  call.packed_on_gpu({0, 30}, {0, 40}, {.seqlen_q = 0, .seqlen_k = 40});
  EXPECT_EQ(run(call), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("max_seqlen_q (0) must be given")) << tandem_last_error();
}

TEST_F(GpuCalls, ValidateReadsIndicesOnRequest) {
  GpuCall call;
  call.packed_on_gpu({0, 30, 20, 330}, {0, 10, 50, 400}, {.seqlen_q = 300, .seqlen_k = 350});
  runs(call);  // the kernels clamp
  EXPECT_EQ(gpu.synchronisations, 0);
  call.args.validate = 1;
  EXPECT_EQ(run(call), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("cu_seqlens_q[2] (20) must be at least cu_seqlens_q[1] (30)")) << tandem_last_error();
  EXPECT_EQ(gpu.synchronisations, 1);
  call.cu_seqlens_q.ints()[2] = 40;
  runs(call);
  call.indices(call.seqused_q, &tandem_attention_args::seqused_q, {30, 0, 11, 0, 290});
  call.seqused_q.shape[0] = 3;
  call.seqused_q.set_strides({2});
  EXPECT_EQ(run(call), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("seqused_q[1] (11) must be 0 to 10")) << tandem_last_error();
  call.seqused_q.ints()[2] = 10;
  runs(call);
  EXPECT_EQ(gpu.launched.size(), 6u);
}

}  // namespace
}  // namespace tandem::test
