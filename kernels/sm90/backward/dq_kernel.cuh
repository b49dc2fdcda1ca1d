// dq of wide heads by a separate kernel. The kernel sums dS' K over the n_blocks of a chunk, from the dS that the main
// kernel has stored. A CTA has one or two m_blocks per warpgroup, and one sum over at most 8192 keys for each of them.
// One thread loads.
//
// A semaphore orders the sums of an m_block: each CTA adds to the earlier sums, and the last CTA stores dq. The order,
// and so the result, does not depend on the chunks.
//
// The kernel may begin before the main kernel has ended. CTAs then occupy SMs without tiles, and the loading warp waits
// for the semaphore of each n_block.
#pragma once
#include "device/pipeline_state.cuh"
#include "ptx/global.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward/epilogue.cuh"
#include "sm90/backward/operands.cuh"

template <Sm90BackwardConfig T>
struct DqShared {
  alignas(1024) u16 k[T.kDqStages][T.k_box() * T.head_dim];
  alignas(1024) u16 ds[T.kDqStages][T.dq_cta_m_blocks()][T.k_box() * T.tile_m];  // keys in rows
  alignas(8) u64 full[T.kDqStages], empty[T.kDqStages];                          // arrivals: 1, MMA warps
};

// The number of iterations per n_block.
template <Sm90BackwardConfig T>
constexpr int kDqSteps = T.cta_keys() / T.k_box();

// One sum of an m_block, over its n_blocks [begin, end). The first sum begins at the first key (with a window: at the
// first visible key), so that most m_blocks have one sum. An m_block without visible keys also has one sum.
template <Sm90BackwardConfig T>
struct DqSum {
  int begin = 0, end = 0, before = 0;  // before: number of earlier sums
  bool exists = false, is_last = true;

  DqSum() = default;
  TANDEM_DEVICE DqSum(const BackwardParams& p, const SequenceCoords& s, int m_block, int number) : before(number) {
    if (m_block * T.tile_m >= s.q_rows) return;
    const int count = count_n_blocks<T>(p, s, m_block), first = count > 0 ? first_n_block<T>(p, s, m_block) : 0;
    begin = first + number * p.dq_sum_n_blocks;
    end = max(begin, min(first + count, begin + p.dq_sum_n_blocks));
    exists = number == 0 || begin < end;
    is_last = first + count <= begin + p.dq_sum_n_blocks;
  }
  TANDEM_DEVICE bool has(int n_block) const { return n_block >= begin && n_block < end; }
};

template <Sm90BackwardConfig T>
struct DqTile {
  const BackwardParams& p;
  const DsChunk chunk;
  int number, head, first_m_block;  // number: index of the sum
  SequenceCoords sequence;
  int begin, end;  // n_blocks that one of the m_blocks needs

  TANDEM_DEVICE explicit DqTile(const BackwardParams& params) : p(params), chunk(params, load_acquire(p.counter + 1)) {
    // CTAs with the most n_blocks come first.
    const int groups = (p.sequence_m_blocks + T.dq_cta_m_blocks() - 1) / T.dq_cta_m_blocks(),
              of_sum = groups * p.chunk_heads;
    const int of_chunk = static_cast<int>(blockIdx.x) / of_sum;
    number = chunk.first_n_block / p.dq_sum_n_blocks + of_chunk;
    const int rest = static_cast<int>(blockIdx.x) - of_chunk * of_sum, of_all = chunk.first_head + rest % p.chunk_heads;
    first_m_block = (groups - 1 - rest / p.chunk_heads) * T.dq_cta_m_blocks();
    head = of_all % p.heads_q;
    sequence = sequence_coords<T>(p, of_all / p.heads_q);
    begin = end = 0;
    if (rest % p.chunk_heads >= chunk.heads) {
      first_m_block = p.sequence_m_blocks;  // no such head: no m_block exists
      sequence = sequence_coords<T>(p, 0);
    }
#pragma unroll
    for (int i = 0; i < T.dq_cta_m_blocks(); ++i) {
      const DqSum<T> sum = sum_of(i);
      if (sum.begin == sum.end) continue;
      begin = begin == end ? sum.begin : min(begin, sum.begin);
      end = max(end, sum.end);
    }
  }
  TANDEM_DEVICE DqSum<T> sum_of(int i) const { return {p, sequence, first_m_block + i, number}; }
};

// Waits until the dS of an n_block is complete. Returns the first later n_block that is not complete: one semaphore per
// lane, or all at once after the chunk's last tile.
template <Sm90BackwardConfig T>
TANDEM_DEVICE int wait_for_ds(const DqTile<T>& tile, int n_block) {
  const BackwardParams& p = tile.p;
  const int own = min(n_block + static_cast<int>(threadIdx.x % 32), tile.end - 1), all = tile_parts<T>(p);
  const int* const semaphore = p.ds_semaphore + ds_semaphore_at(p, tile.sequence, tile.head, own);
  const bool is_over = warp_any(load_acquire(p.counter + 3) == chunk_tiles(constant<T>, p, tile.chunk));
  u32 missing = is_over ? 0 : ~0u;
  while (missing & 1) {
    missing = __ballot_sync(~0u, load_acquire(semaphore) < all);
    if (missing & 1) sleep(100);
  }
  __syncwarp();
  fence_proxy_async_global();  // the async proxy wrote dS, and it also reads dS
  if (is_over) return tile.end;
  return n_block + (missing ? __ffs(static_cast<int>(missing)) - 1 : 32);
}

template <Sm90BackwardConfig T>
TANDEM_DEVICE void load_dq_operands(const DqTile<T>& tile, DqShared<T>& s) {
  const BackwardParams& p = tile.p;
  DqSum<T> sums[T.dq_cta_m_blocks()];
#pragma unroll
  for (int i = 0; i < T.dq_cta_m_blocks(); ++i) sums[i] = tile.sum_of(i);
  PipelineState<T.kDqStages> ring;
  const bool loads = elect_one();
  int complete = tile.begin;  // n_blocks before this n_block have their dS
#pragma unroll 1
  for (int n = tile.begin * kDqSteps<T>; n < tile.end * kDqSteps<T>; ++n, ring.advance()) {
    const int n_block = n / kDqSteps<T>, first_row = n % kDqSteps<T> * T.k_box();
    if (n_block >= complete) complete = wait_for_ds(tile, n_block);
    if (!loads) continue;
    mbarrier_wait(&s.empty[ring.index], ring.phase ^ 1);
    u64* const full = &s.full[ring.index];
    u32 blocks = 0;
#pragma unroll
    for (int i = 0; i < T.dq_cta_m_blocks(); ++i) blocks += u32{sums[i].has(n_block)};
    mbarrier_expect_tx(full, sizeof s.k[0] + blocks * u32{sizeof s.ds[0][0]});
#pragma unroll 1
    for (int c = 0; c < T.head_dim; c += 64)
      tma_load(s.k[ring.index] + c * T.k_box(), &p.k, full, c, tile.sequence.k_begin + n * T.k_box(),
               tile.head / (p.heads_q / p.heads_k), tile.sequence.batch);
#pragma unroll
    for (int i = 0; i < T.dq_cta_m_blocks(); ++i) {
      if (!sums[i].has(n_block)) continue;
      const u16* const ds = ds_at<T>(p, tile.sequence, tile.chunk, tile.head, tile.first_m_block + i, n_block);
      bulk_load(s.ds[ring.index][i], ds + first_row * T.tile_m, sizeof s.ds[0][0], full);
    }
  }
}

// Adds this CTA's sum of one m_block to the earlier sums. The last CTA stores dq.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void store_or_accumulate_dq(const DqTile<T>& tile, const DqSum<T>& sum, int m_block, int barrier,
                                          float (&dq)[T.head_dim / 2]) {
  if (!warp_any(sum.exists)) return;
  const BackwardParams& p = tile.p;
  const SequenceCoords& sequence = tile.sequence;
  const i64 at = m_block_at(p, sequence, tile.head, m_block);
  float4* const sums = reinterpret_cast<float4*>(p.dq_accum + dq_sums_at(constant<T>, at));
  int* const semaphore = p.dq_semaphore + dq_semaphore_at(constant<T>, at, 0);
  if (warp_any(sum.before > 0)) {
    if (threadIdx.x % 128 == 0) {
      while (load_acquire(semaphore) < sum.before) {
      }
    }
    named_sync(barrier, 128);
#pragma unroll
    for (int r = 0; r < T.head_dim / 2; r += 4) {
      const float4 x = sums[r / 4 * 128 + threadIdx.x % 128];
      dq[r] += x.x, dq[r + 1] += x.y, dq[r + 2] += x.z, dq[r + 3] += x.w;
    }
  }
  if (warp_any(!sum.is_last)) {
    store_sums(sums, 0, dq);
    named_sync(barrier, 128);
    if (threadIdx.x % 128 == 0) add_release(semaphore, 1);
    return;
  }
  const int first = m_block * T.tile_m, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const i64 base = dq_row_at(p, sequence.batch, sequence.q_begin + first, tile.head);
  const GradientRows to{
      p.dq, base, p.dq_row, sequence.q_rows - first, sequence.q_len - first, p.head_dim, p.dq_is_f32 != 0};
  if (dq_has_chunks(p)) {
    store_chunks<T>(dq, p.scale, to, row, 0);
  } else {
    store_direct<T>(dq, p.scale, to, row, 2 * (threadIdx.x & 3), p.accumulate);
  }
}

template <Sm90BackwardConfig T>
TANDEM_DEVICE void sum_dq(const DqTile<T>& tile, DqShared<T>& s, int index) {
  using DqMma = Wgmma<T.options.f16, T.head_dim>;
  constexpr u32 kBlockBytes = T.k_box() * 128;  // 64 columns
  constexpr bool kTwo = T.dq_m_blocks() == 2;
  const int first = index * T.dq_m_blocks();  // among the CTA's m_blocks
  const DqSum<T> sums[2] = {tile.sum_of(first), kTwo ? tile.sum_of(first + 1) : DqSum<T>()};
  PipelineState<T.kDqStages> ring;
  float dq[T.dq_m_blocks()][T.head_dim / 2];
#pragma unroll
  for (auto& block : dq)
#pragma unroll
    for (float& x : block) x = 0;
  // Each warp arrives. Otherwise a warp could be a whole ring late and wait for a phase that has already passed.
  auto leave = [&](int slot) { arrive(&s.empty[slot]); };
  // Skips n_blocks that only other warpgroups need.
  auto pass = [&](int begin, int end) {
#pragma unroll 1
    for (int n = begin * kDqSteps<T>; warp_any(n < end * kDqSteps<T>); ++n, ring.advance()) {
      mbarrier_wait(&s.full[ring.index], ring.phase);
      leave(ring.index);
    }
  };
  // Processes n_blocks that the m_blocks kFirst to kLast need.
  auto run = [&]<int kFirst, int kLast>(int begin, int end) {
    auto multiply = [&] {
      mbarrier_wait(&s.full[ring.index], ring.phase);
#pragma unroll
      for (int i = kFirst; i <= kLast; ++i) fence_operand(dq[i]);
      wgmma_fence();
#pragma unroll
      for (int i = kFirst; i <= kLast; ++i) {
        const u64 a = wgmma_smem_desc(shared_address(s.ds[ring.index][first + i]), kBlockBytes, 1024);
        const u64 b = wgmma_smem_desc(shared_address(s.k[ring.index]), kBlockBytes, 1024);
#pragma unroll
        for (int c = 0; c < T.k_box() / 16; ++c) DqMma::ss_tn(dq[i], a + rows_16(c), b + rows_16(c), true);
      }
      wgmma_commit();
    };
    multiply();
    int before = ring.index;
    ring.advance();
#pragma unroll 1
    for (int n = begin * kDqSteps<T> + 1; warp_any(n < end * kDqSteps<T>); ++n, ring.advance()) {
      multiply();
      wgmma_wait<1>();
      leave(before);
      before = ring.index;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = kFirst; i <= kLast; ++i) fence_operand(dq[i]);
    leave(before);
  };
  // Splits the range at every n_block where the set of m_blocks that need it changes.
#pragma unroll 1
  for (int begin = tile.begin; warp_any(begin < tile.end);) {
    int end = tile.end;
#pragma unroll
    for (const DqSum<T>& sum : sums) {
      if (sum.begin > begin) end = min(end, sum.begin);
      if (sum.end > begin) end = min(end, sum.end);
    }
    const bool one = warp_any(sums[0].has(begin)), other = kTwo && warp_any(sums[1].has(begin));
    if (one && other) {
      if constexpr (kTwo) run.template operator()<0, 1>(begin, end);
    } else if (one) {
      run.template operator()<0, 0>(begin, end);
    } else if (other) {
      if constexpr (kTwo) run.template operator()<1, 1>(begin, end);
    } else {
      pass(begin, end);
    }
    begin = end;
  }
#pragma unroll
  for (int i = 0; i < T.dq_m_blocks(); ++i)
    store_or_accumulate_dq<T>(tile, sums[i], tile.first_m_block + first + i, kBarOwnWarpgroup + index, dq[i]);
}

template <Sm90BackwardConfig T>
TANDEM_DEVICE void dq(const BackwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<DqShared<T>*>(memory);
  static_assert(sizeof(DqShared<T>) <= T.dq_smem_bytes());
  if (threadIdx.x == 0) {
    for (u64& full : s.full) mbarrier_init(&full, 1);
    for (u64& empty : s.empty) mbarrier_init(&empty, 4 * T.warpgroups);
    fence_mbarrier_init();
    fence_proxy_async();
  }
  launch_dependents();
  const DqTile<T> tile(p);
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == T.warpgroups) {
    setmaxnreg_dec<T.load_registers()>();
    if (warp_uniform(threadIdx.x / 32) == 4 * T.warpgroups) load_dq_operands(tile, s);
  } else {
    setmaxnreg_inc<T.registers()>();
    sum_dq(tile, s, warpgroup);
  }
  // The last CTA advances the counter to the next chunk after the main kernel has ended. Earlier CTAs leave their SMs
  // to the next CTAs.
  if (threadIdx.x == 0 && add_acquire_release(p.counter + 2, 1) == static_cast<int>(gridDim.x) - 1) {
    grid_dependency_wait();
    p.counter[0] = 0;
    p.counter[1] += 1;
    p.counter[2] = 0;
    p.counter[3] = 0;
  }
}
