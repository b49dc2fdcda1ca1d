// A graph as a list of loops over the elements of a tile, in float32 vectors, without a compiler at run time. Values
// that depend on no element (constants, scalars, batch, lengths) are computed once per sequence. Values that depend
// only on the query are computed once for all tiles of the same queries.
#pragma once

#include <span>
#include <vector>

#include "score_mod/evaluate.h"
#include "score_mod/graph.h"
#include "score_mod/tile_loops.h"
#include "score_mod/values.h"

namespace tandem::score_mod {

class TileProgram {
 public:
  // The program does not use the graph after construction.
  TileProgram(const Graph& graph, std::vector<NodeId> outputs);

  size_t floats() const { return static_cast<size_t>(registers_ - kTileInputs) * kTile; }  // memory of a run

 private:
  friend class TileRun;

  // Registers are arrays of kTile elements: memory of the run, or the caller's arrays of score, head, q and k.
  struct TileStep {
    Op op = Op::constant;
    Type type = Type::real;  // leaf: type of the result; else of the last operand
    int16_t index = 0;
    int to = 0;
    int from[kMaxRank] = {0, 0, 0, 0};
    double value = 0;
  };

  std::vector<TileStep> uniform_, of_queries_, varying_;
  std::vector<int> outputs_;
  int registers_ = kTileInputs;

  static constexpr int kTileInputs = 4;
};

// Elements of one sequence. Inputs that the expression does not name may be null.
struct TileInputs {
  int count = 0;  // at most kTile
  const float* score = nullptr;
  const int32_t *head = nullptr, *q = nullptr, *k = nullptr;
  bool same_queries = false;  // head and q are as at the begin of the last run
};

// Runs a program with memory for one thread.
class TileRun {
 public:
  // All arguments must outlive the run. The caller has checked values. memory: program.floats() floats.
  TileRun(const TileProgram& program, const Values& values, float* memory, const TileLoops& loops = tile_loops());
  TileRun(TileProgram&&, const Values&, float*, const TileLoops& = tile_loops()) = delete;

  // Must be called before the first tile of a sequence. The function uses only the batch and the lengths of the
  // position.
  void begin(const Position& sequence);
  void run(const TileInputs& inputs);

  // Output i of the program in the last run, one value per element.
  std::span<const float> reals(size_t i) const { return {static_cast<const float*>(output(i)), count()}; }
  std::span<const int32_t> integers(size_t i) const { return {static_cast<const int32_t*>(output(i)), count()}; }

 private:
  const void* output(size_t i) const { return at(program_.outputs_[i]); }
  size_t count() const { return static_cast<size_t>(count_); }
  void* at(int number) const {
    const auto n = static_cast<size_t>(number);
    return n < TileProgram::kTileInputs ? inputs_[n] : memory_ + (n - TileProgram::kTileInputs) * kTile;
  }
  void execute(const TileProgram::TileStep& step, int count);
  void fill(const TileProgram::TileStep& step, const Position& sequence);

  const TileProgram& program_;
  const Values& values_;
  const TileLoops& loops_;
  float* memory_;
  void* inputs_[TileProgram::kTileInputs] = {};
  int count_ = 0;
};

}  // namespace tandem::score_mod
