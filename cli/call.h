// One attention call of the command: its inputs, its options and its results.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/buffer.h"
#include "cli/plain/plain.h"

namespace tandem::tool {

struct Inputs {
  Buffer q, k, v;
  Buffer dout, dlse;  // backward only; dlse and all later members may be absent
  Buffer bias, sink, alibi_slopes;
  Buffer cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;

  // Returns the tensor where the engine finds the elements of a buffer.
  using Place = std::function<Tensor(const Buffer&)>;
  // Returns the options with the inputs as tensors. Results are absent.
  Attention attention(const Attention& options, const Place& place = &Buffer::tensor) const;
};

struct Results {
  Buffer out, lse, dq, dk, dv, dbias, dsink;

  // Allocates buffers for the results of a call, without memory if the inputs have none. exact: all results in float64;
  // otherwise the engine's types.
  Results(const Inputs& inputs, bool backward, bool exact);

  struct Named {
    const char* name;
    const Buffer* buffer;
    size_t head_axis;
  };
  std::vector<Named> all(tandem_pass pass) const;  // only present results
};

// Returns the call with its results, as the engine receives it.
Attention with_results(Attention attention, const Results& results, const Inputs::Place& place = &Buffer::tensor);

// The same call as a checked Problem for the reference and standard attention. Throws tandem::Error.
Problem problem_of(const Attention& attention, const Results& results, tandem_pass pass);

// Computes float64 results; exact must have float64 buffers. on_progress receives the share of work since its last
// call.
void truth(const Attention& attention, const Results& exact, bool backward, cpu::Threads& threads,
           const std::function<void(double)>& on_progress);

// Returns the multiplications and additions of the matrix products: 2 in forward, 5 in backward, over the visible keys.
double forward_flops(const Problem& problem);
inline double backward_flops(const Problem& problem) { return 2.5 * forward_flops(problem); }

}  // namespace tandem::tool
