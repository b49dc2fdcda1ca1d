// tandem explain --machine-code and --clocks: the cost of a kernel's machine code by unit, and the causes of the clocks
// of an iteration.
#pragma once

#include <string>

#include "cli/cards.h"
#include "cli/flags.h"
#include "sass/cli/timing.h"

namespace tandem::tool {

struct MachineCodeFlags {
  bool wanted = false, clocks = false;
  std::string cubin, path, json, save, timeline;
  std::vector<std::string> beside;
  void add_to(Command app);

  bool asked() const {
    return wanted || clocks || !timeline.empty() || !cubin.empty() || !beside.empty() || !path.empty() ||
           !json.empty() || !save.empty();
  }
  // Reads the kernel of a problem, or a cubin.
  int run(const ProblemFlags& problem, const CardFlags& card, tandem_pass pass) const;

 private:
  void print_clocks(const Examined& examined, const Modelled& model, const WholeProblem& problem,
                    const std::string& title) const;
};

// Draws one CTA of the kernel of a problem, in modelled clocks. Throws TANDEM_NO_COMPILER without NVRTC or nvdisasm.
std::string picture_of(const ProblemFlags& problem, const gpu::Properties& device, tandem_pass pass);

}  // namespace tandem::tool
