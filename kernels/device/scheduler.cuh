// Computes the tile list of a varlen problem on the device, where the lengths and therefore the costs are known.
#pragma once
#include "device/block_mask.cuh"

// Inclusive prefix sum over the lanes of a warp.
TANDEM_DEVICE int running_sum(int x) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(~0u, x, d);
    if (lane >= d) x += below;
  }
  return x;
}

// Ragged problems: writes the list of all tiles of one head, the longest first, and its length. One CTA of 1024 threads
// runs this function.
template <auto T>
TANDEM_DEVICE void schedule(const ForwardParams& p) {
  constexpr int kBuckets = 1024;
  __shared__ int first[kBuckets];  // sorted by length: tile counts, then next positions
  __shared__ int sums[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pack_shift = log2_of(p.pack_gqa);
  const int most = (p.seqlen_k + T.tile_n - 1) / T.tile_n;
  first[threadIdx.x] = 0;
  __syncthreads();
  // Counts the tiles of each bucket, then computes the buckets' positions.
#pragma unroll 1
  for (int placing = 0;; ++placing) {
#pragma unroll 1
    for (int b = warp; b < p.batch; b += 32) {
      TileCoords t = varlen_coords(p, b);
      const int tiles = static_cast<int>(((static_cast<i64>(t.q_rows) << pack_shift) + T.tile_m() - 1) / T.tile_m());
#pragma unroll 1
      for (t.m_block = lane; t.m_block < tiles; t.m_block += 32) {
        int steps;
        if constexpr (T.options.block_mask) {
          steps = *steps_of<T>(p, t);  // iterations of the first head
        } else {
          const NBlockRange s = n_block_range<T>(p, t);
          steps = s.end - s.begin;
        }
        const int shorter = max(0, most - steps);  // length relative to the longest tile
        const int bucket = most < kBuckets ? shorter : static_cast<int>(static_cast<i64>(shorter) * kBuckets / most);
        const int at = atomicAdd(&first[min(kBuckets - 1, bucket)], 1);
        // The list has capacity for m_blocks entries, which is enough for valid lengths.
        if (placing && at < p.m_blocks) p.tile_list[at] = {b, t.m_block};
      }
    }
    if (placing) break;
    __syncthreads();
    const int mine = first[threadIdx.x];
    const int before = running_sum(mine);
    if (lane == 31) sums[warp] = before;
    __syncthreads();
    if (warp == 0) sums[lane] = running_sum(sums[lane]);
    __syncthreads();
    first[threadIdx.x] = before - mine + (warp > 0 ? sums[warp - 1] : 0);
    __syncthreads();
    if (threadIdx.x == 0) {
      p.counter[0] = 0;
      p.counter[1] = min(sums[31], p.m_blocks);
    }
  }
}
