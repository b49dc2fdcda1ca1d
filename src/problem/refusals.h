// Refusals of several engines, one sentence each, with the engine's place as a parameter.
#pragma once

#include <string_view>

#include "base/status.h"
#include "base/text.h"

namespace tandem {

// place: "the CPU", "a GPU".
inline Status refuse_pages(std::string_view place) {
  return Status::unsupported(str_cat("page_table must be NULL on ", place,
                                     ": gather each sequence's keys and values into dense or packed tensors"));
}

}  // namespace tandem
