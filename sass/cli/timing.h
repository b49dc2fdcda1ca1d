// Output of the timing model: a screen of text, JSON, and a timeline in clocks.
#pragma once

#include <optional>
#include <string>

#include "sass/cli/backward_grid.h"
#include "sass/cli/report.h"
#include "sass/src/clocks.h"
#include "vgpu/src/trace/timeline.h"

namespace tandem::tool {

struct Modelled {
  std::string name;
  machine_code::Latencies latencies;
  machine_code::Clocks clocks;
  machine_code::Simulation run;
  double peak = 0;             // FLOP a clock of the tensor core
  double least = 0, most = 0;  // clocks of a step
  std::string range;           // why there is not one figure
};
// Throws where the model has no figures for the architecture, or finds no warp that computes.
Modelled model_of(const Examined& examined);

// A whole problem: all tiles and their steps on a number of multiprocessors.
struct Grid {
  double tiles = 0, steps = 0, flops = 0;
  double tile_bytes = 0;  // queries and result of a tile
  int multiprocessors = 0;
  bool longest_first = false;  // tiles differ in length and are taken from a counter
};
// TFLOP/s of the whole problem.
double rate_of(const Modelled& model, const Grid& grid);

// Waits between the blocks of a backward, with the modelled clocks of a hand-over, and with 0.6 and 1.6 times them.
struct Turns {
  Waiting waiting;
  double least = 0, most = 0;  // shares
  double flops = 0;
};

// A forward has the grid, a backward the turns, and a given cubin neither.
struct WholeProblem {
  std::optional<Grid> grid;
  std::optional<Turns> turns;
};

std::string timing_report(const Modelled& model, const WholeProblem& problem);
std::string timing_json(const Modelled& model, const WholeProblem& problem);
vgpu::Timeline timeline_of(const Modelled& model, const machine_code::Kernel& kernel);

}  // namespace tandem::tool
