// MergeProblem: the arguments of a tandem_merge after their only check.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "problem/problem.h"
#include "tandem/tandem.h"

namespace tandem {

// Packed tensors are a batch of one. The struct holds no copy of the parts, because the caller may pass any number of
// them.
struct MergeProblem {
  int64_t parts = 0;
  int64_t batch = 0, seqlen = 0, heads = 0, head_dim = 0;
  View out, lse;
  bool sum = false;  // out is the sum of the parts, which have no lse

  // The values of part n for every query and head.
  struct Part {
    View out, lse;
  };
  Part part(int64_t n) const;

  const tandem_tensor* const* part_out = nullptr;
  const tandem_tensor* const* part_lse = nullptr;

  int64_t rows() const { return batch * seqlen * heads; }
  bool empty() const { return rows() == 0; }
};

// Checks all rules that the host can check. The check never writes through a tensor.
Status make_merge_problem(const tandem_merge_args* args, tandem_device device, MergeProblem* problem);

}  // namespace tandem
