// What a computing warpgroup of the Hopper forward knows of the work tile at hand: its rows, and which n_blocks they
// see.
//
// These structs hold numbers and references only: what products write are arrays that are locals of compute().
#pragma once
#include "sm90/forward/warpgroup.cuh"
#include "tile/block_mask.cuh"

template <Sm90ForwardConfig T>
struct WorkRows {
  // Read when it is needed, but where registers abound: then at once, which is 2 % where tiles are short.
  static constexpr bool kAtOnce = !T.varlen && !T.block_mask && T.registers() > 160;

  const ForwardParams& p;
  const Warpgroup<T>& w;
  const Work& work;
  const TileCoords known;

  TANDEM_DEVICE WorkRows(const ForwardParams& params, const Warpgroup<T>& warpgroup)
      : p(params),
        w(warpgroup),
        work(warpgroup.work()),
        known(kAtOnce ? warpgroup.work().template tile<T>(params) : TileCoords()) {}

  TANDEM_DEVICE TileCoords tile() const { return kAtOnce ? known : work.tile<T>(p); }
  // Of the warpgroup: its first row, and how many of the sequence there are from it on. Worked out where they are
  // needed, as the rows of this thread are: they are not worth registers through the main loop.
  TANDEM_DEVICE int first_row() const { return tile().m_block * T.tile_m() + w.index * 64; }
  TANDEM_DEVICE int rows_left() const { return (tile().q_rows << log2_of(p.pack_gqa)) - first_row(); }
  TANDEM_DEVICE Row own_row(int i) const {
    int row = first_row() + w.warp * 16 + w.lane / 4 + 8 * i;
    asm volatile("" : "+r"(row));
    return Row(p, tile(), row);
  }
  // Whether row i of this thread is a query of the sequence: others hold anything, and must not count.
  TANDEM_DEVICE bool is_used(int i) const { return !T.varlen || own_row(i).query < tile().q_len; }
};

// Those of a tile's n_blocks that 64 rows see: one at least.
template <Sm90ForwardConfig T>
TANDEM_DEVICE NBlockRange own_n_blocks(const ForwardParams& p, const TileCoords& tile, const NBlockRange& all,
                                       int first_row) {
  NBlockRange own = n_block_range<T>(p, tile, first_row, 64);
  own.begin = max(own.begin, all.begin);
  own.end = max(own.end, own.begin + 1);
  return own;
}

// The n_blocks of a work tile, from the last to the first: all that the CTA goes over, and of these the warpgroup's
// own.
template <Sm90ForwardConfig T>
struct NBlockSteps {
  const NBlockRange all;
  NBlockRange own;

  TANDEM_DEVICE explicit NBlockSteps(const WorkRows<T>& rows) : all(n_block_range<T>(rows.p, rows.tile())), own(all) {
    if constexpr (T.left || T.right) own = own_n_blocks<T>(rows.p, rows.tile(), all, rows.first_row());
  }

  // Of a block mask: what is left of the list; how many steps there are with this one, the next and the one behind
  // that; and whether one has shown each row of the warpgroup some key.
  const int* list = nullptr;
  int steps = 0, ahead = 0;
  u32 next = 0;
  StepState state = StepState::full;
  bool shown = false;

  // Goes on to the next step, whose n_block it gives.
  TANDEM_DEVICE int read_step(int index) {
    const u32 bits = next;
    state = state_of(bits, index);
    next = uniform(ahead);
    if (steps > 2) ahead = *list++;
    return n_block_of(bits);
  }
  // The step at hand hides nothing.
  TANDEM_DEVICE bool is_whole(int n_block) const {
    return state == StepState::full && n_block < own.unmasked_end && (!T.left || n_block >= own.unmasked_begin);
  }
};
