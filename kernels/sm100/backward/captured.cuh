// Gradients of the tensors that a score_mod reads (score_grads/captured.cuh), on Blackwell.
#pragma once
#include "score_grads/captured.cuh"
#include "sm100/backward/score_tile.cuh"

template <Sm100BackwardConfig T>
struct CapturedShared {
  ScoreTileShared<T> tile;
  CapturedScores<T.kCtaKeys> scores;
};

template <Sm100BackwardConfig T>
TANDEM_DEVICE void captured(const ModifiedBackwardParams& p) {
  using Tile = ScoreTile<T>;
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<CapturedShared<T>*>(memory);
  static_assert(sizeof(CapturedShared<T>) <= T.captured_smem_bytes() && Tile::kRows == kCapturedRows);
  Tile tile(p, s.tile);
  for (CapturedTiles<T, T.kCtaKeys> tiles(p); warp_any(tiles.any); tiles.advance()) {
    const ScoreTileAt& at = tiles.at;
    tile.make(at);
    TileSums<T> sums;
#pragma unroll 1
    for (int c = 0; c < Tile::kChunks; ++c) {
      if (walks<T>() && c > 0) __syncthreads();  // earlier scores have been read
      const ModPlace first = place_of(at, at.m_block * T.tile_m + c * Tile::kRows, at.key_block * T.kCtaKeys);
      tile.each(at, c, [&](int n, const ScoreGradient& score) {
        if constexpr (walks<T>()) s.scores.put(tile.first_query + n, tile.row, score);
        ModPlace place = first;
        place.q += tile.first_query + n, place.k += tile.row;
        sums.add(p, score.mod_input, place, typename TileSums<T>::Adding{sums, score.ds});
      });
      walk_all<T>(p, s.scores, first);
    }
    sums.store(p, place_of(at, 0, 0));
  }
  __syncthreads();  // the last read of tensor memory is complete
  tile.end();
}
