// tandem explain --machine-code: what a kernel's machine code costs, a unit at a time.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "tandem/cards.h"
#include "tandem/flags.h"

namespace tandem::tool {

struct MachineCodeFlags {
  bool wanted = false;
  std::string cubin, path, json, save;
  std::vector<std::string> beside;
  void add_to(CLI::App& app);

  bool asked() const {
    return wanted || !cubin.empty() || !beside.empty() || !path.empty() || !json.empty() || !save.empty();
  }
  // Of the kernel for a problem, or of a cubin.
  int run(const ProblemFlags& problem, const CardFlags& card, tandem_pass pass) const;
};

}  // namespace tandem::tool
