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

// visible[key][lane], of `lanes` lanes: 1 where mask_mod and the block mask show the key, else 0. False: they show none
// at all.
bool show_visible(const ModTile& tile, int32_t* visible);

// Scores as score_mod gives them, in place.
void modify_scores(const ModTile& tile, float* scores);

// dscores, the gradients of what modify_scores() gave, become those of the scores that it read, which are `unmodified`.
// captured: where not null, the table that the gradients of what the text reads are added to. What lies in the last
// `lanes - rows` lanes is no row's.
void modify_gradients(const ModTile& tile, int64_t rows, const float* unmodified, float* dscores, double* captured);

}  // namespace tandem::cpu
