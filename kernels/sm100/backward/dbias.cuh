// The gradient of a bias (score_grads/dbias.cuh), on Blackwell: sums over tiles are in registers.
#pragma once
#include "score_grads/dbias.cuh"
#include "sm100/backward/score_tile.cuh"

template <Sm100BackwardConfig T>
struct DbiasShared {
  ScoreTileShared<T> tile;
  float sums[T.tile_m][T.kCtaKeys];
};

template <Sm100BackwardConfig T>
TANDEM_DEVICE void dbias(const BackwardParams& p) {
  using Tile = ScoreTile<T>;
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<DbiasShared<T>*>(memory);
  static_assert(sizeof(DbiasShared<T>) <= T.dbias_smem_bytes());
  Tile tile(p, s.tile);
  const DbiasPart<T, T.kCtaKeys> part(p);
  float sums[Tile::kChunks][Tile::kChunk] = {};
  part.for_each_tile([&](const ScoreTileAt& at) {
    tile.make(at);
#pragma unroll
    for (int c = 0; c < Tile::kChunks; ++c)
      tile.each(at, c, [&](int n, const ScoreGradient& score) { sums[c][n] += dbias_of<T>(score); });
  });
#pragma unroll
  for (int c = 0; c < Tile::kChunks; ++c) {
#pragma unroll
    for (int n = 0; n < Tile::kChunk; ++n) s.sums[c * Tile::kRows + tile.first_query + n][tile.row] = sums[c][n];
  }
  part.store(s.sums);
  tile.end();
}
