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

// A sequence's entries in the list: its splits in the place of the first tile, then its other tiles.
template <auto T>
struct SequenceEntries {
  SplitRange splits;

  TANDEM_DEVICE SequenceEntries(const ForwardParams& p, const TileCoords& sequence) {
    if constexpr (T.device_splits) splits = split_range<T>(p, sequence);
  }
  TANDEM_DEVICE int count(int tiles) const { return tiles == 0 ? 0 : tiles - 1 + splits.count(); }
  // Sets the tile of an entry and returns the tile's number of iterations.
  TANDEM_DEVICE int set(const ForwardParams& p, TileCoords& t, int entry) const {
    const int further = splits.count() - 1;
    t.m_block = max(0, entry - further);
    t.split_row = -1;
    if constexpr (T.device_splits) {
      if (entry <= further && further > 0) {
        set_split<T>(p, splits, entry, t);
        return splits.iterations(entry);
      }
    }
    if constexpr (T.options.block_mask) return *steps_of<T>(p, t);  // the first head's
    const NBlockRange range = n_block_range<T>(p, t);
    return range.end - range.begin;
  }
};

// Ragged problems: writes the list of all tiles of one head, the longest first, and its length. One CTA of 1024 threads
// runs this function. A lane reads a sequence and lists a few entries. If there are more, the warp lists them.
template <auto T>
TANDEM_DEVICE void schedule(const ForwardParams& p) {
  constexpr int kBuckets = 1024, kFewEntries = 4;
  __shared__ int first[kBuckets];  // sorted by length: tile counts, then next positions
  __shared__ int sums[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pack_shift = log2_of(p.pack_gqa);
  const int most = (p.seqlen_k + T.tile_n - 1) / T.tile_n;
  first[threadIdx.x] = 0;
  grid_dependency_wait();
  __syncthreads();
  // Counts the tiles of each bucket, then computes the buckets' positions.
#pragma unroll 1
  for (int placing = 0;; ++placing) {
    auto tiles_of = [&](const TileCoords& t) {
      return static_cast<int>(((static_cast<i64>(t.q_rows) << pack_shift) + T.tile_m() - 1) / T.tile_m());
    };
    auto list = [&](TileCoords t, const SequenceEntries<T>& entries, int entry) {
      const int shorter = max(0, most - entries.set(p, t, entry));  // length relative to the longest tile
      const int bucket = most < kBuckets ? shorter : static_cast<int>(static_cast<i64>(shorter) * kBuckets / most);
      const int at = atomicAdd(&first[min(kBuckets - 1, bucket)], 1);
      // The list has capacity for m_blocks entries, which is enough for valid lengths.
      if (placing && at < p.m_blocks) p.tile_list[at] = {t.sequence, t.m_block, t.split_row, t.split_n_block};
    };
    // Neighbouring sequences belong to different warps, so that a few long sequences do.
#pragma unroll 1
    for (int begin = warp; begin < p.batch; begin += kBuckets) {
      const int own = begin + 32 * lane;
      int count = 0;
      if (own < p.batch) {
        const TileCoords t = varlen_coords(p, own);
        const SequenceEntries<T> entries(p, t);
        count = entries.count(tiles_of(t));
        if (count <= kFewEntries) {
#pragma unroll 1
          for (int entry = 0; entry < count; ++entry) list(t, entries, entry);
        }
      }
#pragma unroll 1
      for (u32 many = __ballot_sync(~0u, count > kFewEntries); many != 0; many &= many - 1) {
        const TileCoords t = varlen_coords(p, begin + 32 * (__ffs(static_cast<int>(many)) - 1));
        const SequenceEntries<T> entries(p, t);
        const int all = entries.count(tiles_of(t));
#pragma unroll 1
        for (int entry = lane; entry < all; entry += 32) list(t, entries, entry);
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
