// Refusals of several engines, one sentence each.
#pragma once

#include "base/status.h"
#include "problem/problem.h"

namespace tandem {

// No engine computes gradients of keys in pages.
inline Status refuse_paged_backward(const Problem& p) {
  if (!p.page_table || p.pass == TANDEM_FORWARD) return {};
  return Status::unsupported(
      "page_table must be NULL in the backward: gather each sequence's keys and values into dense or packed tensors");
}

}  // namespace tandem
