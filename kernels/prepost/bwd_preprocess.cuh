// The first kernel of a backward. The kernel computes -lse in log2 units and delta = sum(dout * out) - dlse for each
// query. The kernel also zeroes the main kernel's counters, sums the terms of dsink, and rounds a float32 dout.
#pragma once
#include "device/chunk.cuh"
#include "device/n_block_work.cuh"
#include "device/pack.cuh"
#include "device/row.cuh"
#include "device/sequence.cuh"
#include "ptx/warp.cuh"

// Eight neighbouring elements of a row, of float32 or the kernel's type.
struct Eight {
  float x[8];
};
template <auto T>
TANDEM_DEVICE Eight unpack(const Chunk& chunk) {
  Eight eight;
#pragma unroll
  for (int i = 0; i < 8; ++i) eight.x[i] = to_float<T.options.f16>(static_cast<u16>(chunk.x[i / 2] >> i % 2 * 16));
  return eight;
}
template <auto T>
TANDEM_DEVICE Chunk rounded(const Eight& eight) {
  Chunk chunk;
#pragma unroll
  for (int i = 0; i < 4; ++i) chunk.x[i] = pack<T>(eight.x[2 * i], eight.x[2 * i + 1]);
  return chunk;
}
template <auto T>
TANDEM_DEVICE Eight load_eight(const void* from, i64 at, bool is_f32) {
  if (!is_f32) return unpack<T>(*reinterpret_cast<const Chunk*>(static_cast<const u16*>(from) + at));
  const auto* const chunks = reinterpret_cast<const float4*>(static_cast<const float*>(from) + at);
  const float4 low = chunks[0], high = chunks[1];
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}
TANDEM_DEVICE float dot(const Eight& a, const Eight& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(a.x[i], b.x[i], sum);
  return sum;
}

// preprocess_ctas() CTAs for each (query head, m_block), because few long CTAs take longer than many short ones.
// Queries beyond the sequence or without visible keys get -lse = -infinity, so that their probabilities are 0.
template <auto T>
TANDEM_DEVICE void bwd_preprocess(const BackwardParams& p) {
  constexpr int kChunks = T.head_dim_v / 8;                           // chunks per row
  constexpr int kLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // lanes per row
  constexpr int kRows = T.kPreprocessThreads / kLanes;                // rows that the CTA processes at once
  launch_dependents();
  grid_dependency_wait();
  const int block = blockIdx.x / T.preprocess_ctas(), part = blockIdx.x % T.preprocess_ctas();
  const int head = block / p.m_blocks, sequence = sequence_at<T>(p, block % p.m_blocks);
  const SequenceCoords s = sequence_coords<T>(p, sequence);
  const int m_block = block % p.m_blocks - s.first_m_block;
  for (int split = 0; part == 0 && split < dq_splits(constant<T>, p); ++split) {
    const i64 at = dq_block_at(constant<T>, p, block, split);
    if (threadIdx.x < T.dq_semaphores()) p.dq_semaphore[dq_semaphore_at(constant<T>, at, threadIdx.x)] = 0;
  }
  if (threadIdx.x < kBackwardCounters && blockIdx.x == 0) p.counter[threadIdx.x] = 0;
  const auto clear = [](int* semaphores, int count) {
    for (int i = blockIdx.x * T.kPreprocessThreads + threadIdx.x; i < count; i += gridDim.x * T.kPreprocessThreads)
      semaphores[i] = 0;
  };
  if constexpr (split_q_heads<T>()) clear(p.dkv_semaphore, p.dkv_semaphore_count);
  if constexpr (ds_gmem<T>()) clear(p.ds_semaphore, p.ds_semaphore_count);
  float* const lse_delta = p.lse_delta + lse_delta_at(constant<T>, block);
  const int lane = threadIdx.x % kLanes;
  auto make = [&](int row) {
    const int query = m_block * T.tile_m + row;
    const bool used = query < s.q_len;
    const i64 at = s.q_begin + query;
    // All loads of a row are issued before the first use.
    const float lse = used ? p.lse[s.batch * p.lse_batch + at * p.lse_row + head * p.lse_head] : -kInfinity;
    const float dlse = used && p.dlse ? p.dlse[s.batch * p.dlse_batch + at * p.dlse_row + head * p.dlse_head] : 0.0f;
    float sum = 0;
    if (query < s.q_rows && lane * 8 < p.head_dim_v) {
      Eight out{}, dout{};
      if (used) {
        out = load_eight<T>(p.out_given, s.batch * p.out_batch + at * p.out_row + head * p.out_head + lane * 8,
                            p.out_is_f32);
        dout = load_eight<T>(p.dout_data, s.batch * p.dout_batch + at * p.dout_row + head * p.dout_head + lane * 8,
                             p.dout_is_f32);
      }
      if (p.dout_rounded) {
        const Chunk chunk = rounded<T>(dout);
        reinterpret_cast<Chunk*>(p.dout_rounded)[rounded_dout_at(p, s, at, head, lane)] = chunk;
        dout = unpack<T>(chunk);
      }
      sum = dot(out, dout);
    }
    sum = sum_over_lanes<kLanes>(sum);
    if (lane != 0) return;
    const bool nothing = lse == -kInfinity;
    lse_delta[row] = nothing ? -kInfinity : -kLog2e * lse;
    lse_delta[T.tile_m + row] = nothing ? 0.0f : sum - dlse;
  };
  const int begin = part * T.kPreprocessQueries;
#pragma unroll
  for (int row = 0; row < T.kPreprocessQueries; row += kRows) make(begin + row + threadIdx.x / kLanes);
  if (!p.dsink) return;
  // Sums sink probability * -delta, the sink's derivative, over the rows. One warp computes the sum in a fixed order.
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const float sink = kLog2e * load_element<T.options.f16>(p.sink, head * p.sink_head, p.sink_is_f32);
  const int row = begin + threadIdx.x;  // one row per lane
  const float probability = sink == -kInfinity ? 0.0f : exp2_approx(sink + lse_delta[row]);
  const float sum = sum_over_lanes<32>(-probability * lse_delta[T.tile_m + row]);
  if (threadIdx.x == 0) p.dsink_parts[blockIdx.x] = sum;
}
