// The gradient of a bias (score_grads/dbias.cuh), on Hopper: sums over tiles are in registers.
#pragma once
#include "score_grads/dbias.cuh"
#include "sm90/backward/score_tile.cuh"

template <Sm90BackwardConfig T>
struct DbiasShared {
  ScoreTileShared<T> tile;
  float sums[T.tile_m][T.cta_keys()];
};

template <Sm90BackwardConfig T>
TANDEM_DEVICE void dbias(const BackwardParams& p) {
  using Tile = ScoreTile<T>;
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<DbiasShared<T>*>(memory);
  static_assert(sizeof(DbiasShared<T>) <= T.dbias_smem_bytes());
  Tile tile(p, s.tile);
  const DbiasPart<T, T.cta_keys()> part(p);
  float sums[Tile::kScores] = {};
  part.for_each_tile([&](const ScoreTileAt& at) {
    tile.load(at);
    tile.each(at, [&](int r, const ScoreGradient& score) { sums[r] += dbias_of<T>(score); });
  });
#pragma unroll
  for (int r = 0; r < Tile::kScores; ++r) s.sums[tile.query_of(r)][tile.key_of(r)] = sums[r];
  part.store(s.sums);
}
