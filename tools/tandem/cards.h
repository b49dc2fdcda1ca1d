// Plans for a GPU that need not be here: it is known by name.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "gpu/device.h"
#include "plan/forward.h"
#include "tandem/flags.h"

namespace tandem::tool {

// The GPU that a plan is made for.
struct CardFlags {
  std::string device, card;  // "cuda:N"; "h200"; none: the GPU that is here, else an H200
  void add_to(CLI::App& app);

  gpu::Properties properties() const;
};

// A problem without memory, and what the card does for it.
struct Planned {
  Planned(const ProblemFlags& flags, const gpu::Properties& device);  // throws where the card does not serve it

  Inputs inputs;
  Problem problem;
  std::optional<plan::ForwardPlan> plan;  // nothing, when there is no query
};

}  // namespace tandem::tool
