// Prints a kernel's machine code as tables and as JSON.
#pragma once

#include <string>
#include <vector>

#include "sass/src/cost_model.h"

namespace tandem::tool {

struct Examined {
  std::string name;  // name of the kernel or of the file
  machine_code::CostModel cost_model;
  machine_code::Cubin cubin;
  int shared_bytes = 0;        // bytes of a block, dynamic ones included; 0: not known
  std::string compiler;        // "NVRTC 13.0"; "": the input was machine code
  double compile_seconds = 0;  // CPU time from a cold start
};

// Prints facts, loops, and the work of each unit for tiles of 128 x 128 scores.
std::string report_of(const Examined& examined);

// Compares the figures of several kernels. The roles of the first kernel define the rows of a warp.
std::string comparison_of(const std::vector<Examined>& all);

std::string json_of(const std::vector<Examined>& all);

}  // namespace tandem::tool
