// A kernel's machine code in tables and as JSON.
#pragma once

#include <string>
#include <vector>

#include "sass/src/cost_model.h"

namespace tandem::tool {

struct Examined {
  std::string name;  // the kernel, or the file
  machine_code::CostModel cost_model;
  machine_code::Cubin cubin;
  int shared_bytes = 0;        // per block, static and dynamic; 0: not known
  std::string compiler;        // "NVRTC 13.0"; "": a given cubin
  double compile_seconds = 0;  // CPU time, from a cold start
};

// Facts, loops, and for tiles of 128 x 128 scores the work of each unit.
std::string report_of(const Examined& examined);

// Figures of several kernels in columns. The roles of the first kernel define the rows of a warp.
std::string comparison_of(const std::vector<Examined>& all);

std::string json_of(const std::vector<Examined>& all);

}  // namespace tandem::tool
