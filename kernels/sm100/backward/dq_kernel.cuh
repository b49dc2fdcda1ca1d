// dq of wide heads on Blackwell by a separate kernel. The kernel sums dQ = dS' K over the n_blocks of a chunk, from the
// dS that the main kernel has stored. A CTA has two m_blocks of a query head, whose sums are in tensor memory.
//
//    load                          | mma                          | two warpgroups, one m_block each
//                                  |                              | sums of earlier chunks to tensor memory
//    64 keys, their dS per m_block | dQ += dS' K, per m_block     |
//    ...                           | ...                          | dq, or sums for later chunks, to memory
//
// Sums of earlier chunks return to tensor memory without rounding. The result does not depend on the chunks.
#pragma once
#include "device/gradient.cuh"
#include "device/n_block_work.cuh"
#include "device/pipeline_state.cuh"
#include "ptx/global.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/relay.cuh"

template <Sm100BackwardConfig T>
struct DqStage {
  alignas(1024) u16 k[T.kDqKeys * T.k_columns()];
  alignas(1024) u16 ds[T.kDqMBlocks][T.kDqKeys * T.tile_m];  // keys in rows
};
template <Sm100BackwardConfig T>
struct DqShared {
  DqStage<T> stages[T.kDqKernelStages];
  alignas(8) u64 tma_full[T.kDqKernelStages];  // 1 and bytes: keys and dS are loaded
  u64 peer_full[T.kDqKernelStages];            // 1, with varlen: keys beyond the sequence are zero
  u64 empty[T.kDqKernelStages];                // 1, by commit: the stage may be replaced
  u64 sums_ready;                              // 8 warps: sums of earlier chunks are in tensor memory
  u64 dq_ready;                                // 1 and 1, by commit: has_sum is valid, dq is complete
  bool has_sum[T.kDqMBlocks];
  u32 tensor_memory;

  TANDEM_DEVICE u64* full(u32 stage) { return T.has_relay_warp() ? &peer_full[stage] : &tma_full[stage]; }
};

// The m_blocks of a CTA, and the n_blocks that add to them.
template <Sm100BackwardConfig T>
struct DqTile {
  static constexpr int kHalves = T.kCtaKeys / T.kDqKeys;  // stages of an n_block

  const BackwardParams& p;
  const DsChunk chunk;
  const DqPlace place;
  const SequenceCoords sequence;
  DqChunkSum sums[T.kDqMBlocks];
  int begin, end;  // n_blocks that one of the m_blocks needs

  TANDEM_DEVICE explicit DqTile(const BackwardParams& params)
      : p(params),
        chunk(params),
        place(constant<T>, params, chunk, static_cast<int>(blockIdx.x)),
        sequence(sequence_coords<T>(params, place.sequence)),
        begin(1 << 30),
        end(0) {
#pragma unroll
    for (int i = 0; i < T.kDqMBlocks; ++i) {
      if (place.head < 0) continue;  // the chunk has fewer heads
      sums[i] = DqChunkSum(constant<T>, p, sequence, chunk, place.first_m_block + i);
      if (sums[i].begin == sums[i].end) continue;
      begin = min(begin, sums[i].begin);
      end = max(end, sums[i].end);
    }
  }
  TANDEM_DEVICE bool has(int i, int n_block) const {
    if (!sums[i].has(n_block)) return false;
    if constexpr (!T.options.block_mask) return true;
    const u32 word = table_word<T>(p, sequence, place.head, place.first_m_block + i, n_block);
    return (word & ((1u << kStateBits) - 1)) != 0;
  }
  // Calls use(n_block, half, has) for each stage in order. has: whether each m_block sees the n_block.
  template <class Use>
  TANDEM_DEVICE void for_stages(Use&& use) const {
#pragma unroll 1
    for (int n_block = begin; n_block < end; ++n_block) {
      bool needs[T.kDqMBlocks], any = false;
#pragma unroll
      for (int i = 0; i < T.kDqMBlocks; ++i) any |= needs[i] = has(i, n_block);
      if (!any) continue;
#pragma unroll 1
      for (int half = 0; half < kHalves; ++half) use(n_block, half, needs);
    }
  }
};

// One thread calls this function.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void load_dq_operands(const DqTile<T>& tile, DqShared<T>& s) {
  const BackwardParams& p = tile.p;
  constexpr int kBlock = T.kCtaKeys * 64, kStageBlock = T.kDqKeys * 64;  // elements of 64 queries
  PipelineState<T.kDqKernelStages> ring;
  tile.for_stages([&](int n_block, int half, const bool(&needs)[T.kDqMBlocks]) {
    DqStage<T>& stage = s.stages[ring.index];
    u64* const full = &s.tma_full[ring.index];
    mbarrier_wait(&s.empty[ring.index], ring.phase ^ 1);
    u32 bytes = sizeof stage.k;
#pragma unroll
    for (const bool has : needs) bytes += has ? u32{sizeof stage.ds[0]} : 0;
    mbarrier_expect_tx(full, bytes);
#pragma unroll 1
    for (int c = 0; c < T.k_columns(); c += 64)
      tma_load(stage.k + c * T.kDqKeys, &p.k, full, c, tile.sequence.k_begin + n_block * T.kCtaKeys + half * T.kDqKeys,
               tile.place.head / (p.heads_q / p.heads_k), tile.sequence.batch);
#pragma unroll
    for (int i = 0; i < T.kDqMBlocks; ++i) {
      if (!needs[i]) continue;
      const u16* const ds =
          ds_at<T>(p, tile.sequence, tile.chunk, tile.place.head, tile.place.first_m_block + i, n_block);
#pragma unroll
      for (int block = 0; block < T.tile_m / 64; ++block)
        bulk_load(stage.ds[i] + block * kStageBlock, ds + block * kBlock + half * kStageBlock, 2 * kStageBlock, full);
    }
    ring.advance();
  });
}

// Zeroes keys beyond a sequence. One warp calls this function.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void relay_dq_operands(const DqTile<T>& tile, DqShared<T>& s) {
  PipelineState<T.kDqKernelStages> ring;
  tile.for_stages([&](int n_block, int half, const bool(&)[T.kDqMBlocks]) {
    const int keys = tile.sequence.k_len - n_block * T.kCtaKeys - half * T.kDqKeys;
    pass<T.kDqKeys>(&s.tma_full[ring.index], &s.peer_full[ring.index], ring.phase, s.stages[ring.index].k,
                    T.k_columns(), keys);
    ring.advance();
  });
}

// One thread calls this function.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void multiply_dq(const DqTile<T>& tile, DqShared<T>& s) {
  constexpr u32 kProduct = tcgen05_instr_desc(MmaLayout::tn, T.options.f16, T.tile_m, T.k_columns());
  constexpr u32 kBlockBytes = T.kDqKeys * 128;  // 64 columns
  bool has_sum[T.kDqMBlocks];
#pragma unroll
  for (int i = 0; i < T.kDqMBlocks; ++i) has_sum[i] = tile.sums[i].continues;
  mbarrier_wait(&s.sums_ready, 0);
  tcgen05_fence_after();
  PipelineState<T.kDqKernelStages> ring;
  tile.for_stages([&](int, int, const bool(&needs)[T.kDqMBlocks]) {
    mbarrier_wait(s.full(ring.index), ring.phase);
    tcgen05_fence_after();
    const DqStage<T>& stage = s.stages[ring.index];
    const u64 k = tcgen05_smem_desc(shared_address(stage.k), kBlockBytes, 1024);
#pragma unroll
    for (int i = 0; i < T.kDqMBlocks; ++i) {
      if (!needs[i]) continue;
      const u64 ds = tcgen05_smem_desc(shared_address(stage.ds[i]), kBlockBytes, 1024);
#pragma unroll
      for (int c = 0; c < T.kDqKeys / 16; ++c) {
        const u64 rows_16 = static_cast<u64>(c * (2048 >> 4));
        tcgen05_mma_ss<1>(i * T.k_columns(), ds + rows_16, k + rows_16, kProduct, has_sum[i] || c > 0);
      }
      has_sum[i] = true;
    }
    tcgen05_commit<1>(&s.empty[ring.index]);
    ring.advance();
  });
#pragma unroll
  for (int i = 0; i < T.kDqMBlocks; ++i) s.has_sum[i] = has_sum[i];
  mbarrier_arrive(&s.dq_ready);
  tcgen05_commit<1>(&s.dq_ready);
}

// Stores columns [column, column + n) of a thread's row of dq.
template <Sm100BackwardConfig T, int n>
TANDEM_DEVICE void store_dq_row(const BackwardParams& p, const SequenceCoords& s, int head, int query, int column,
                                float (&x)[n]) {
  if (query >= (p.accumulate ? s.q_len : s.q_rows)) return;
  const i64 row = dq_row_at(p, s.batch, s.q_begin + query, head);
#pragma unroll
  for (float& sum : x) sum = query < s.q_len ? sum * p.scale : 0;
  if (dq_has_chunks(p)) {
#pragma unroll
    for (int c = 0; c < n; c += 8) {
      const u32 words[4] = {pack<T>(x[c], x[c + 1]), pack<T>(x[c + 2], x[c + 3]), pack<T>(x[c + 4], x[c + 5]),
                            pack<T>(x[c + 6], x[c + 7])};
      if (column + c < p.head_dim) global_store(static_cast<u16*>(p.dq) + row + column + c, words);
    }
  } else {
#pragma unroll
    for (int c = 0; c < n; c += 2) {
      if (column + c < p.head_dim)
        store_pair<T>(p.dq, row + column + c, x[c], x[c + 1], p.dq_is_f32 != 0, p.accumulate != 0);
    }
  }
}

// A warpgroup copies the sums of earlier chunks of its m_block to tensor memory. After the products the warpgroup
// stores dq, or the sums for later chunks.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void store_dq(const DqTile<T>& tile, DqShared<T>& s, int index) {
  constexpr int kColumns = 32;
  const BackwardParams& p = tile.p;
  const SequenceCoords& sequence = tile.sequence;
  const int thread = threadIdx.x % 128, m_block = tile.place.first_m_block + index;
  const u32 columns_at = (static_cast<u32>(warp_uniform(threadIdx.x / 32 % 4)) * 32 << 16) + index * T.k_columns();
  const DqChunkSum sum = index == 0 ? tile.sums[0] : tile.sums[1];
  const bool exists = warp_any(sum.exists), continues = warp_any(sum.continues), is_last = warp_any(sum.is_last);
  // The next float4 of a row is 128 rows later.
  float4* const sums =
      exists ? reinterpret_cast<float4*>(p.dq_accum +
                                         dq_sums_at(constant<T>, m_block_at(p, sequence, tile.place.head, m_block))) +
                   thread
             : nullptr;
  if (continues) {
#pragma unroll 1
    for (int column = 0; column < T.k_columns(); column += kColumns) {
      float x[kColumns];
#pragma unroll
      for (int n = 0; n < kColumns; n += 4) {
        const float4 four = sums[(column + n) / 4 * 128];
        x[n] = four.x, x[n + 1] = four.y, x[n + 2] = four.z, x[n + 3] = four.w;
      }
      tmem_store(columns_at + column, x);
    }
    tmem_wait_store();
    tcgen05_fence_before();
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.sums_ready);
  mbarrier_wait(&s.dq_ready, 0);
  tcgen05_fence_after();
  if (!exists) return;
  const bool has_sum = warp_any(s.has_sum[index]);
#pragma unroll 1
  for (int column = 0; column < T.k_columns(); column += kColumns) {
    float x[kColumns] = {};
    if (has_sum) {
      tmem_load(x, columns_at + column);
      tmem_wait_load(x);
    }
    if (is_last) {
      store_dq_row<T>(p, sequence, tile.place.head, m_block * T.tile_m + thread, column, x);
    } else {
#pragma unroll
      for (int n = 0; n < kColumns; n += 4)
        sums[(column + n) / 4 * 128] = make_float4(x[n], x[n + 1], x[n + 2], x[n + 3]);
    }
    __syncwarp();  // the next load is warp-wide
  }
  tcgen05_fence_before();
}

template <Sm100BackwardConfig T>
TANDEM_DEVICE void dq(const BackwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<DqShared<T>*>(memory);
  static_assert(sizeof(DqShared<T>) <= T.dq_smem_bytes());
  const int warp = warp_uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    for (int i = 0; i < T.kDqKernelStages; ++i)
      for (u64* barrier : {&s.tma_full[i], &s.peer_full[i], &s.empty[i]}) mbarrier_init(barrier, 1);
    mbarrier_init(&s.sums_ready, 4 * T.kDqMBlocks);
    mbarrier_init(&s.dq_ready, 2);
    fence_mbarrier_init();
    fence_proxy_async();
  }
  if (warp == 0) tmem_alloc<1>(&s.tensor_memory, T.kTmemColumns);  // allocates all columns, which begin at 0
  __syncthreads();
  launch_dependents();
  grid_dependency_wait();
  const DqTile<T> tile(p);
  constexpr int kOthers = 4 * T.kDqMBlocks;
  if (warp < kOthers) {
    store_dq(tile, s, warp / 4);
  } else if (warp == kOthers) {
    if (elect_one()) multiply_dq(tile, s);
  } else if (warp == kOthers + 1) {
    if (elect_one()) load_dq_operands(tile, s);
  } else if (T.has_relay_warp() && warp == kOthers + 2) {
    relay_dq_operands(tile, s);
  }
  __syncwarp();
  __syncthreads();
  if (warp == 0) tmem_free<1>(s.tensor_memory, T.kTmemColumns);
  // The last CTA advances the counters to the next chunk.
  if (threadIdx.x == 0 && add_acquire_release(p.counter + 2, 1) == static_cast<int>(gridDim.x) - 1) {
    p.counter[0] = 0;
    p.counter[1] += 1;
    p.counter[2] = 0;
    p.counter[3] = 0;
  }
}
