// Flags that several commands share.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "tandem/call.h"

namespace tandem::tool {

struct MachineFlags {
  std::string device = "cpu";
  int threads = 0;
  void add_to(CLI::App& app);
};

// Everything about the mask and the scores.
struct MaskFlags {
  bool causal = false, top_left = false, alibi = false;
  std::string window;
  double softcap = 0, scale = 0;
  std::vector<int64_t> seqused;
  void add_to(CLI::App& app);

  Attention options() const;        // throws io::InputError
  void fill(Inputs& inputs) const;  // alibi_slopes and seqused, by the shape of inputs.q
};

int32_t checked_index(int64_t value, const char* flag);  // as int32, or io::InputError

// Runs a command's function; what it throws becomes one sentence on standard error and the exit code: 2 for input that
// cannot be used, 1 for anything else.
int guarded(const std::function<int()>& run);

// Each adds a subcommand; its callback sets *exit_code.
void add_attend(CLI::App& app, int* exit_code);
void add_verify(CLI::App& app, int* exit_code);
void add_bench(CLI::App& app, int* exit_code);
void add_info(CLI::App& app, int* exit_code);
void add_demo(CLI::App& app, int* exit_code);

}  // namespace tandem::tool
