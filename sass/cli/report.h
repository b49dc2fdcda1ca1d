// A kernel's machine code in tables and as JSON.
#pragma once

#include <string>
#include <vector>

#include "sass/src/cost_model.h"

namespace tandem::tool {

struct Examined {
  std::string name;  // of the kernel, or of the file
  machine_code::CostModel cost_model;
  machine_code::Cubin cubin;
  int shared_bytes = 0;        // of a block, with what is asked for at launch; 0: not known
  std::string compiler;        // "NVRTC 13.0"; "": it came as machine code
  double compile_seconds = 0;  // of CPU time, from a cold start
};

// Facts, loops, and for tiles of 128 x 128 scores the work of each unit.
std::string report_of(const Examined& examined);

// The figures of several side by side, the first one's roles deciding what a warp's rows are.
std::string comparison_of(const std::vector<Examined>& all);

std::string json_of(const std::vector<Examined>& all);

}  // namespace tandem::tool
