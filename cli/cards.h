// Plans for a GPU that is known by name and need not be present.
#pragma once

#include <optional>
#include <string>

#include "cli/flags.h"
#include "gpu/device.h"
#include "plan/plan.h"

namespace tandem::tool {

// The GPU of a plan.
struct CardFlags {
  std::string device, card;  // "cuda:N"; "h200"; neither: this machine's GPU or an H200
  void add_to(Command app);

  gpu::Properties properties() const;
};

inline constexpr const char* kNothingToDo = "There is no query: nothing is launched.\n";

// A problem without memory, and the plan of the GPU for it.
struct Planned {
  // Throws if the GPU does not support the problem.
  Planned(const ProblemFlags& flags, const gpu::Properties& device, tandem_pass pass = TANDEM_FORWARD);

  Inputs inputs;
  Problem problem;
  std::optional<plan::Plan> plan;  // absent if no kernel would be launched
};

}  // namespace tandem::tool
