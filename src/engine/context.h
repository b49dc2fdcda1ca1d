// tandem_context: what is not a call's.
#pragma once

#include <string>

#include "cpu/threads.h"
#include "tandem/tandem.h"

struct tandem_context {
  explicit tandem_context(const tandem_context_options& options);

  tandem_device device{TANDEM_CPU, 0};
  tandem::cpu::Threads threads;
  std::string description;
};

namespace tandem {

// The context itself, or for NULL the process default.
tandem_context& context_or_default(tandem_context* context);

}  // namespace tandem
