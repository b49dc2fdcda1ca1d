#include "engine/launch.h"

#include <bit>
#include <numbers>

#include "engine/buffers.h"
#include "problem/text.h"

namespace tandem {
namespace {

constexpr int kElement = 2;           // bytes of bf16 and f16
constexpr uint32_t kBoxColumns = 64;  // the width of the swizzle

std::byte* aligned(void* workspace) {
  constexpr auto mask = static_cast<uintptr_t>(plan::kWorkspaceAlignment - 1);
  return reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(workspace) + mask) & ~mask);
}

// Builds a map from the contiguous dimension outwards.
class Map {
 public:
  Map(const void* address, DType dtype) {
    spec_.address = const_cast<void*>(address);
    spec_.type = dtype == DType::f16 ? gpu::TensorType::f16 : gpu::TensorType::bf16;
    spec_.swizzle = gpu::Swizzle::b128;
    spec_.l2_promotion = gpu::L2Promotion::b256;
  }
  // stride: in elements. That of a dimension of size 1 is 0 in a Problem and never used; the map wants one all the
  // same.
  Map& add(int64_t size, int64_t stride, int64_t box) {
    const int i = spec_.rank++;
    spec_.dims[i] = static_cast<uint64_t>(size);
    spec_.byte_strides[i] = size == 1 ? 16 : static_cast<uint64_t>(stride) * kElement;
    spec_.box[i] = static_cast<uint32_t>(box);
    return *this;
  }
  Status encode(gpu::Device& device, ::TensorMap* map) const {
    gpu::TensorMap encoded;
    Status status = device.encode(spec_, &encoded);
    *map = std::bit_cast<::TensorMap>(encoded);
    return status;
  }

 private:
  gpu::TensorMapSpec spec_;
};

// q and out: the rows of a box are neighbours in the order of tiles, query by query, each with the heads together.
Map map_of_rows(const Problem& p, const plan::ForwardPlan& plan, const View& view, int64_t head_dim, int rows) {
  const int64_t together = plan.together;
  Map map(view.data, p.dtype);
  map.add(head_dim, 1, kBoxColumns)
      .add(together, view.head, together)
      .add(p.packed_q() ? p.total_q : p.seqlen_q, view.row, rows / together)
      .add(p.heads_q / together, view.head * together, 1)
      .add(p.packed_q() ? 1 : p.batch, view.batch, 1);
  return map;
}

// k and v. Where there is no key, all that is copied is zeros: a hidden value still meets a probability of 0.
Map map_of_keys(const Problem& p, const plan::ForwardPlan& plan, const View& view, int64_t head_dim, int box,
                const std::byte* workspace) {
  Map map(plan.keyless ? workspace + plan::kZerosOffset : view.data, p.dtype);
  if (plan.keyless) {
    map.add(8, 1, kBoxColumns).add(1, 0, box).add(1, 0, 1).add(1, 0, 1);
    return map;
  }
  map.add(head_dim, 1, kBoxColumns)
      .add(p.packed_k() ? p.total_k : p.seqlen_k, view.row, box)
      .add(p.heads_k, view.head, 1)
      .add(p.packed_k() ? 1 : p.batch, view.batch, 1);
  return map;
}

void set_lengths(const Problem& p, ForwardParams* params) {
  const auto place = [](const IndexView& view, const int** data, int* stride) {
    *data = view ? view.data : nullptr;
    *stride = static_cast<int>(view.stride);
  };
  place(p.cu_seqlens_q, &params->cu_seqlens_q, &params->cu_seqlens_q_stride);
  place(p.cu_seqlens_k, &params->cu_seqlens_k, &params->cu_seqlens_k_stride);
  place(p.seqused_q, &params->seqused_q, &params->seqused_q_stride);
  place(p.seqused_k, &params->seqused_k, &params->seqused_k_stride);
  params->seqlen_q = static_cast<int>(p.seqlen_q);
  params->seqlen_k = static_cast<int>(p.seqlen_k);
  params->total_q = p.packed_q() ? static_cast<int>(p.total_q) : 0;
  params->total_k = p.packed_k() ? static_cast<int>(p.total_k) : 0;
}

// Where there is no key, a bias may have no element: the kernel reads a zero for it.
void set_bias(const Problem& p, const plan::ForwardPlan& plan, const std::byte* workspace, ForwardParams* params) {
  if (!p.bias) return;
  if (plan.keyless) {
    params->bias = workspace + plan::kZerosOffset;
    return;
  }
  params->bias = p.bias.data;
  params->bias_batch = p.bias.stride[0];
  params->bias_head = p.bias.stride[1];
  params->bias_row = p.bias.stride[2];
  params->bias_column = p.bias.stride[3];
}

void set_scores(const Problem& p, const plan::ForwardPlan& plan, ForwardParams* params) {
  params->alibi_slopes = reinterpret_cast<const float*>(p.alibi_slopes.data);
  params->alibi_batch = p.alibi_slopes.batch;
  params->alibi_head = p.alibi_slopes.head;
  params->sink = p.sink ? p.sink.data : nullptr;
  params->sink_head = p.sink.head;
  params->sink_is_f32 = p.sink.dtype == DType::f32;
  params->bottom_right = p.bottom_right;
  params->window_left = plan.window_left;
  params->window_right = plan.window_right;
  params->scale = static_cast<float>(p.softmax_scale);
  params->scale_log2 = static_cast<float>(p.softmax_scale * std::numbers::log2e);
  if (p.softcap > 0) {
    params->softcap_log2 = static_cast<float>(p.softcap * std::numbers::log2e);
    params->scale_softcap = static_cast<float>(2 * std::numbers::log2e * p.softmax_scale / p.softcap);
  }
}

}  // namespace

ForwardParams forward_params(const Problem& p, const plan::ForwardPlan& plan, void* workspace) {
  ForwardParams params{};
  params.out_data = p.out.data;
  params.out_batch = p.out.batch;
  params.out_row = p.out.row;
  params.out_head = p.out.head;
  params.lse = p.lse ? reinterpret_cast<float*>(p.lse.data) : nullptr;
  params.lse_batch = p.lse.batch;
  params.lse_row = p.lse.row;
  params.lse_head = p.lse.head;
  set_lengths(p, &params);
  set_scores(p, plan, &params);
  params.batch = static_cast<int>(p.batch);
  params.heads_q = static_cast<int>(p.heads_q);
  params.heads_k = static_cast<int>(p.heads_k);
  params.head_dim_v = static_cast<int>(p.head_dim_v);
  params.together = plan.together;
  params.tiles_m = plan.tiles_m;
  params.tiles = plan.tile.ragged ? 0 : plan.tiles;
  params.group = plan.group;
  std::byte* const memory = aligned(workspace);
  set_bias(p, plan, memory, &params);
  if (plan.counted) params.counter = reinterpret_cast<int*>(memory + plan::kCounterOffset);
  if (plan.tile.ragged) params.work = reinterpret_cast<ForwardWork*>(memory + plan::kWorkOffset);
  return params;
}

Status encode_maps(gpu::Device& device, const Problem& p, const plan::ForwardPlan& plan, void* workspace,
                   ForwardParams* params) {
  const std::byte* const memory = aligned(workspace);
  const plan::Tile& tile = plan.tile;
  TANDEM_TRY(map_of_rows(p, plan, p.q, p.head_dim, tile.boxes.q).encode(device, &params->q));
  TANDEM_TRY(map_of_keys(p, plan, p.k, p.head_dim, tile.boxes.k, memory).encode(device, &params->k));
  TANDEM_TRY(map_of_keys(p, plan, p.v, p.head_dim_v, tile.boxes.v, memory).encode(device, &params->v));
  return map_of_rows(p, plan, p.out, p.head_dim_v, tile.boxes.out).encode(device, &params->out);
}

Status launch_forward(gpu::Device& device, const Problem& p, const plan::ForwardPlan& plan,
                      const ForwardKernels& kernels, void* workspace, gpu::Stream stream) {
  ForwardParams params = forward_params(p, plan, workspace);
  TANDEM_TRY(encode_maps(device, p, plan, workspace, &params));
  if (plan.keyless || (plan.counted && !plan.tile.ragged)) {  // the counter, and zeros
    TANDEM_TRY(device.fill(aligned(workspace), 0, plan::kWorkOffset, stream));
  }
  void* args[] = {&params};
  gpu::Launch launch;
  launch.args = args;
  launch.stream = stream;
  std::vector<gpu::NamedBuffer> buffers;
  const bool named = device.wants_buffers();
  if (plan.tile.ragged) {
    launch.kernel = kernels.schedule;
    launch.block.x = plan::kScheduleThreads;
    if (named) launch.buffers = buffers = buffers_of_schedule(p, plan, aligned(workspace));
    TANDEM_TRY(device.launch(launch));
  }
  if (named) launch.buffers = buffers = buffers_of_forward(p, plan, aligned(workspace));
  launch.kernel = kernels.forward;
  launch.grid.x = static_cast<uint32_t>(plan.grid);
  launch.block.x = static_cast<uint32_t>(plan.tile.threads());
  launch.dynamic_smem_bytes = static_cast<uint32_t>(plan.tile.shared_bytes());
  launch.overlap_previous = !plan.tile.blackwell();
  return device.launch(launch);
}

}  // namespace tandem
