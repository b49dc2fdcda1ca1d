// Score and mask modifications on a tile of scores: [keys][lanes], a lane a query. Plain functions, which kernels.h
// explains; what takes time in them is compiled for the machine (src/score_mod/tile_loops.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels.h"

namespace tandem::cpu {

struct ModTile {
  const Piece& piece;
  const int64_t *query, *head;  // of each lane; lanes: a power of two, at most 256
  int64_t lanes;
  int64_t key, count;  // keys [key, key + count)
  int64_t stride;      // floats between keys of the scores
  float* scratch;      // mod_floats() of them
};

size_t mod_floats(const Problem& problem);

// The keys of a tile that masks may show to some lane: [begin, end), counted from the tile's first key. begin is even.
struct ShownKeys {
  int64_t begin = 0, end = 0;
  bool all = true;  // every lane sees each of them

  explicit operator bool() const { return begin < end; }
};

// Finds the keys that mask_mod and the block mask show. Unless every lane sees all keys of the tile, it fills in
// visible[key][lane] for each of them: 1 where the lane sees the key, else 0.
ShownKeys show_visible(const ModTile& tile, int32_t* visible);

// Scores as score_mod gives them, in place.
void modify_scores(const ModTile& tile, float* scores);

// dscores, the gradients of what modify_scores() gave, become those of the scores that it read, which are `unmodified`.
// captured: where not null, the table that the gradients of what the text reads are added to. What lies in the last
// `lanes - rows` lanes is no row's.
void modify_gradients(const ModTile& tile, int64_t rows, const float* unmodified, float* dscores, double* captured);

}  // namespace tandem::cpu
