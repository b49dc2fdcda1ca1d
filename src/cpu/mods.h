// Score and mask modifications on a tile of scores: [keys][lanes], one query per lane. The loops are plain functions
// (see kernels.h). src/score_mod/tile_loops.cpp compiles the costly loops for the machine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels.h"

namespace tandem::cpu {

struct ModTile {
  const Piece& piece;
  const int64_t *query, *head;  // per lane; lanes: a power of two, at most 256
  int64_t lanes;
  int64_t key, count;  // keys [key, key + count)
  int64_t stride;      // floats between keys of the scores
  float* scratch;      // memory of mod_floats() floats
};

size_t mod_floats(const Problem& problem);

// The keys of a tile that masks may show to some lane: [begin, end), counted from the tile's first key. begin is even.
struct ShownKeys {
  int64_t begin = 0, end = 0;
  bool all = true;  // every lane sees each of these keys

  explicit operator bool() const { return begin < end; }
};

// Finds the keys that mask_mod and the block mask show. If a lane does not see all keys of the tile, it fills in
// visible[key][lane] for them: 1: visible, 0: hidden.
ShownKeys show_visible(const ModTile& tile, int32_t* visible);

// Replaces scores by the results of score_mod.
void modify_scores(const ModTile& tile, float* scores);

// Converts dscores from gradients of the results of modify_scores() to gradients of the scores that it read, which are
// `unmodified`. captured: null, or the table to which the gradients of captured tensors are added. The last `lanes -
// rows` lanes belong to no row.
void modify_gradients(const ModTile& tile, int64_t rows, const float* unmodified, float* dscores, double* captured);

}  // namespace tandem::cpu
