// Issues the products of the Blackwell forward, by one thread of a converged warp (in a CTA pair of the leader).
#pragma once
#include "device/block_mask.cuh"
#include "device/pipeline_state.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/warp.cuh"
#include "sm100/forward/smem.cuh"

// The PV product that is issued after the next QK product.
template <Sm100ForwardConfig T>
struct Pending {
  bool any = false, first, last;  // first, last: position of the iteration in its tile
  PipelineState<T.score_slots()> s_ring;
};

// The iterations of a work tile, and the tiles that take part in the current one. After the last work tile one
// iteration remains, for the last PV products. load() may issue a retry after it has read the requests.
template <Sm100ForwardConfig T>
struct TileSteps {
  static constexpr int kTiles = T.q_stage();
  const bool tiles;
  const int begin, end;
  int n_block;
  int begins[kTiles], ends[kTiles];
  // Block mask: the list of iterations, the current iteration, and the number of iterations that each tile still takes
  // part in.
  [[maybe_unused]] const int* const listed;
  [[maybe_unused]] u32 step = 0;
  [[maybe_unused]] int left[kTiles];

  TANDEM_DEVICE TileSteps(const ForwardParams& p, const Sm100Work& work)
      : tiles(work.kind == Sm100Work::Kind::tiles),
        begin(tiles ? work.begin : 0),
        end(tiles ? work.end : 1),
        n_block(end - 1),
        listed(T.options.block_mask && tiles ? steps_of<T>(p, work.coords) : nullptr) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      begins[i] = tiles ? work.begins[i] : 0;
      ends[i] = tiles ? work.ends[i] : 0;
      if (T.options.block_mask) left[i] = ends[i];
    }
  }
  TANDEM_DEVICE void read_step() {
    if constexpr (T.options.block_mask) step = tiles ? listed[kListHeader + end - 1 - n_block] : 0;
  }

  // The position of tile i in its iterations.
  TANDEM_DEVICE bool takes_part(int i) const {
    if constexpr (T.options.block_mask) return (step & tile_bits<T>(i)) != 0;
    return !(n_block < begins[i] || n_block >= ends[i]);
  }
  TANDEM_DEVICE bool is_first(int i) const {
    return T.options.block_mask ? left[i] == ends[i] : n_block == ends[i] - 1;
  }
  TANDEM_DEVICE bool is_last(int i) const { return T.options.block_mask ? left[i] == 1 : n_block == begins[i]; }
};

template <Sm100ForwardConfig T>
struct Products {
  static constexpr int kCtas = T.ctas(), kTiles = T.q_stage(), kRows = T.mma_m();

  SharedStorage<T>& s;
  const u64 q, k, v;  // descriptors
  PipelineState<T.ring_slots()> ring;
  PipelineState<T.score_slots()> s_ring[kTiles];
  u32 q_parity[kTiles] = {}, o_parity[kTiles], pv_parity[kTiles] = {};
  Pending<T> pending[kTiles];
  bool any_pending = false;
  const bool issues = elect_one();       // other lanes only wait
  PipelineState<T.ring_slots()> values;  // ring slot of the pending PV product

  TANDEM_DEVICE explicit Products(SharedStorage<T>& shared)
      : s(shared),
        q(tcgen05_smem_desc(shared_address(s.q), 0, 1024)),
        k(tcgen05_smem_desc(shared_address(s.ring), 0, 1024)),
        v(tcgen05_smem_desc(shared_address(s.ring), T.v_block_rows() * 128, 1024)) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) o_parity[i] = 1;
  }

  TANDEM_DEVICE static void wait(u64* barrier, u32 parity) {
    mbarrier_wait(barrier, parity);
    tcgen05_fence_after();
  }
  TANDEM_DEVICE void wait_for_block(PipelineState<T.ring_slots()> at) {
    if constexpr (T.two_cta && T.options.varlen) {  // the other CTA's relay may have zeroed values
      mbarrier_wait_cluster(s.ring_full(at.index), at.phase);
      tcgen05_fence_after();
    } else {
      wait(s.ring_full(at.index), at.phase);
    }
  }
  TANDEM_DEVICE void mma_qk(int i, PipelineState<T.ring_slots()> at) {
    const int scores = kTiles > 1 ? i : s_ring[i].index;
#pragma unroll
    for (int b = 0; b < T.k_blocks(); ++b, at.advance()) {
      wait_for_block(at);
      const u64 k_b = k + at.index * (T.block_bytes() >> 4),
                q_b = q + (i * T.k_blocks() + b) * (T.kTileBlockBytes >> 4);
#pragma unroll
      for (int c = 0; c < 4 && 4 * b + c < T.head_dim / 16; ++c)
        if (issues)
          tcgen05_mma_ss<kCtas>(T.tmem_s(scores), q_b + c * 2, k_b + c * 2,
                                tcgen05_instr_desc(MmaLayout::nt, T.options.f16, kRows, T.tile_n), b + c > 0);
    }
    if (issues) tcgen05_commit<kCtas>(&s.s_ready[scores]);
  }
  TANDEM_DEVICE void mma_pv(int i) {
    const Pending<T> it = pending[i];
    const int from = kTiles > 1 ? i : it.s_ring.index;
    if (it.first) {
      wait(&s.o_empty[i], o_parity[i]);
      o_parity[i] ^= 1;
    }
    PipelineState<T.ring_slots()> at = values;
    u64 v_b = 0;
#pragma unroll
    for (int c = 0; c < T.tile_n / 16; ++c) {
      if (c * 16 % T.v_block_rows() == 0) {
        if (c > 0) at.advance();
        wait_for_block(at);
        v_b = v + at.index * (T.block_bytes() >> 4);
      }
      if (c == 0 || c == T.first_part() / 16) wait(&s.p_ready[from][c > 0], it.s_ring.phase);
      if (issues)
        tcgen05_mma_ts<kCtas>(T.tmem_o(i), T.tmem_p(from) + 8 * c, v_b + c % (T.v_block_rows() / 16) * (2048 >> 4),
                              tcgen05_instr_desc(MmaLayout::nn, T.options.f16, kRows, T.o_columns()),
                              !(it.first && c == 0));
    }
    if (kTiles == 1 && issues) tcgen05_commit<kCtas>(&s.o_added[i]);
    if (it.last && issues) tcgen05_commit<kCtas>(&s.o_full[i]);
    if constexpr (T.wait_products) {  // the next scores overwrite the probabilities
      if (kTiles > 1 && issues) tcgen05_commit_here<kCtas>(&s.o_added[i]);
      wait(&s.o_added[i], pv_parity[i]);
      pv_parity[i] ^= 1;
    }
  }
  TANDEM_DEVICE void release(PipelineState<T.ring_slots()> at, int blocks) {
#pragma unroll
    for (int b = 0; b < blocks; ++b, at.advance())
      if (issues) tcgen05_commit<kCtas>(&s.ring_empty[at.index]);
  }
  // Issues the scores' product, and returns the PV product that becomes pending.
  TANDEM_DEVICE Pending<T> begin_scores(int i, TileSteps<T>& at, PipelineState<T.ring_slots()> keys) {
    if (!at.takes_part(i)) return Pending<T>();
    if (at.is_first(i)) {
      wait(s.q_full(i), q_parity[i]);
      q_parity[i] ^= 1;
    }
    mma_qk(i, keys);
    if (at.is_last(i) && issues) tcgen05_commit<kCtas>(&s.q_empty[i]);
    const Pending<T> now{true, at.is_first(i), at.is_last(i), s_ring[i]};
    if constexpr (T.options.block_mask) --at.left[i];
    s_ring[i].advance();
    return now;
  }
  // Issues the PV products of the preceding iteration and the QK products of this iteration. With one tile the QK
  // products come first, because their softmax runs afterwards.
  TANDEM_DEVICE void turn(TileSteps<T>& at) {
    const PipelineState<T.ring_slots()> keys = ring;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      Pending<T> next;
      if (kTiles == 1) next = begin_scores(i, at, keys);
      if (pending[i].any) mma_pv(i);
      if (i == kTiles - 1 && any_pending) release(values, T.v_blocks());
      if (kTiles > 1) next = begin_scores(i, at, keys);
      pending[i] = next;
    }
    any_pending = at.tiles;
    if (!at.tiles) return;
    release(keys, T.k_blocks());
#pragma unroll
    for (int b = 0; b < T.k_blocks(); ++b) ring.advance();
    values = ring;
#pragma unroll
    for (int b = 0; b < T.v_blocks(); ++b) ring.advance();
  }
};

template <Sm100ForwardConfig T>
TANDEM_DEVICE void mma(const ForwardParams& p, SharedStorage<T>& s) {
  Products<T> products(s);
  PipelineState<kWorkSlots> slot;
  for (bool over = false; !over; slot.advance()) {
    mbarrier_wait(&s.work_full[slot.index], slot.phase);
    const Sm100Work& work = s.work[slot.index];
    over = work.kind == Sm100Work::Kind::over;
    TileSteps<T> at(p, work);
    __syncwarp();  // all lanes have read the tile
    if (!over && products.issues) mbarrier_arrive(&s.work_empty[slot.index]);
#pragma unroll 1
    for (; at.n_block >= at.begin; --at.n_block) {
      at.read_step();
      products.turn(at);
      if (!at.tiles) break;
    }
  }
}
