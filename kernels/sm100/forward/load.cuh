// The loading thread of the Blackwell forward. The thread also takes the work tiles and publishes them to the other
// warps.
#pragma once
#include "device/block_mask.cuh"
#include "device/coords.cuh"
#include "device/paging.cuh"
#include "device/pipeline_state.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm100/forward/smem.cuh"
#include "sm100/operand_load.cuh"

// The iterations of a work tile, of its tiles, and of the tile rows of this CTA. With a block mask, begins and ends
// index the list of iterations, last first. The unmasked n_blocks are then the n_blocks without causal or window
// bounds.
template <Sm100ForwardConfig T>
TANDEM_DEVICE void set_n_blocks(const ForwardParams& p, Sm100Work& work) {
  const TileCoords& tile = work.coords;
  if constexpr (T.options.block_mask) {
    const int* const steps = steps_of<T>(p, tile);
    work.begin = 0;
    work.end = steps[0];
    work.last_n_block = n_block_of(steps[kListHeader]);
    for (int i = 0; i < T.q_stage(); ++i) {
      const NBlockRange own = n_block_range<T>(p, tile, first_row_of<T>(tile, i), T.kTileM);
      work.begins[i] = 0;
      work.ends[i] = steps[i + 1];
      work.unmasked_begins[i] = own.unmasked_begin;
      work.unmasked_ends[i] = own.unmasked_end;
    }
    return;
  }
  work.begin = 1 << 30;
  work.end = 0;
  for (int i = 0; i < T.q_stage(); ++i) {
    const int row = tile.m_block * T.tile_m() + i * T.mma_m();
    work.begins[i] = work.ends[i] = 0;
    if (row >= tile.q_rows << log2_of(p.pack_gqa)) continue;
    const NBlockRange all = in_split<T>(p, n_block_range<T>(p, tile, row, T.mma_m()), tile, work.index);
    const NBlockRange own = T.two_cta ? n_block_range<T>(p, tile, first_row_of<T>(tile, i), T.kTileM) : all;
    work.begins[i] = all.begin;
    work.ends[i] = all.end;
    work.unmasked_begins[i] = own.unmasked_begin;
    work.unmasked_ends[i] = own.unmasked_end;
    work.begin = min(work.begin, all.begin);
    work.end = max(work.end, all.end);
  }
  work.last_n_block = work.end - 1;
}

// CLC: the hardware gives this cluster the work of clusters that have not begun. The longest tiles come first, and no
// counter is needed. Both CTAs read the response before they load the queries of its work tile. The slot is used again
// two work tiles later, after the products of the first work tile.
template <Sm100ForwardConfig T>
struct ClcQuery {
  SharedStorage<T>& s;
  PipelineState<2> at;
  bool asked = false;

  TANDEM_DEVICE void ask() {
    mbarrier_expect_tx(&s.clc_full[at.index], 16);
    if (cta_rank<T>() == 0) clc_try_cancel<T.ctas()>(&s.clc_response[at.index], &s.clc_full[at.index]);
    asked = true;
  }
  // Returns the requested work tile, or -1 if no tile remains.
  TANDEM_DEVICE int answer() {
    mbarrier_wait(&s.clc_full[at.index], at.phase);
    const int first = clc_query_cancel(&s.clc_response[at.index]);
    fence_proxy_async();
    at.advance();
    return first < 0 ? -1 : first / T.ctas();
  }
};

// Returns true if the work tile of this slot must be repeated. In a CTA pair both CTAs repeat it if rows of either have
// overflowed.
template <Sm100ForwardConfig T>
TANDEM_DEVICE bool has_overflowed(SharedStorage<T>& s, const PipelineState<kWorkSlots>& slot) {
  const int here = s.work[slot.index].overflowed;
  if constexpr (!T.two_cta) return here;
  const int other = cta_rank<T>() ^ 1;
  store_at(&s.overflowed_there[slot.index], other, here);
  mbarrier_release_at(&s.overflow_signalled[slot.index], other);
  mbarrier_wait_cluster(&s.overflow_signalled[slot.index], slot.phase ^ 1);
  return here | s.overflowed_there[slot.index];
}

// Loads queries of every work tile, and keys and values from last to first. A retry uses the same slot.
template <Sm100ForwardConfig T>
TANDEM_DEVICE void load(const ForwardParams& p, SharedStorage<T>& s) {
  PipelineState<T.ring_slots()> ring;
  PipelineState<kWorkSlots> slot;
  u32 q_parity = 3;  // one bit per tile
  const int pack_shift = log2_of(p.pack_gqa), heads = p.heads_q >> pack_shift, rank = cta_rank<T>();
  const int listed = listed_tiles<T>(p);
  const int num_work_tiles = T.options.varlen ? listed * heads * (T.split_keys ? p.split.count : 1) : p.tiles;
  const int stride = gridDim.x / T.ctas();
  int fresh = blockIdx.x / T.ctas();  // index of the next work tile without a retry
  int idle = 0;                       // number of free slots after the last fresh tile
  bool used = false;                  // true after the first use of all slots
  [[maybe_unused]] ClcQuery<T> clc_query{s};
  for (;; slot.advance(), used |= slot.index == 0) {
    Sm100Work& work = s.work[slot.index];
    mbarrier_wait(&s.work_empty[slot.index], slot.phase ^ 1);
    if constexpr (T.clc) {
      if (clc_query.asked) fresh = clc_query.answer();
      if (fresh < 0) fresh = num_work_tiles;
    }
    const bool strict = T.lazy_max() && used && has_overflowed(s, slot);
    if (!strict && fresh >= num_work_tiles) {
      const bool over = !T.lazy_max() || ++idle == kWorkSlots;
      work.kind = over ? Sm100Work::Kind::over : Sm100Work::Kind::nothing;
      mbarrier_arrive(&s.work_full[slot.index]);
      if (over) break;
      continue;
    }
    idle = 0;
    if (!strict) work.index = fresh;
    const TileCoords tile = coords_at<T>(p, tile_of_work<T>(p, work.index), listed);
    work.kind = Sm100Work::Kind::tiles;
    work.coords = tile;
    work.strict = strict;
    work.overflowed = 0;
    set_n_blocks<T>(p, work);
    const int begin = work.begin, end = work.end;
    const int has = work.has(0) | (T.q_stage() > 1 && work.has(1)) << 1;
    mbarrier_arrive(&s.work_full[slot.index]);

    const int head_k = (tile.head << pack_shift) / (p.heads_q / p.heads_k);
    [[maybe_unused]] const PagedKeys paged = T.page_rows > 0 ? PagedKeys::of<T>(p, tile) : PagedKeys();
    auto load_block = [&](const TensorMap* map, int column, int columns, int row, int rows) {
      mbarrier_wait(&s.ring_empty[ring.index], ring.phase ^ 1);
      expect_operand<T>(&s.ring_tma_full[ring.index], columns * rows * 2);
      if constexpr (T.page_rows > 0) {
        const PagedColumns all{*map, column, columns / 64, head_k};
        u16* const to = s.ring[ring.index];
        u64* const full = &s.ring_tma_full[ring.index];
        if (rows == T.k_block_rows()) {
          load_pages<T.page_rows, T.k_block_rows()>(to, full, p, paged, all, row);
        } else {
          load_pages<T.page_rows, T.v_block_rows()>(to, full, p, paged, all, row);
        }
      } else {
        for (int c = 0; c < columns; c += 64)
          load_operand<T>(s.ring[ring.index] + c * rows, map, &s.ring_tma_full[ring.index], column + c, row, head_k,
                          tile.batch);
      }
      ring.advance();
    };
    // Iterations are n_blocks; with a block mask they are counted, the last first.
    [[maybe_unused]] const int* const steps = T.options.block_mask ? steps_of<T>(p, tile) + kListHeader : nullptr;
    auto n_block_at = [&](int step) {
      if constexpr (T.options.block_mask) return n_block_of(steps[end - 1 - step]);
      return step;
    };
    auto load_k = [&](int n_block, int c) {
      const int row = tile.k_begin + n_block * T.tile_n + rank * T.k_block_rows();
      load_block(&p.k, 64 * c, 64, row, T.k_block_rows());
    };
    auto load_v = [&](int n_block) {
      constexpr int columns = 64 * T.blocks(T.columns_v());
      for (int r = 0; r < T.tile_n; r += T.v_block_rows())
        load_block(&p.v, rank * T.columns_v(), columns, tile.k_begin + n_block * T.tile_n + r, T.v_block_rows());
    };
    auto load_q = [&](int i) {
      if (!(has >> i & 1)) return;
      mbarrier_wait(&s.q_empty[i], q_parity >> i & 1);
      q_parity ^= 1 << i;
      expect_operand<T>(&s.q_tma_full[i], T.k_blocks() * T.kTileBlockBytes);
#pragma unroll 1
      for (int c = 0; c < T.k_blocks(); ++c)
        load_operand<T>(s.q[i] + c * T.kTileBlockBytes / 2, &p.q, &s.q_tma_full[i], 64 * c, 0,
                        tile.q_begin + (first_row_of<T>(tile, i) >> pack_shift), tile.head, tile.batch);
    };
#pragma unroll 1
    for (int c = 0; c < T.k_blocks(); ++c) load_k(n_block_at(end - 1), c);
#pragma unroll 1
    for (int i = 0; i < T.q_stage(); ++i) load_q(i);
    if constexpr (T.clc) {
      clc_query.ask();
    } else {
      if (!strict) fresh = (p.counter && !T.two_cta ? atomicAdd(p.counter, 1) : fresh) + stride;
    }
#pragma unroll 1
    for (int n_block = end - 1; n_block >= begin; --n_block) {
      load_v(n_block_at(n_block));
      if (n_block == begin) break;
      const int after = n_block_at(n_block - 1);
#pragma unroll
      for (int c = 0; c < T.k_blocks(); ++c) load_k(after, c);
    }
  }
  if constexpr (T.two_cta) {  // a commit can free a block only while the CTA runs
#pragma unroll 1
    for (int i = 0; i < T.ring_slots(); ++i, ring.advance()) mbarrier_wait(&s.ring_empty[ring.index], ring.phase ^ 1);
#pragma unroll 1
    for (int i = 0; i < T.q_stage(); ++i) mbarrier_wait(&s.q_empty[i], q_parity >> i & 1);
  }
}
