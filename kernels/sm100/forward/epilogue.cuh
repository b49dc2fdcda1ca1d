// The epilogue of the Blackwell forward: one warpgroup divides the results of both tiles and stores them.
#pragma once
#include "device/coords.cuh"
#include "device/mask.cuh"
#include "device/pack.cuh"
#include "device/pipeline_state.cuh"
#include "device/row.cuh"
#include "device/score_mod.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/forward/smem.cuh"

// Copies a thread's row of a block of the result from tensor memory to shared memory, times `inverse`: 0 for a row
// without visible keys. lost: set if a product of large probabilities and values has overflowed (lazy_max only).
template <Sm100ForwardConfig T>
TANDEM_DEVICE void copy_block(Chunk* to, u32 from, int block, int row, float inverse, bool& lost) {
  // The columns of a block of the result, and its chunks of 16 columns.
  constexpr int kColumns = T.o_block_columns(), kChunks = 128 / kColumns;
#pragma unroll 1
  for (int c = 0; c < 8; c += kChunks) {
    const int column = kColumns * block + 16 / kChunks * c;
    if (column >= T.head_dim_v) break;
    float x[16];
    tmem_load(x, from + column);
    tmem_wait_load(x);
    if constexpr (T.lazy_max()) {
#pragma unroll
      for (int n = 0; n < 16; ++n) lost |= !(fabsf(x[n]) < kInfinity);
    }
    u32 words[4 * kChunks];
#pragma unroll
    for (int n = 0; n < 4 * kChunks; ++n) {
      if (inverse == 0) {
        words[n] = 0;
      } else if constexpr (T.f32_out) {
        words[n] = __float_as_uint(x[n] * inverse);
      } else {
        words[n] = pack<T>(x[2 * n] * inverse, x[2 * n + 1] * inverse);
      }
    }
#pragma unroll
    for (int n = 0; n < kChunks; ++n)
      to[(c + n) ^ (row & 7)] = {{words[4 * n], words[4 * n + 1], words[4 * n + 2], words[4 * n + 3]}};
  }
}

// T.device_splits: stores a thread's row of a split's result, times `inverse`, and releases the accumulator. Returns
// true if a product of large probabilities and values has overflowed (lazy_max only).
template <Sm100ForwardConfig T>
TANDEM_DEVICE bool store_split(const ForwardParams& p, SharedStorage<T>& s, const TileCoords& tile, int i,
                               const Row& row, float inverse) {
  float* const to = p.split.row_out + split_result_at(p, tile.split_row, row.query, row.head) * p.head_dim_v;
  const u32 from = (threadIdx.x / 32 % 4 * 32 << 16) + T.tmem_o(0) + i * T.o_columns();
  bool lost = false;
  tcgen05_fence_after();
#pragma unroll 1
  for (int column = 0; column < T.head_dim_v; column += 16) {
    float x[16];
    tmem_load(x, from + column);
    tmem_wait_load(x);
#pragma unroll
    for (int n = 0; n < 16; n += 4) {
      Chunk chunk;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if constexpr (T.lazy_max()) lost |= !(fabsf(x[n + c]) < kInfinity);
        chunk.x[c] = inverse == 0 ? 0 : __float_as_uint(x[n + c] * inverse);
      }
      if (row.query < tile.q_len && column + n < p.head_dim_v) *reinterpret_cast<Chunk*>(to + column + n) = chunk;
    }
  }
  tcgen05_fence_before();
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive_at_leader<T>(&s.o_empty[i]);
  return lost;
}

template <Sm100ForwardConfig T>
TANDEM_DEVICE void epilogue(const ForwardParams& p, SharedStorage<T>& s) {
  constexpr int kEpilogueSync = 1;  // named barrier
  constexpr int kColumns = T.o_block_columns();
  const int warp = warp_uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32, thread = threadIdx.x % 128;
  const u32 lanes = static_cast<u32>(warp) * 32 << 16;
  const int pack_shift = log2_of(p.pack_gqa);
  PipelineState<kWorkSlots> slot;
  PipelineState<T.o_blocks()> out;
  u32 parities = 0;                   // one bit per tile
  [[maybe_unused]] u32 n_blocks = 0;  // over all work tiles

  auto finish = [&](Sm100Work& work, int i) {
    const TileCoords& tile = work.coords;
    const int first_row = first_row_of<T>(tile, i);
    const int rows_left = (tile.q_rows << pack_shift) - first_row;
    const TileCoords to_tile = result_coords<T>(p, tile, work.index);
    const Row row(p, tile, first_row + thread);
    const u32 parity = parities >> i & 1;
    parities ^= 1 << i;
    mbarrier_wait(&s.sum_ready[i], parity);
    RowFinal end = finalize_row<T>(p, row, !T.options.varlen || row.query < tile.q_len, s.sum[i][thread],
                                   s.row_max[i][thread], [&] { return is_first_split<T>(p, tile, work.index); });
    if constexpr (T.options.dropout) end.inverse *= p.dropout.scale;
    store_work_lse<T>(p, tile, work.index, row, end.lse);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.sum_empty[i]);
    mbarrier_wait(&s.o_full[i], parity);
    constexpr int kBlocks = (T.head_dim_v + kColumns - 1) / kColumns;
    const bool is_split = T.device_splits && warp_any(tile.split_row >= 0);
    bool lost = is_split && store_split<T>(p, s, tile, i, row, end.inverse);
    for (int block = is_split ? kBlocks : 0; block < kBlocks; ++block, out.advance()) {
      // Afterwards the last store from this buffer has read the buffer.
      if (warp == 0 && elect_one()) tma_store_wait_read<T.o_blocks() - 1>();
      named_sync(kEpilogueSync, 128);
      tcgen05_fence_after();
      auto* to = reinterpret_cast<Chunk*>(s.out[out.index]) + thread * 8;
      copy_block<T>(to, lanes + T.tmem_o(0) + i * T.o_columns(), block, thread, end.inverse, lost);
      if (block == kBlocks - 1) {
        tcgen05_fence_before();
        __syncwarp();
        if (lane == 0) arrive_at_leader<T>(&s.o_empty[i]);
      }
      fence_proxy_async();
      named_sync(kEpilogueSync, 128);
      if (T.options.varlen && rows_left < T.kTileM) {
        store_rows<T.kTileM, T.f32_out ? 4 : 2>(
            p, to_tile, s.out[out.index],
            {first_row, rows_left, kColumns * block, min(kColumns, p.head_dim_v - kColumns * block)});
        named_sync(kEpilogueSync, 128);
      } else if (warp == 0 && elect_one()) {
        if (T.lazy_max() && work.strict) tma_store_wait();  // waits for the invalid result's store
        tma_store(&p.out, s.out[out.index], kColumns * block, 0, tile.q_begin + (first_row >> pack_shift), tile.head,
                  to_tile.batch);
      }
      if (warp == 0 && elect_one()) tma_store_commit();
    }
    if (T.lazy_max() && warp_any(lost && end.inverse != 0) && !warp_any(work.strict) && lane == 0) work.request_retry();
  };
  for (;; slot.advance()) {
    mbarrier_wait(&s.work_full[slot.index], slot.phase);
    Sm100Work& work = s.work[slot.index];
    const auto kind = static_cast<Sm100Work::Kind>(warp_uniform(static_cast<int>(work.kind)));
    if (kind == Sm100Work::Kind::over) break;
    if (kind == Sm100Work::Kind::tiles) {
#pragma unroll 1
      for (int i = 0; i < T.q_stage(); ++i)
        if (warp_any(work.has(i))) finish(work, i);
      if (T.q_stage() == 1) n_blocks += work.ends[0] - work.begins[0];
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.work_empty[slot.index]);
  }
  // The leader commits every n_block's PV product to the other CTA, which must not end before the commit arrives. After
  // o_full at most the last commit is outstanding. The softmax waits for one commit less, so that this wait is needed.
  // (One tile always means a CTA pair.)
  if constexpr (T.q_stage() == 1) mbarrier_wait(&s.o_added[0], (n_blocks & 1) ^ 1);
  if (warp == 0 && elect_one()) tma_store_wait();
}
