// dq of wide heads by a kernel of its own: the sum of dS' K over the n_blocks of a strip, whose dS the main kernel has
// left in memory. A CTA has two m_blocks, one for each warpgroup, and 8192 keys; one thread loads. What it
// sums is added to what those before it have, when a ticket says that it is there, and the last one stores dq: nobody
// adds out of order, and sums are the same whatever the strips.
#pragma once
#include "ptx/global.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward/epilogue.cuh"
#include "sm90/backward/operands.cuh"
#include "tile/ring.cuh"

template <Sm90BackwardConfig T>
struct DqShared {
  alignas(1024) u16 k[T.kDqStages][T.k_box() * T.head_dim];
  alignas(1024) u16 ds[T.kDqStages][T.warpgroups][T.k_box() * T.tile_m];  // keys in rows
  alignas(8) u64 full[T.kDqStages], empty[T.kDqStages];                   // arrivals: 1, each multiplying warp
};

// Of an n_block.
template <Sm90BackwardConfig T>
constexpr int kDqSteps = T.cta_keys() / T.k_box();

// Of an m_block, the n_blocks [begin, end) of one sum. An m_block that sees no key has one sum, of nothing.
template <Sm90BackwardConfig T>
struct DqSum {
  int begin = 0, end = 0, before = 0;  // sums before this one
  bool exists = false, is_last = true;

  TANDEM_DEVICE DqSum(const BackwardParams& p, const SequenceCoords& s, const Strip& strip, int m_block, int number) {
    if (m_block * T.tile_m >= s.q_rows) return;
    const int count = n_blocks_of<T>(p, s, m_block), first = count > 0 ? first_n_block<T>(p, s, m_block) : 0;
    const int last = max(first, first + count - 1), n_block = strip.first_n_block + number * T.dq_sum_n_blocks();
    begin = max(first, n_block),
    end = min(first + count, min(n_block + T.dq_sum_n_blocks(), strip.first_n_block + strip.n_blocks));
    end = max(begin, end);
    exists = n_block / T.dq_sum_n_blocks() >= first / T.dq_sum_n_blocks() && n_block <= last;
    before = n_block / T.dq_sum_n_blocks() - first / T.dq_sum_n_blocks();
    is_last = n_block / T.dq_sum_n_blocks() == last / T.dq_sum_n_blocks();
  }
  TANDEM_DEVICE bool has(int n_block) const { return n_block >= begin && n_block < end; }
};

template <Sm90BackwardConfig T>
struct DqTile {
  const BackwardParams& p;
  const Strip strip;
  int number, head, first_m_block;  // number: of the sum
  SequenceCoords sequence;
  int begin, end;  // n_blocks that one of the warpgroups needs

  TANDEM_DEVICE explicit DqTile(const BackwardParams& params) : p(params), strip(params) {
    // The most n_blocks first.
    const int groups = (p.sequence_m_blocks + T.warpgroups - 1) / T.warpgroups, of_sum = groups * p.strip_heads;
    number = static_cast<int>(blockIdx.x) / of_sum;
    const int rest = static_cast<int>(blockIdx.x) - number * of_sum, of_all = strip.first_head + rest % p.strip_heads;
    first_m_block = (groups - 1 - rest / p.strip_heads) * T.warpgroups;
    head = of_all % p.heads_q;
    sequence = sequence_coords<T>(p, of_all / p.heads_q);
    begin = end = 0;
    if (rest % p.strip_heads >= strip.heads) {
      first_m_block = p.sequence_m_blocks;  // no such head: none of its m_blocks
      sequence = sequence_coords<T>(p, 0);
    }
#pragma unroll
    for (int i = 0; i < T.warpgroups; ++i) {
      const DqSum<T> sum = sum_of(i);
      if (sum.begin == sum.end) continue;
      begin = begin == end ? sum.begin : min(begin, sum.begin);
      end = max(end, sum.end);
    }
  }
  TANDEM_DEVICE DqSum<T> sum_of(int warpgroup) const { return {p, sequence, strip, first_m_block + warpgroup, number}; }
};

template <Sm90BackwardConfig T>
TANDEM_DEVICE void load_dq_operands(const DqTile<T>& tile, DqShared<T>& s) {
  const BackwardParams& p = tile.p;
  const DqSum<T> sums[2] = {tile.sum_of(0), tile.sum_of(1)};
  static_assert(T.warpgroups == 2);
  Ring<T.kDqStages> ring;
#pragma unroll 1
  for (int n = tile.begin * kDqSteps<T>; n < tile.end * kDqSteps<T>; ++n, ring.advance()) {
    const int n_block = n / kDqSteps<T>, first_row = n % kDqSteps<T> * T.k_box();
    mbarrier_wait(&s.empty[ring.slot], ring.parity ^ 1);
    u64* const full = &s.full[ring.slot];
    const u32 both = u32{sums[0].has(n_block)} + u32{sums[1].has(n_block)};
    mbarrier_expect_tx(full, sizeof s.k[0] + both * u32{sizeof s.ds[0][0]});
#pragma unroll 1
    for (int c = 0; c < T.head_dim; c += 64)
      tma_load(s.k[ring.slot] + c * T.k_box(), &p.k, full, c, tile.sequence.k_begin + n * T.k_box(),
               tile.head / (p.heads_q / p.heads_k), tile.sequence.batch);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!sums[i].has(n_block)) continue;
      const u16* const ds = ds_at<T>(p, tile.sequence, tile.strip, tile.head, tile.first_m_block + i, n_block);
      bulk_load(s.ds[ring.slot][i], ds + first_row * T.tile_m, sizeof s.ds[0][0], full);
    }
  }
}

template <Sm90BackwardConfig T>
TANDEM_DEVICE void sum_dq(const DqTile<T>& tile, DqShared<T>& s, int index) {
  using DqMma = Wgmma<T.f16, T.head_dim>;
  constexpr u32 kBlockBytes = T.k_box() * 128;  // of 64 columns
  const BackwardParams& p = tile.p;
  const SequenceCoords& sequence = tile.sequence;
  const DqSum<T> sum = tile.sum_of(index);
  const int m_block = tile.first_m_block + index;
  Ring<T.kDqStages> ring;
  float dq[T.head_dim / 2];
#pragma unroll
  for (float& x : dq) x = 0;
  // Of each warp: where nothing is multiplied one might be as many steps behind another as have a place, and would wait
  // for a phase that has passed.
  auto leave = [&](int slot) { arrive(&s.empty[slot]); };
  // n_blocks that the other warpgroup alone needs.
  auto pass = [&](int begin, int end) {
#pragma unroll 1
    for (int n = begin * kDqSteps<T>; warp_any(n < end * kDqSteps<T>); ++n, ring.advance()) {
      mbarrier_wait(&s.full[ring.slot], ring.parity);
      leave(ring.slot);
    }
  };
  auto multiply = [&] {
    mbarrier_wait(&s.full[ring.slot], ring.parity);
    const u64 a = wgmma_smem_desc(shared_address(s.ds[ring.slot][index]), kBlockBytes, 1024);
    const u64 b = wgmma_smem_desc(shared_address(s.k[ring.slot]), kBlockBytes, 1024);
    fence_operand(dq);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < T.k_box() / 16; ++c) DqMma::ss_tn(dq, a + rows_16(c), b + rows_16(c), true);
    wgmma_commit();
  };
  const bool has_some = warp_any(sum.begin < sum.end);
  pass(tile.begin, has_some ? sum.begin : tile.end);
  if (has_some) {
    multiply();
    int before = ring.slot;
    ring.advance();
#pragma unroll 1
    for (int n = sum.begin * kDqSteps<T> + 1; warp_any(n < sum.end * kDqSteps<T>); ++n, ring.advance()) {
      multiply();
      wgmma_wait<1>();
      leave(before);
      before = ring.slot;
    }
    wgmma_wait<0>();
    fence_operand(dq);
    leave(before);
    pass(sum.end, tile.end);
  }
  if (!warp_any(sum.exists)) return;
  const i64 at = m_block_at(p, sequence, tile.head, m_block);
  float4* const sums = reinterpret_cast<float4*>(p.dq_sums + at * T.dq_floats());
  int* const ticket = p.dq_tickets + at;
  const int barrier = kSyncOwn + index;
  if (warp_any(sum.before > 0)) {
    if (threadIdx.x % 128 == 0) {
      while (load_acquire(ticket) < sum.before) {
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
    if (threadIdx.x % 128 == 0) add_release(ticket, 1);
    return;
  }
  const int first = m_block * T.tile_m, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const i64 base = sequence.batch * p.dq_batch + (sequence.q_begin + first) * p.dq_row + tile.head * p.dq_head;
  const GradientRows to{
      p.dq, base, p.dq_row, sequence.q_rows - first, sequence.q_len - first, p.head_dim, p.dq_is_f32 != 0};
  if (dq_has_chunks(p)) {
    store_chunks<T>(dq, p.scale, to, row, 0);
  } else {
    store_direct<T>(dq, p.scale, to, row, 2 * (threadIdx.x & 3), p.accumulate);
  }
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
  grid_dependency_wait();
  launch_dependents();
  const DqTile<T> tile(p);
  __syncthreads();
  // Who is the last to know the strip leaves the next one.
  if (threadIdx.x == 0 && add_acquire_release(p.counter + 2, 1) == static_cast<int>(gridDim.x) - 1) {
    p.counter[0] = 0;
    p.counter[1] += 1;
    p.counter[2] = 0;
  }
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == T.warpgroups) {
    setmaxnreg_dec<T.load_registers()>();
    if (uniform(threadIdx.x / 32) == 4 * T.warpgroups && elect_one()) load_dq_operands(tile, s);
  } else {
    setmaxnreg_inc<T.registers()>();
    sum_dq(tile, s, warpgroup);
  }
}
