// A modification's text with all that calls need of it: read, differentiated, and as loops over tiles.
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

// Along which line of a tile a score modification may read the same element again and again: of a query, of a key, of
// a distance between them. No more than a hint; a query's where none is known. But where neither queries nor keys
// decide, all scores of a tile read the same one.
enum class Line : uint8_t { row, column, diagonal, tile };

// A float element that a score modification reads, and the derivative with respect to it.
struct Capture {
  int tensor = 0, rank = 0;
  Line line = Line::row;
  NodeId derivative = kNoNode;
  NodeId indices[kMaxRank] = {};
};

struct Program {
  explicit Program(Mod read);

  Mod mod;                        // its graph has the derivatives, too
  Gradient gradient;              // of a score modification
  std::vector<Capture> captures;  // of a score modification: in the order in which tables are added to
  std::vector<NodeId> capturing;  // of every capture: its derivative, then its indices
  // Whether kernels can be told which tiles read one element of each and no other, by indices that are computed from
  // positions alone, and the derivatives are constants: there the sum of a tile is all that is wanted of it.
  bool captured_per_tile;

  // Whether all scores of a tile read the same elements, one or two, and derivatives are the score or constants.
  bool captured_per_score;

  // Their outputs: the result; d result / d score; capturing.
  TileProgram result_tiles, slope_tiles, capture_tiles;

  std::string cuda;         // those functions of kernels/device/mod_functions.cuh that are printed
  uint64_t cuda_hash;       // of that text, never 0
  std::string cuda_ranges;  // that of kernels/device/mod_range.cuh: of a mask, or where captured_per_tile
  bool light;               // of a score modification: is_light()

  bool passes() const { return mod.graph.is_constant(gradient.score, 1); }  // changes of the score as they are
};

// The same text with the same names is read once, however many calls have it. Refusals are those of parse().
Status read_program(std::string_view text, const Signature& signature, std::shared_ptr<const Program>* program);

}  // namespace tandem::score_mod
