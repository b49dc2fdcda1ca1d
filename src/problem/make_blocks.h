// MakeBlocksProblem: the arguments of a tandem_make_block_mask after their only check.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "problem/problem.h"
#include "tandem/tandem.h"

namespace tandem {

// One list of the result: counts (batch, heads, rows), indices (batch, heads, rows, columns). Strides are in elements.
struct MadeList {
  int32_t *count = nullptr, *index = nullptr;
  int64_t count_stride[3] = {}, index_stride[4] = {};
  bool present = false;

  explicit operator bool() const { return present; }
};

struct MakeBlocksProblem {
  ModView mask_mod;
  int64_t batch = 0, heads = 0, seqlen_q = 0, seqlen_k = 0;
  int64_t block_q = 1, block_k = 1;    // clamped to the lengths; 1 if a sequence is empty
  int64_t blocks_q = 0, blocks_k = 0;  // per sequence
  MadeList partial[2], full[2];        // by rows of queries, by rows of keys

  int64_t lists() const { return batch * heads; }
  int64_t blocks() const { return lists() * blocks_q * blocks_k; }
  int64_t rows() const { return lists() * (blocks_q + (partial[1] ? blocks_k : 0)); }  // rows of both kinds of lists
};

// Checks all rules that the host can check. with_data: see make_problem().
Status make_blocks_problem(const tandem_block_mask_args* args, tandem_device device, bool with_data,
                           MakeBlocksProblem* problem);

}  // namespace tandem
