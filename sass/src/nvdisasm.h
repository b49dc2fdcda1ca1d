// Runs nvdisasm, NVIDIA's disassembler, which is found at run time like NVRTC.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace tandem::machine_code {

// Environment variables.
struct Places {
  std::string nvdisasm;      // TANDEM_NVDISASM: the only candidate if set
  std::string path;          // PATH
  std::string virtual_env;   // VIRTUAL_ENV
  std::string conda_prefix;  // CONDA_PREFIX
  std::string cuda_home;     // CUDA_HOME; default "/usr/local/cuda"
  std::string temporary;     // TMPDIR; default "/tmp"

  // Returns the values at the first call.
  static const Places& get();
};

// Returns the candidate programs, in order: TANDEM_NVDISASM alone if it is set; PATH; the wheels of the virtual
// environment and of conda; CUDA_HOME.
std::vector<std::string> nvdisasm_candidates(const Places& places);

// Prints code and attributes of all kernels of a cubin. file: path of the cubin. The first candidate that can read the
// file is used. If no program is found, the status is TANDEM_NO_COMPILER and names the package to install.
Status disassemble(const std::string& file, const Places& places, std::string* text);

// Disassembles a cubin in memory, through a temporary file.
Status disassemble_bytes(const std::string& cubin, const Places& places, std::string* text);

}  // namespace tandem::machine_code
