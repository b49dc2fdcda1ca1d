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
  static_assert(kGroups <= 32, "a lane has the page of one group");
  // The n_blocks of a span. A lane has the page of one group of a span.
  static constexpr int kSpan = kGroups > 16 ? 1 : kGroups > 8 ? 2 : kGroups > 4 ? 4 : 8;
  // A block mask may skip n_blocks, so that the next span is not known here.
  static constexpr bool kPrefetches = !T.options.block_mask;

  PagedKeys keys;
  // Lane i: the unchecked page of group i of the span, and of the next span. last_pages: the span's first n_block needs
  // its pages until its values are loaded.
  int pages, next_pages, last_pages;

  PageGather() = default;
  TANDEM_DEVICE PageGather(const ForwardParams& p, const PagedKeys& of, int n_block) : keys(of) {
    if constexpr (!kPrefetches) return;
    const int span = (n_block + 1) / kSpan;  // load() advances at the last n_block of a span
    pages = page(p, span);
    next_pages = page(p, span - 1);
  }

  // Keys of an n_block are loaded before its values. Both go from last to first.
  TANDEM_DEVICE void load(const ForwardParams& p, u16* to, u64* full, int head, LoadedBlock block) {
    constexpr int kUnit = PagedValues::kUnit;
    const int span = block.n_block / kSpan, in_span = block.n_block % kSpan;
    if (!kPrefetches) pages = last_pages = page(p, span);
    if (block.turn == 0) {
      if (kPrefetches && in_span == kSpan - 1) {
        pages = next_pages;
        next_pages = page(p, span - 1);  // the latency overlaps the copies
      }
      if (kPrefetches && in_span == 0) last_pages = pages;
      const MaxScoresParams& m = p.max_scores;
      const PageRows rows{m.k_data, static_cast<u32>(m.k_batch / kUnit), static_cast<u32>(m.k_row / kUnit),
                          static_cast<u32>(m.k_head / kUnit), m.head_dim};
      copy<T.head_dim>(p, to, rows, head, block.n_block, pages);
    } else {
      const PagedValues& m = p.values;
      copy<T.head_dim_v>(p, to, {m.data, m.page, m.row, m.head, p.head_dim_v}, head, block.n_block,
                         in_span == 0 ? last_pages : pages);
    }
    cp_async_arrive(full);
  }

 private:
  // A lane's group of a span: its index in the page table, and its place in the page.
  struct GroupPlace {
    u32 index, group;
  };
  static TANDEM_DEVICE u32 group_of(u32 span) { return span * kSpan * kGroups + opaque(threadIdx.x) % 32; }
  static TANDEM_DEVICE GroupPlace place(const ForwardParams& p, u32 span) {
    const u32 group = group_of(span), size = static_cast<u32>(p.pages.page_size) / kRows;  // 1, 2 or 3
    const u32 index = size == 3 ? __umulhi(group, 0x55555556) : group >> (size >> 1);
    return {index, group - index * size};
  }
  TANDEM_DEVICE int page(const ForwardParams& p, u32 span) const {
    const int key = static_cast<int>(group_of(span)) * kRows;
    if (key + kRows <= keys.first || key >= keys.end) return -1;
    const PageParams& pages = p.pages;
    return pages.table[static_cast<i64>(opaque(keys.sequence)) * pages.batch +
                       static_cast<i64>(place(p, span).index) * pages.column];
  }

  // Copies an n_block, and zeros for rows beyond the sequence or without a page. page: of the lane's group.
  template <int columns>
  TANDEM_DEVICE void copy(const ForwardParams& p, u16* to, const PageRows& rows, int head, u32 n_block,
                          int page) const {
    constexpr int kBlocks = T.blocks(columns);
    const u32 thread = opaque(threadIdx.x), row = thread / 8, chunk = thread % 8, first = n_block % kSpan * kGroups;
    const int left = keys.end - static_cast<int>(n_block * T.tile_n + row);
    const char* own = static_cast<const char*>(rows.data) +
                      16 * (static_cast<u64>(opaque(head)) * rows.head + row * rows.row + chunk);
    asm volatile("" : "+l"(own));
    const u32 own_to = shared_address(to) + row * 128 + ((chunk ^ (row & 7)) << 4);  // 128-byte swizzle
    const bool is_page = static_cast<u32>(page) < static_cast<u32>(p.pages.pages);
    const u32 offset = is_page ? page * rows.page + place(p, n_block / kSpan).group * kRows * rows.row : 0;
    const u32 valid = __ballot_sync(~0u, is_page) >> first;
    const bool has_last = static_cast<int>((kBlocks - 1) * 64 + 8 * chunk) < rows.columns;  // columns come in eights
#pragma unroll 8
    for (int i = 0; i < kGroups; ++i) {
      const char* const from = own + u64{16} * __shfl_sync(~0u, offset, first + i);
      const bool there = (valid & 1u << i) != 0 && i * kRows < left;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        cp_async<16>(own_to + (b * T.tile_n + i * kRows) * 128, from + 128 * b,
                     there && (b + 1 < kBlocks || has_last) ? 16 : 0);
    }
  }
};
