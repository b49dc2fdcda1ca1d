// A parsed expression with all derived data that calls need: derivatives, loops over tiles, and printed code.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "score_mod/differentiate.h"
#include "score_mod/parser.h"
#include "score_mod/tile.h"

namespace tandem::score_mod {

// The line of a tile along which a score_mod may read one element repeatedly: a query, a key, or a distance. The result
// is only a hint, with row as the default. tile: all scores read the same element.
enum class Line : uint8_t { row, column, diagonal, tile };

// A float element that a score_mod reads, and the derivative with respect to it.
struct Capture {
  int tensor = 0, rank = 0;
  Line line = Line::row;
  NodeId derivative = kNoNode;
  NodeId indices[kMaxRank] = {};
};

struct Program {
  explicit Program(Mod read);

  Mod mod;                        // its graph includes the derivatives
  Gradient gradient;              // score_mod only
  std::vector<Capture> captures;  // score_mod only: in the order of additions to tables
  std::vector<NodeId> capturing;  // per capture: the derivative, then the indices
  // True if indices depend only on positions and the derivatives are constants. Kernels then find the tiles that read
  // one element of each tensor, and add one sum per tile.
  bool captured_per_tile;

  // True if all scores of a tile read the same one or two elements, and each derivative is the score or a constant.
  bool captured_per_score;

  // The outputs of these programs: the result; d result / d score; `capturing`.
  TileProgram result_tiles, slope_tiles, capture_tiles;

  std::string cuda;         // printed functions of kernels/device/mod_functions.cuh
  uint64_t cuda_hash;       // hash of `cuda`, never 0
  std::string cuda_ranges;  // functions of mod_range.cuh: mask_mod, captured_per_tile
  bool light;               // score_mod only: is_light()

  // Returns true if the score's gradient passes unchanged
  bool passes() const { return mod.graph.is_constant(gradient.score, 1); }
};

// An expression with the same names is parsed once for all calls. Error messages come from parse().
Status read_program(std::string_view text, const Signature& signature, std::shared_ptr<const Program>* program);

}  // namespace tandem::score_mod
