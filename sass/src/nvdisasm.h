// nvdisasm, NVIDIA's disassembler, which is found at run time as NVRTC is.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace tandem::machine_code {

// Environment variables, read once.
struct Places {
  std::string nvdisasm;      // TANDEM_NVDISASM: its path; no other is tried
  std::string path;          // PATH
  std::string virtual_env;   // VIRTUAL_ENV
  std::string conda_prefix;  // CONDA_PREFIX
  std::string cuda_home;     // CUDA_HOME, "/usr/local/cuda" without
  std::string temporary;     // TMPDIR, "/tmp" without

  // As they were at the first call.
  static const Places& get();
};

// Programs to try, the best first: TANDEM_NVDISASM alone when it is set; PATH; the wheels of the virtual environment
// and of conda's; CUDA_HOME.
std::vector<std::string> nvdisasm_candidates(const Places& places);

// What it prints of a cubin: code and attributes of all kernels. file: its path. The first program that can read it is
// taken. TANDEM_NO_COMPILER when there is none, with what to install.
Status disassemble(const std::string& file, const Places& places, std::string* text);

// The same for a cubin in memory, by a file that is removed again.
Status disassemble_bytes(const std::string& cubin, const Places& places, std::string* text);

}  // namespace tandem::machine_code
