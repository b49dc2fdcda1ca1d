// What the timing model says of a kernel: a screen of text, JSON, and a timeline in clocks.
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

// What a problem makes of a step: all tiles of blocks and their steps, on so many multiprocessors.
struct Grid {
  double tiles = 0, steps = 0, flops = 0;
  double tile_bytes = 0;  // queries and result of a tile
  int multiprocessors = 0;
  bool longest_first = false;  // tiles differ in length and are taken from a counter
};
// TFLOP/s of the whole problem.
double rate_of(const Modelled& model, const Grid& grid);

// What a backward's blocks wait for each other: with the clocks that handing over takes, and with 0.6 and 1.6 of them.
struct Turns {
  Waiting waiting;
  double least = 0, most = 0;  // shares
  double flops = 0;
};

// Of a forward's problem the grid, of a backward's the turns; neither of a cubin alone.
struct WholeProblem {
  std::optional<Grid> grid;
  std::optional<Turns> turns;
};

std::string timing_report(const Modelled& model, const WholeProblem& problem);
std::string timing_json(const Modelled& model, const WholeProblem& problem);
vgpu::Timeline timeline_of(const Modelled& model, const machine_code::Kernel& kernel);

}  // namespace tandem::tool
