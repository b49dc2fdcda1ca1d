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

// T.device_splits: reserves rows for the results of a sequence's splits. The places of rows affect no bits. Invalid
// lengths may need more rows than the workspace has; such a sequence is not split. One lane calls this function.
template <auto T>
TANDEM_DEVICE void reserve_split_rows(const ForwardParams& p, const TileCoords& sequence, int* reserved) {
  const SplitRange splits = split_range<T>(p, sequence);
  int first = -1;
  if (splits.end - splits.begin > 1) {
    const int rows = (splits.end - splits.begin) * sequence.q_len;
    first = atomicAdd(reserved, rows);
    if (first < 0 || first > p.split.rows - rows) first = -1;
  }
  p.split.first_rows[sequence.sequence] = first;
}

// A sequence's entries in the list: its splits in the place of the first tile, then its other tiles.
template <auto T>
struct SequenceEntries {
  SplitRange splits{0, 1};
  int first_row = -1;

  TANDEM_DEVICE SequenceEntries(const ForwardParams& p, const TileCoords& sequence) {
    if constexpr (T.device_splits) {
      if (p.split.first_rows) first_row = p.split.first_rows[sequence.sequence];
      if (first_row >= 0) splits = split_range<T>(p, sequence);
    }
  }
  TANDEM_DEVICE int count(int tiles) const { return tiles == 0 ? 0 : tiles - 1 + splits.end - splits.begin; }
  TANDEM_DEVICE void set(const ForwardParams& p, TileCoords& t, int entry) const {
    const int further = splits.end - splits.begin - 1;
    t.m_block = max(0, entry - further);
    t.split_row = -1;
    if (!T.device_splits || first_row < 0 || entry > further) return;
    t.split_row = first_row + entry * t.q_len;
    t.split_n_block = (splits.begin + entry) * p.split.n_blocks;
  }
};

// Ragged problems: writes the list of all tiles of one head, the longest first, and its length. One CTA of 1024 threads
// runs this function. A lane reads a sequence and lists a few entries. If there are more, the warp lists them.
template <auto T>
TANDEM_DEVICE void schedule(const ForwardParams& p) {
  constexpr int kBuckets = 1024, kFewEntries = 4;
  __shared__ int first[kBuckets];  // sorted by length: tile counts, then next positions
  __shared__ int sums[32];
  __shared__ int reserved;  // rows of splits' results
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pack_shift = log2_of(p.pack_gqa);
  const int most = (p.seqlen_k + T.tile_n - 1) / T.tile_n;
  first[threadIdx.x] = 0;
  if (threadIdx.x == 0) reserved = 0;
  __syncthreads();
  // Counts the tiles of each bucket, then computes the buckets' positions.
#pragma unroll 1
  for (int placing = 0;; ++placing) {
    auto tiles_of = [&](const TileCoords& t) {
      return static_cast<int>(((static_cast<i64>(t.q_rows) << pack_shift) + T.tile_m() - 1) / T.tile_m());
    };
    auto list = [&](TileCoords t, const SequenceEntries<T>& entries, int entry) {
      entries.set(p, t, entry);
      int steps;
      if constexpr (T.options.block_mask) {
        steps = *steps_of<T>(p, t);  // iterations of the first head
      } else {
        NBlockRange s = n_block_range<T>(p, t);
        if constexpr (T.device_splits) s = in_split<T>(p, s, t, 0);
        steps = s.end - s.begin;
      }
      const int shorter = max(0, most - steps);  // length relative to the longest tile
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
        if constexpr (T.device_splits) {
          if (!placing && p.split.first_rows) reserve_split_rows<T>(p, t, &reserved);
        }
        const SequenceEntries<T> entries(p, t);
        count = entries.count(tiles_of(t));
        if (count <= kFewEntries) {
#pragma unroll 1
          for (int entry = 0; entry < count; ++entry) list(t, entries, entry);
        }
      }
      __syncwarp();  // reserved rows
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
