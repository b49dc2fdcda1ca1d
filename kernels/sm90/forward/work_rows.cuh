// The current work tile of an MMA warpgroup of the Hopper forward: its rows and the n_blocks that they see.
//
// These structs hold only numbers and references. Arrays that products write are locals of compute().
#pragma once
#include "device/block_mask.cuh"
#include "sm90/forward/warpgroup.cuh"

template <Sm90ForwardConfig T>
struct WorkRows {
  // Tile coordinates are loaded when they are needed. If registers suffice, they are loaded at the start of the tile,
  // which is 2 % faster for short tiles.
  static constexpr bool kAtOnce = !T.options.varlen && !T.options.block_mask && T.registers() > 160;

  const ForwardParams& p;
  const Warpgroup<T>& w;
  const Sm90Work& work;
  const TileCoords known;

  TANDEM_DEVICE WorkRows(const ForwardParams& params, const Warpgroup<T>& warpgroup)
      : p(params),
        w(warpgroup),
        work(warpgroup.work()),
        known(kAtOnce ? warpgroup.work().template tile<T>(params) : TileCoords()) {}

  TANDEM_DEVICE TileCoords tile() const { return kAtOnce ? known : work.tile<T>(p); }
  TANDEM_DEVICE TileCoords result_tile() const { return result_coords<T>(p, tile(), work.index); }
  // The warpgroup's first row, and the number of rows of the sequence from it on. These numbers are computed where they
  // are needed, like the thread's rows, because registers that hold them would be live through the main loop.
  TANDEM_DEVICE int first_row() const { return tile().m_block * T.tile_m() + w.index * 64; }
  TANDEM_DEVICE int rows_left() const { return (tile().q_rows << log2_of(p.pack_gqa)) - first_row(); }
  TANDEM_DEVICE Row own_row(int i) const {
    int row = first_row() + w.warp * 16 + w.lane / 4 + 8 * i;
    asm volatile("" : "+r"(row));
    return Row(p, tile(), row);
  }
  // T.device_splits: true if the tile has one split of its keys.
  TANDEM_DEVICE bool is_split() const { return warp_any(tile().split_row >= 0); }
  // The place of row i of this thread in a float32 result, or null if the row is not stored.
  TANDEM_DEVICE float* f32_place(int i) const {
    const TileCoords to = result_tile();
    const Row row = own_row(i);
    if (row.query >= to.q_rows) return nullptr;
    return static_cast<float*>(p.out_data) + out_row_at(p, to, row.query, row.head);
  }
  TANDEM_DEVICE float* split_place(int i) const {
    const TileCoords of = tile();
    const Row row = own_row(i);
    if (row.query >= of.q_len) return nullptr;
    return p.split.row_out + split_result_at(p, of.split_row, row.query, row.head) * p.head_dim_v;
  }
  // Returns true if row i of this thread is a query of the sequence. Unused rows have undefined values and must not
  // count.
  TANDEM_DEVICE bool is_used(int i) const { return !T.options.varlen || own_row(i).query < tile().q_len; }
};

// The n_blocks of a tile that 64 rows see. The range has at least one n_block.
template <Sm90ForwardConfig T>
TANDEM_DEVICE NBlockRange own_n_blocks(const ForwardParams& p, const TileCoords& tile, const NBlockRange& all,
                                       int first_row) {
  NBlockRange own = n_block_range<T>(p, tile, first_row, 64);
  own.begin = max(own.begin, all.begin);
  if constexpr (T.split_keys || T.device_splits)
    own.begin = min(own.begin, all.end - 1), own.end = min(own.end, all.end);
  own.end = max(own.end, own.begin + 1);
  return own;
}

// The n_blocks of a work tile, from last to first: the CTA's range, and the warpgroup's range.
template <Sm90ForwardConfig T>
struct NBlockSteps {
  const NBlockRange all;
  NBlockRange own;

  TANDEM_DEVICE explicit NBlockSteps(const WorkRows<T>& rows)
      : all(work_n_blocks<T>(rows.p, rows.tile(), rows.work.index)), own(all) {
    if constexpr (T.options.bounded_left || T.options.bounded_right)
      own = own_n_blocks<T>(rows.p, rows.tile(), all, rows.first_row());
  }

  // Block mask: the rest of the list, the number of remaining iterations (this one included), and the next two entries.
  // shown: each row of the warpgroup has seen a key.
  const int* list = nullptr;
  int steps = 0, ahead = 0;
  u32 next = 0;
  BlockState state = BlockState::full;
  bool shown = false;

  // Advances to the next iteration and returns its n_block.
  TANDEM_DEVICE int read_step(int index) {
    const u32 bits = next;
    state = state_of(bits, index);
    next = warp_uniform(ahead);
    if (steps > 2) ahead = *list++;
    return n_block_of(bits);
  }
  // Returns true if the current iteration hides nothing.
  TANDEM_DEVICE bool is_whole(int n_block) const {
    return state == BlockState::full && n_block < own.unmasked_end &&
           (!T.options.bounded_left || n_block >= own.unmasked_begin);
  }
};
