// Prints the timing model of a kernel as text, as JSON, and as a timeline in clocks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sass/cli/backward_grid.h"
#include "sass/cli/report.h"
#include "sass/src/clocks.h"
#include "vgpu/src/trace/timeline.h"

namespace tandem::tool {

// Clocks with one charge multiplied by a factor, or with all charges (name "all").
struct Variation {
  std::string name;
  double factor = 1, step = 0;
  std::optional<machine_code::DqPath> dq;
};

struct Modelled {
  std::string name;
  machine_code::Latencies latencies;
  machine_code::Clocks clocks;
  machine_code::Simulation run;
  std::optional<machine_code::DqPath> dq;
  double second_pass = 0;             // clocks of an iteration; 0: one pass
  std::vector<Variation> variations;  // every charge of the kernel, halved and doubled
  std::string doubt;                  // why the figures are no verdict; empty: they are
  double peak = 0;                    // FLOP per clock of the tensor core
  double least = 0, most = 0;         // clocks of an iteration
  std::string range;                  // reason for a range instead of one figure
};
// Throws if the model has no figures for the architecture or finds no warp that computes.
Modelled model_of(const Examined& examined);

// The hand-over between n_blocks: modelled on Blackwell, measured in sum on Hopper.
HandOver hand_over_of(const Modelled& model);

// A whole problem: all tiles of the blocks and their iterations, on a number of SMs.
struct Grid {
  double tiles = 0, steps = 0, flops = 0;
  double tile_bytes = 0;  // queries and result of a tile
  int multiprocessors = 0;
  bool longest_first = false;  // tiles differ in length and come from a counter
};
// TFLOP/s of the whole problem.
double rate_of(const Modelled& model, const Grid& grid);

// Waiting times between the blocks of a backward, for the assumed hand-over clocks and for 0.6 and 1.6 times as many.
struct Turns {
  Waiting waiting;
  double least = 0, most = 0;  // shares
  double flops = 0;
};

// A forward has a grid and a backward has turns. A cubin without a problem has neither.
struct WholeProblem {
  std::optional<Grid> grid;
  std::optional<Turns> turns;
};

std::string timing_report(const Modelled& model, const WholeProblem& problem);
std::string timing_json(const Modelled& model, const WholeProblem& problem);

// One CTA of the modelled run, in clocks.
struct ModelledTimeline {
  vgpu::Timeline timeline;
  std::vector<int64_t> iterations;  // begin of each iteration of the first warpgroup that computes
};
ModelledTimeline timeline_of(const Modelled& model, const machine_code::Kernel& kernel);

}  // namespace tandem::tool
