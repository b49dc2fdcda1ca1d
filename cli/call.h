// One attention call of the command: its inputs, its options, and as many sets of results as are compared.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/buffer.h"
#include "cli/plain/plain.h"

namespace tandem::tool {

struct Inputs {
  Buffer q, k, v;
  Buffer dout, dlse;  // of backward; dlse may be absent, as may all below
  Buffer bias, sink, alibi_slopes;
  Buffer cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;

  // Says where the engine finds a buffer's elements.
  using Place = std::function<Tensor(const Buffer&)>;
  // The options, and the inputs as tensors. Results are absent.
  Attention attention(const Attention& options, const Place& place = &Buffer::tensor) const;
};

struct Results {
  Buffer out, lse, dq, dk, dv, dbias, dsink;

  // Room for the results of a call, or none where the inputs have no memory. exact: everything in float64; otherwise as
  // the engine writes them.
  Results(const Inputs& inputs, bool backward, bool exact);

  struct Named {
    const char* name;
    const Buffer* buffer;
    size_t head_axis;
  };
  std::vector<Named> all(tandem_pass pass) const;  // those that are present
};

// The call with its tensors in place: what the engine gets.
Attention with_results(Attention attention, const Results& results, const Inputs::Place& place = &Buffer::tensor);

// The same call as a checked Problem for the oracle and the plain formula. Throws tandem::Error.
Problem problem_of(const Attention& attention, const Results& results, tandem_pass pass);

// float64 truth: results must be exact ones. on_task is told the share of the work that was done since the last call.
void truth(const Attention& attention, const Results& exact, bool backward, cpu::Threads& threads,
           const std::function<void(double)>& on_progress);

// Multiplications and additions of the matrix products: 2 in forward, 5 in backward, over the visible keys.
double forward_flops(const Problem& problem);
inline double backward_flops(const Problem& problem) { return 2.5 * forward_flops(problem); }

}  // namespace tandem::tool
