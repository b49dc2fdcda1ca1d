// The gradients of what a score_mod reads (tile/captured.cuh), on Hopper.
#pragma once
#include "sm90/backward/score_tile.cuh"
#include "tile/captured.cuh"

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
  for_each_captured_tile<T, T.cta_keys()>(p, [&](const ScoreTileAt& at) {
    tile.each(at, [&](int r, const ScoreGradient& score) { s.scores.put(tile.query_of(r), tile.key_of(r), score); });
    walk_all<T>(p, s.scores, place_of(at, at.m_block * T.tile_m, at.key_block * T.cta_keys()));
  });
}
