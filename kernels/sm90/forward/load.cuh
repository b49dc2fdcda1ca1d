// The loading thread of the Hopper forward. The thread also takes the tiles and publishes them to the other warps.
#pragma once
#include "device/block_mask.cuh"
#include "device/paging.cuh"
#include "device/pipeline_state.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm90/forward/page_gather.cuh"
#include "sm90/forward/smem.cuh"

// The source of the CTA's work tiles, and the buffer where they are published.
template <Sm90ForwardConfig T>
struct WorkTiles {
  static constexpr int kSlots = SharedStorage<T>::kWorkTiles;

  const ForwardParams& p;
  SharedStorage<T>& s;
  const int pack_shift, listed, count;

  TANDEM_DEVICE WorkTiles(const ForwardParams& params, SharedStorage<T>& shared)
      : p(params),
        s(shared),
        pack_shift(log2_of(params.pack_gqa)),
        listed(listed_tiles<T>(params)),
        count(T.options.varlen ? listed * (params.heads_q >> pack_shift) * splits(params) : params.tiles) {}

  static TANDEM_DEVICE int splits(const ForwardParams& p) { return T.split_keys ? p.split.count : 1; }
  TANDEM_DEVICE const Sm90Work& last(u32 tile_idx) const { return s.work_tiles[(tile_idx - 1) % kSlots]; }

  // Takes the next tile if one exists: the n-th tile, or a retry. idle: all taken tiles are complete.
  TANDEM_DEVICE bool take(u32& tile_idx, int n, bool idle) const {
    u32 retry = tile_idx % kSlots;
    if (idle) {
      retry = 0;
#pragma unroll 1
      while (retry < kSlots - 1 && !s.work_tiles[retry].overflowed) ++retry;
    }
    const bool strict = T.lazy_max() && s.work_tiles[retry].overflowed;
    if (strict) {
      n = s.work_tiles[retry].index;
      s.work_tiles[retry].overflowed = 0;
    }
    if (n >= count) return false;
    const TileCoords tile = coords_at<T>(p, tile_of_work<T>(p, n), listed);
    if (T.options.varlen && tile.q_rows == 0) return false;  // there is no list: the CTA's only tile is empty
    s.work_tiles[tile_idx++ % kSlots] = {{tile, n, strict, 0}, (tile.head << pack_shift) / (p.heads_q / p.heads_k)};
    return true;
  }
  // Loads the queries of the tile that was taken last.
  TANDEM_DEVICE void load_q(u32 tile_idx) const {
    const u32 parity = tile_idx & 1;
    const Sm90Work& work = last(tile_idx);
#pragma unroll 1
    for (int i = 0; i < T.warpgroups; ++i) {
      const int row = work.coords.m_block * T.tile_m() + i * 64;
      mbarrier_wait(&s.q_empty[i], parity);
      mbarrier_expect_tx(&s.q_full[i], 64 * T.columns_k() * 2);
#pragma unroll 1
      for (int c = 0; c < T.head_dim; c += 64)
        tma_load(s.q + c * T.tile_m() + i * 64 * 64, &p.q, &s.q_full[i], c, row & (p.pack_gqa - 1),
                 work.coords.q_begin + (row >> pack_shift), work.coords.head, work.coords.batch);
    }
  }
  TANDEM_DEVICE void signal_end(u32 tile_idx) const {
    s.work_tiles[tile_idx % kSlots].index = -1;
    for (u64& full : s.q_full) mbarrier_arrive(&full);
  }
};

// The named barrier of the loading warpgroup.
constexpr int kLoadSync = 6;

// The iterations of a tile that remain when a CTA takes its next tile from the counter.
constexpr int kTakeAhead = 5;

// The keys of a tile.
struct KeyCoords {
  int begin, head, batch;
};

// Loads an n_block of keys or values. turn: the CTA of the cluster that begins the multicast, 0 for keys, 1 for values.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void load_columns(auto& to, u64* full, const TensorMap& map, const KeyCoords& keys, int n_block,
                                int turn) {
  const int columns = turn == 0 ? T.head_dim : T.head_dim_v;
  if constexpr (T.kv_ctas > 1) {
#pragma unroll 1
    for (int c = (blockIdx.x + turn) % T.kv_ctas * 64; c < columns; c += 64 * T.kv_ctas)
      tma_load_multicast(to + c * T.tile_n, &map, full, (1u << T.kv_ctas) - 1, c, keys.begin + n_block * T.tile_n,
                         keys.head, keys.batch);
  } else {
#pragma unroll 1
    for (int c = 0; c < columns; c += 64)
      tma_load(to + c * T.tile_n, &map, full, c, keys.begin + n_block * T.tile_n, keys.head, keys.batch);
  }
}

// Loads an n_block of keys (turn 0) or values (turn 1) of a key head in pages.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void load_paged_columns(auto& to, u64* full, const ForwardParams& p, const PagedKeys& keys, int head,
                                      LoadedBlock block) {
  const int blocks = T.blocks(block.turn == 0 ? T.head_dim : T.head_dim_v);
  const PagedColumns all{block.turn == 0 ? p.k : p.v, 0, blocks, head};
  load_pages<T.page_rows, T.tile_n>(to, full, p, keys, all, block.n_block * T.tile_n);
}

// Loads an n_block of keys or values. paged: PagedKeys or PageGather, with pages only.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void load_kv(auto& to, u64* full, const ForwardParams& p, auto& paged, const KeyCoords& keys,
                           LoadedBlock block) {
  if constexpr (T.gathers_pages) {
    paged.load(p, to, full, keys.head, block);
  } else {
    mbarrier_expect_tx(full, sizeof to);
    if constexpr (T.page_rows > 0)
      load_paged_columns<T>(to, full, p, paged, keys.head, block);
    else
      load_columns<T>(to, full, block.turn == 0 ? p.k : p.v, keys, block.n_block, block.turn);
  }
}

// Takes the next tile, or lets the first thread of the loading warpgroup take it for all.
template <Sm90ForwardConfig T>
TANDEM_DEVICE bool take_tile(const WorkTiles<T>& tiles, u32& tile_idx, int n, bool idle) {
  if constexpr (T.gathers_pages) {
    // A second WorkTiles, because its counts would occupy registers of all threads.
    const bool leads = threadIdx.x == 0;
    const bool more = named_sync_or(kLoadSync, 128, leads && WorkTiles<T>(tiles.p, tiles.s).take(tile_idx, n, idle));
    tile_idx += more && !leads;
    return more;
  } else {
    return tiles.take(tile_idx, n, idle);
  }
}

// When all values are released, all tiles are complete. No other CTA of the cluster arrives here any more.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void wait_for_all_tiles(SharedStorage<T>& s, PipelineState<T.stages> ring) {
#pragma unroll 1
  for (int i = 0; i < T.stages; ++i, ring.advance()) mbarrier_wait(&s.v_empty[ring.index], ring.phase ^ 1);
}

// One thread loads queries, and keys and values from last to first. Before the last loads the thread takes the next
// tile and loads its queries if registers hold the current ones. A retry is taken when its slot is needed or no tiles
// are left. Each extra instruction delays the MMA warps, and other roles in this branch would cost uniform registers.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void load(const ForwardParams& p, SharedStorage<T>& s) {
  const WorkTiles<T> tiles(p, s);
  // With gathers_pages the whole warpgroup loads keys and values, and its first thread does the rest.
  const bool leads = !T.gathers_pages || threadIdx.x == 0;
  PipelineState<T.stages> k_ring, v_ring;
  u32 tile_idx = 0;  // number of taken tiles
  // The next work tile minus gridDim.x, which is added at its use, because an earlier sum would wait for the counter.
  int counted = blockIdx.x - gridDim.x;
  int n_block = 0, begin = 1, k_begin = 0, head_k = 0, batch = 0;  // current tile: iterations and keys
  [[maybe_unused]] typename OneOf<T.gathers_pages, PageGather<T>, PagedKeys>::Type paged;  // replaces k_begin and batch
  [[maybe_unused]] const int* next_step = nullptr;  // block mask: the entry after n_block; begin is unused
  [[maybe_unused]] int steps = 0;                   // block mask: remaining iterations, n_block's included
  auto load_block = [&](auto& slots, auto& full, auto& empty, PipelineState<T.stages>& ring, int n_block, int turn) {
    mbarrier_wait(&empty[ring.index], ring.phase ^ 1);
    load_kv<T>(slots[ring.index], &full[ring.index], p, paged, {k_begin, head_k, batch}, {n_block, turn});
    ring.advance();
  };
  auto load_k = [&](int n_block) { load_block(s.k, s.k_full, s.k_empty, k_ring, n_block, 0); };
  auto load_v = [&](int n_block) { load_block(s.v, s.v_full, s.v_empty, v_ring, n_block, 1); };
  [[maybe_unused]] auto load_step = [&] {
    const int at_hand = n_block;
    if (steps > 1) {
      n_block = n_block_of(*next_step++);
      load_k(n_block);
    }
    load_v(at_hand);
  };

  // Loads iterations of the current tile until `left` remain.
  auto load_until = [&](int left) {
    if constexpr (T.options.block_mask) {
#pragma unroll 1
      for (; steps > left; --steps) load_step();
    } else {
#pragma unroll 1
      for (; n_block >= begin + left; --n_block) {
        if (n_block > begin) load_k(n_block - 1);
        load_v(n_block);
      }
    }
  };
  for (bool idle = false;;) {
    // The counter has the longest remaining tile. A CTA takes it near the end of the current tile, so that the first
    // CTA to end gets it. The counter's latency overlaps the load of one iteration.
    if (p.counter) load_until(kTakeAhead);
    if (leads && tile_idx > 0 && !tiles.last(tile_idx).strict)
      counted = p.counter ? atomicAdd(p.counter, 1) : counted + gridDim.x;
    load_until(T.options.block_mask ? max(steps - 1, 0) : max(n_block - begin, 0));
    const bool more = take_tile(tiles, tile_idx, counted + gridDim.x, idle);
    if (idle && !more) break;
    if (more && leads && T.q_in_registers()) tiles.load_q(tile_idx);
    load_until(0);
    idle = !more;
    if (idle) {
      wait_for_all_tiles(s, v_ring);
      continue;
    }
    const Sm90Work& work = tiles.last(tile_idx);
    const TileCoords tile = work.tile<T>(p);
    [[maybe_unused]] const NBlockRange n_blocks =
        T.options.block_mask ? NBlockRange() : work_n_blocks<T>(p, tile, work.index);
    k_begin = tile.k_begin, head_k = work.head_k, batch = tile.batch;
    if constexpr (T.page_rows > 0 && !T.gathers_pages) paged = PagedKeys::of<T>(p, tile);
    if constexpr (T.options.block_mask) {
      next_step = steps_of<T>(p, tile);
      steps = *next_step;
      next_step += kListHeader;
      n_block = n_block_of(*next_step++);
    } else {
      n_block = n_blocks.end - 1, begin = n_blocks.begin;
    }
    if constexpr (T.gathers_pages) paged = {p, PagedKeys::of<T>(p, tile), n_block};
    load_k(n_block);
    if (leads && !T.q_in_registers()) tiles.load_q(tile_idx);
  }
  if (leads) tiles.signal_end(tile_idx);
}
