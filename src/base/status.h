// The outcome of a call inside the library: a code of the C interface and, on failure, a message.
#pragma once

#include <string>
#include <utility>

#include "tandem/tandem.h"

namespace tandem {

struct [[nodiscard]] Status {
  tandem_status code = TANDEM_OK;
  std::string message;

  bool ok() const { return code == TANDEM_OK; }

  static Status invalid(std::string message) { return {TANDEM_INVALID_ARGUMENT, std::move(message)}; }
  static Status unsupported(std::string message) { return {TANDEM_UNSUPPORTED, std::move(message)}; }
};

}  // namespace tandem
