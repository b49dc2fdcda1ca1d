// Gradients of the tensors that a score_mod reads (score_grads/captured.cuh), on Hopper.
#pragma once
#include "score_grads/captured.cuh"
#include "sm90/backward/score_tile.cuh"

template <Sm90BackwardConfig T>
struct CapturedShared {
  ScoreTileShared<T> tile;
  CapturedScores<T.cta_keys()> scores;
};

template <Sm90BackwardConfig T>
TANDEM_DEVICE void captured(const ModifiedBackwardParams& p) {
  using Tile = ScoreTile<T>;
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<CapturedShared<T>*>(memory);
  static_assert(sizeof(CapturedShared<T>) <= T.captured_smem_bytes() && T.tile_m == kCapturedRows);
  Tile tile(p, s.tile);
  CapturedTiles<T, T.cta_keys()> tiles(p);
  if (warp_any(tiles.any)) tile.load(tiles.at);
#pragma unroll 1
  while (warp_any(tiles.any)) {
    const ScoreTileAt at = tiles.at;
    tiles.advance();
    if (warp_any(tiles.any)) tile.load(tiles.at);
    ModPlace place = place_of(at, at.m_block * T.tile_m, at.key_block * T.cta_keys());
    const int query = place.q, key = place.k;
    TileSums<T> sums;
    if constexpr (walks<T>()) __syncthreads();  // earlier scores have been read
    tile.each(at, [&](int r, const ScoreGradient& score) {
      if constexpr (walks<T>()) s.scores.put(tile.query_of(r), tile.key_of(r), score);
      place.q = query + tile.query_of(r), place.k = key + tile.key_of(r);
      sums.add(p, score.mod_input, place, typename TileSums<T>::Adding{sums, score.ds});
    });
    place.q = query, place.k = key;
    sums.store(p, place);
    walk_all<T>(p, s.scores, place);
  }
}
