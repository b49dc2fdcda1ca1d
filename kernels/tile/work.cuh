// The work of a forward kernel: which rows a tile has, and which steps of keys they see.
#pragma once
#include "ptx/base.cuh"
#include "shared/forward.h"

// Rows [m * T.rows(), ...) of a sequence and of `together` heads: row r is query r / together of head
// head * together + r % together.
struct Tile {
  int m, head;
  int sequence, batch;   // batch: of the tensors, 0 when packed
  int q_begin, k_begin;  // first rows of the sequence in packed tensors
  int q_rows;            // of the sequence; those from q_len on are not used
  int q_len, k_len;      // the used lengths
};

TANDEM_DEVICE int log2_of(int power_of_two) { return 31 - __clz(power_of_two); }

// Of the n-th unit of work: heads in groups, in a group by tile. tiles_m: of one head.
struct Unit {
  int tile, head;  // head: over the batch
};
TANDEM_DEVICE Unit unit_at(const ForwardParams& p, int n, int tiles_m, int heads) {
  const int per_group = p.group * tiles_m, group = n / per_group, rest = n - group * per_group;
  const int width = min(heads - group * p.group, p.group);
  return {rest / width, group * p.group + rest % width};
}

// Dense: the longest tiles first.
template <auto T>
TANDEM_DEVICE Tile dense_tile(const ForwardParams& p, int n) {
  const int heads = p.heads_q >> log2_of(p.together);
  const Unit unit = unit_at(p, n, p.tiles_m, p.batch * heads);
  const int m = T.right ? p.tiles_m - 1 - unit.tile : unit.tile;
  const int batch = unit.head / heads;
  return {m, unit.head % heads, batch, batch, 0, 0, p.seqlen_q, p.seqlen_q, p.seqlen_k};
}

// Lengths as the device has them: whatever they say, they stay within the tensors.
TANDEM_DEVICE int index_at(const int* values, int stride, int i) { return values[static_cast<i64>(i) * stride]; }
TANDEM_DEVICE int clamp(int x, int low, int high) { return min(max(x, low), high); }

TANDEM_DEVICE Tile ragged_sequence(const ForwardParams& p, int sequence) {
  Tile t{0, 0, sequence, sequence, 0, 0, p.seqlen_q, 0, p.seqlen_k};
  if (p.cu_seqlens_q) {
    t.batch = 0;
    t.q_begin = clamp(index_at(p.cu_seqlens_q, p.cu_seqlens_q_stride, sequence), 0, p.total_q);
    t.q_rows = clamp(index_at(p.cu_seqlens_q, p.cu_seqlens_q_stride, sequence + 1), t.q_begin, p.total_q) - t.q_begin;
  }
  if (p.cu_seqlens_k) {
    t.k_begin = clamp(index_at(p.cu_seqlens_k, p.cu_seqlens_k_stride, sequence), 0, p.total_k);
    t.k_len = clamp(index_at(p.cu_seqlens_k, p.cu_seqlens_k_stride, sequence + 1), t.k_begin, p.total_k) - t.k_begin;
  }
  t.q_len = t.q_rows;
  if (p.seqused_q) t.q_len = clamp(index_at(p.seqused_q, p.seqused_q_stride, sequence), 0, t.q_len);
  if (p.seqused_k) t.k_len = clamp(index_at(p.seqused_k, p.seqused_k_stride, sequence), 0, t.k_len);
  return t;
}

// Key j is at distance i + diagonal - j from query i.
TANDEM_DEVICE int diagonal_of(const ForwardParams& p, const Tile& t) { return p.bottom_right ? t.k_len - t.q_len : 0; }

// Steps of keys: those that some rows need, from the last to the first, and those of them that hide nothing from any.
struct Steps {
  int begin, end, whole_begin, whole_end;
};

// Of rows [row, row + rows) of a sequence. At least one step: rows that see nothing come out of a hidden one.
template <auto T>
TANDEM_DEVICE Steps steps_of(const ForwardParams& p, const Tile& t, int row, int rows) {
  const int shift = log2_of(p.together), diagonal = diagonal_of(p, t);
  const int first = row >> shift, last = min((row + rows) >> shift, t.q_len) - 1;
  int end = t.k_len, whole_end = t.k_len, begin = 0, whole_begin = 0;
  if constexpr (T.right) {
    end = min(end, last + diagonal + p.window_right + 1);
    whole_end = max(0, min(whole_end, first + diagonal + p.window_right + 1));
  }
  if constexpr (T.left) {
    begin = max(0, first + diagonal - p.window_left);
    whole_begin = max(0, last + diagonal - p.window_left);
  }
  Steps s;
  s.end = max(1, (end + T.keys - 1) / T.keys);
  s.begin = T.left ? min(begin / T.keys, s.end - 1) : 0;
  s.whole_end = whole_end / T.keys;
  s.whole_begin = T.left ? (whole_begin + T.keys - 1) / T.keys : 0;
  return s;
}
template <auto T>
TANDEM_DEVICE Steps steps_of(const ForwardParams& p, const Tile& t) {
  return steps_of<T>(p, t, t.m * T.rows(), T.rows());
}

// The n-th unit of work. listed: tiles of one head in the list of a ragged problem.
template <auto T>
TANDEM_DEVICE Tile tile_at(const ForwardParams& p, int n, int listed) {
  if constexpr (T.ragged) {
    const Unit unit = unit_at(p, n, listed, p.heads_q >> log2_of(p.together));
    const ForwardWork work = p.work[unit.tile];
    Tile tile = ragged_sequence(p, work.sequence);
    tile.m = work.tile;
    tile.head = unit.head;
    return tile;
  } else {
    return dense_tile<T>(p, n);
  }
}

// Over the lanes of a warp, up to and with one's own.
TANDEM_DEVICE int running_sum(int x) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(~0u, x, d);
    if (lane >= d) x += below;
  }
  return x;
}

// Ragged: writes the list of all tiles of one head, the longest first, and its length. One block of 1024 threads.
template <auto T>
TANDEM_DEVICE void schedule(const ForwardParams& p) {
  constexpr int kBuckets = 1024;
  __shared__ int first[kBuckets];  // by falling number of steps: how many tiles, then where the next one goes
  __shared__ int sums[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, shift = log2_of(p.together);
  const int most = (p.seqlen_k + T.keys - 1) / T.keys;
  first[threadIdx.x] = 0;
  __syncthreads();
  // Counts the tiles of each bucket, then gives them their places.
#pragma unroll 1
  for (int placing = 0;; ++placing) {
#pragma unroll 1
    for (int b = warp; b < p.batch; b += 32) {
      Tile t = ragged_sequence(p, b);
      const int tiles = static_cast<int>(((static_cast<i64>(t.q_rows) << shift) + T.rows() - 1) / T.rows());
#pragma unroll 1
      for (t.m = lane; t.m < tiles; t.m += 32) {
        const Steps s = steps_of<T>(p, t);
        const int shorter = max(0, most - (s.end - s.begin));  // than the longest
        const int bucket = most < kBuckets ? shorter : static_cast<int>(static_cast<i64>(shorter) * kBuckets / most);
        const int at = atomicAdd(&first[min(kBuckets - 1, bucket)], 1);
        // The list has room for tiles_m entries, more than honest lengths need.
        if (placing && at < p.tiles_m) p.work[at] = {b, t.m};
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
      p.counter[1] = min(sums[31], p.tiles_m);
    }
  }
}
