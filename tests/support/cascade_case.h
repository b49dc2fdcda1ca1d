// Shared prefixes for tests: paged cases whose requests share their first pages.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "support/check_accuracy.h"
#include "support/instance.h"

namespace tandem::test {

// flags: a packed case with pages and --used-k. Group g has requests[g] neighbours, which share their first pages[g]
// pages.
struct CascadeCase {
  std::string flags;
  std::vector<int64_t> requests, pages;
};

// The tensors of a cascade: the tables and lengths of the case's requests, divided into shared and own keys.
class CascadeInstance {
 public:
  CascadeInstance(const CascadeCase& c, Instance& instance, Outputs& outputs);
  CascadeInstance(const CascadeInstance&) = delete;

  std::vector<Tensor*> tensors();  // all tensors that are present, once each
  // The fields of own_args and args that are tensors.
  std::vector<const tandem_tensor**> fields();

  tandem_attention_args own_args;
  tandem_cascade_args args;
  Tensor page_table, seqused_k, cu_seqlens_group, group_page_table, group_seqused_k;

 private:
  Instance& instance_;
  Outputs& outputs_;
};

// Checks a cascade against the reference, which computes each request alone. Returns the error as a sentence, or "".
std::string check_cascade(const CascadeCase& c, const std::function<void(CascadeInstance&)>& run);

// Cases that every engine supports.
std::vector<CascadeCase> cascade_cases();

}  // namespace tandem::test
