// The environment variables that the library reads. Each is read once, in one place. docs/environment.md lists all
// variables of the project.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace tandem {

struct Env {
  std::string cpu_target;      // TANDEM_CPU_TARGET: one of instruction_sets()
  std::string nvrtc;           // TANDEM_NVRTC: path of libnvrtc.so, the only candidate
  std::string virtual_env;     // VIRTUAL_ENV
  std::string conda_prefix;    // CONDA_PREFIX
  std::string cuda_home;       // CUDA_HOME
  std::string cache;           // TANDEM_CACHE: "off" keeps compiled kernels in memory only
  std::string cache_dir;       // TANDEM_CACHE_DIR: folder of the compiled kernels
  std::string xdg_cache_home;  // XDG_CACHE_HOME
  std::string home;            // HOME
  std::string temporary;       // TMPDIR, default "/tmp": compile logs
  std::string log;             // TANDEM_LOG: "1" prints one line per GPU call to stderr
  std::string line_info;       // TANDEM_LINE_INFO: "1" compiles kernels with line numbers
  std::string sm100;           // TANDEM_SM100: kSm100Switches, separated by commas
  std::string nvtx;            // NVTX_INJECTION64_PATH: library of a profiling tool

  bool logging() const { return log == "1"; }
  bool has_line_info() const { return line_info == "1"; }

  // Returns the values at the first call.
  static const Env& get();
};

// The words of TANDEM_SM100, which plan::tuning_of() reads.
inline constexpr std::string_view kSm100Switches[] = {"no_two_cta", "no_clc",  "clc",
                                                      "no_overlap", "exact_n", "wait_products"};
// Returns true if a list that is separated by commas contains the word.
bool lists(std::string_view list, std::string_view word);

// Returns ok, or a message about the first variable with an invalid value.
Status check(const Env& env);

}  // namespace tandem
