// Copies of keys and values in small pages by the loading warpgroup of the Hopper forward (T.gathers_pages). TMA needs
// more than half as long for 16 rows as for 64, so that cp.async replaces TMA.
//
// The warpgroup copies 16 rows of 64 columns at once, 16 bytes a thread. The rows lie in one page, because page_size is
// a multiple of 16. A slot is full when the copies of all threads are complete. The MMA warpgroups issue a proxy fence
// after their wait, because wgmma reads shared memory through the async proxy.
#pragma once
#include "device/paging.cuh"
#include "ptx/cp_async.cuh"
#include "sm90/forward/smem.cuh"

// An n_block of keys (turn 0) or values (turn 1).
struct LoadedBlock {
  int n_block, turn;
};

// Rows in pages. Strides are in units of 16 bytes.
struct PageRows {
  const void* data;
  u32 page, row, head;
  int columns;  // columns of the problem, without padding
};

// opaque() keeps ptxas from holding derived values in registers, of which the warpgroup has few.
template <Sm90ForwardConfig T>
struct PageGather {
  static constexpr int kRows = 16, kGroups = T.tile_n / kRows;
  static_assert(kGroups <= 32, "a lane has the entry of one group");
  // A block mask may skip n_blocks, so that the next n_block is not known here.
  static constexpr bool kPrefetches = !T.options.block_mask;

  PagedKeys keys;
  int next = -1;  // lane i: the unchecked page of group i of the next keys

  PageGather() = default;
  TANDEM_DEVICE PageGather(const ForwardParams& p, const PagedKeys& of, int n_block) : keys(of) {
    if constexpr (kPrefetches) next = page(p, n_block);
  }

  TANDEM_DEVICE void load(const ForwardParams& p, u16* to, u64* full, int head, LoadedBlock block) {
    constexpr int kUnit = PagedValues::kUnit;
    if (block.turn == 0) {
      const MaxScoresParams& m = p.max_scores;
      const PageRows rows{m.k_data, static_cast<u32>(m.k_batch / kUnit), static_cast<u32>(m.k_row / kUnit),
                          static_cast<u32>(m.k_head / kUnit), m.head_dim};
      copy<T.head_dim>(p, to, rows, head, block.n_block, kPrefetches ? next : page(p, block.n_block));
      if constexpr (kPrefetches) next = page(p, block.n_block - 1);  // the latency overlaps the copies
    } else {
      const PagedValues& m = p.values;
      copy<T.head_dim_v>(p, to, {m.data, m.page, m.row, m.head, p.head_dim_v}, head, block.n_block,
                         page(p, block.n_block));
    }
    cp_async_arrive(full);
  }

 private:
  // The first key of a lane's group.
  static TANDEM_DEVICE int group_key(int n_block) { return n_block * T.tile_n + opaque(threadIdx.x) % 32 * kRows; }
  TANDEM_DEVICE int page(const ForwardParams& p, int n_block) const {
    PagedKeys of = keys;
    of.sequence = opaque(of.sequence);
    return of.place<false>(p, group_key(n_block), kRows).page;
  }

  // Copies an n_block, and zeros for rows beyond the sequence or without a page. page: of the lane's group.
  template <int columns>
  TANDEM_DEVICE void copy(const ForwardParams& p, u16* to, const PageRows& rows, int head, int n_block,
                          int page) const {
    constexpr int kBlocks = T.blocks(columns);
    constexpr u32 kNone = ~0u;
    const u32 thread = opaque(threadIdx.x);
    const int row = thread / 8, chunk = thread % 8, left = keys.end - n_block * T.tile_n - row;
    const char* const own = static_cast<const char*>(rows.data) +
                            16 * (static_cast<u64>(opaque(head)) * rows.head + row * rows.row + chunk);
    const u32 own_to = shared_address(to) + row * 128 + ((chunk ^ (row & 7)) << 4);  // 128-byte swizzle
    const u32 page_row = static_cast<u32>(group_key(n_block)) % static_cast<u32>(p.pages.page_size);
    const bool valid = static_cast<u32>(page) < static_cast<u32>(p.pages.pages);
    const u32 offset = valid ? page * rows.page + page_row * rows.row : kNone;
    const int last_bytes = min(16, max(0, 2 * (rows.columns - (kBlocks - 1) * 64 - 8 * chunk)));
#pragma unroll 1
    for (int i = 0; i < kGroups; ++i) {
      const u32 place = __shfl_sync(~0u, offset, i);
      const bool there = place != kNone && i * kRows < left;
      const char* const from = own + u64{16} * (there ? place : 0);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int bytes = b + 1 < kBlocks ? 16 : last_bytes;
        cp_async<16>(own_to + (b * T.tile_n + i * kRows) * 128, from + 128 * b, there ? bytes : 0);
      }
    }
  }
};
