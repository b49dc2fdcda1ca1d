// The chips that a virtual GPU can be. Each chip has a file, vgpu/models/NAME.model, whose text is compiled in.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tandem::vgpu {

struct Model {
  std::string name;            // "h200": of the device vgpu:h200
  std::string marketing_name;  // "NVIDIA H200 (virtual)"
  int32_t compute_major = 0, compute_minor = 0;
  int32_t sm_count = 0;
  int32_t clock_khz = 0, memory_clock_khz = 0, memory_bus_bits = 0;
  int64_t l2_bytes = 0, memory_bytes = 0;
  int32_t shared_bytes_per_block = 0, tensor_memory_columns = 0;
  int32_t registers_per_sm = 0, max_threads_per_block = 0, max_cluster = 0;
  // Throughput of a multiprocessor per clock. The machine does not simulate time.
  int32_t products = 0;      // multiplications with additions of 16-bit numbers
  int32_t exponentials = 0;  // ex2.approx
  // Families of instructions that only some chips have.
  bool wgmma = false, tcgen05 = false, tcgen05_i8 = false;
};

// Reads the text of NAME.model: lines "key = value" and comments (#), each key of vgpu/models/h200.model once. Refuses
// any other line with "NAME.model:LINE: ...".
Status parse_model(std::string_view file_name, std::string_view text, Model* model);

// Returns all models, ordered by name. Fails if one of their files is invalid.
Status all_models(std::vector<const Model*>* models);

// Returns the model with this name, or nullptr.
const Model* find_model(std::string_view name);
std::vector<std::string> model_names();

}  // namespace tandem::vgpu
