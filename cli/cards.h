// Plans for a GPU that need not be here: it is known by name.
#pragma once

#include <optional>
#include <string>

#include "cli/flags.h"
#include "gpu/device.h"
#include "plan/plan.h"

namespace tandem::tool {

// The GPU that a plan is made for.
struct CardFlags {
  std::string device, card;  // "cuda:N"; "h200"; none: the GPU that is here, else an H200
  void add_to(Command app);

  gpu::Properties properties() const;
};

inline constexpr const char* kNothingToDo = "There is no query: nothing is launched.\n";

// A problem without memory, and what the card does for it.
struct Planned {
  // Throws where the card does not serve it.
  Planned(const ProblemFlags& flags, const gpu::Properties& device, tandem_pass pass = TANDEM_FORWARD);

  Inputs inputs;
  Problem problem;
  std::optional<plan::Plan> plan;  // nothing, when there is no query; of a backward, when there is no key either
};

}  // namespace tandem::tool
