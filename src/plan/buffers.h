// The tensors of a call by name, from first to last byte, with the gaps between rows. Devices that check every access
// receive these tensors with each launch.
#pragma once

#include <initializer_list>
#include <vector>

#include "gpu/device.h"
#include "problem/append_kv.h"
#include "problem/make_blocks.h"
#include "problem/problem.h"

namespace tandem::plan {

class Buffers {
 public:
  void add_inputs(const Problem& problem);   // q, k, v
  void add_results(const Problem& problem);  // out and lse, which the call writes
  void add_max_scores(const Problem& problem);
  // Backward: out, lse, dout and dlse; dout; dk and dv; dq; dsink; dbias; the gradients of a score_mod's tensors.
  void add_results_given(const Problem& problem);
  void add_result_gradient(const Problem& problem);
  void add_key_gradients(const Problem& problem);
  void add_query_gradient(const Problem& problem);
  void add_sink_gradient(const Problem& problem);
  void add_bias_gradient(const Problem& problem);
  void add_captured_gradients(const Problem& problem);
  void add_terms(const Problem& problem);    // bias, alibi_slopes, sink, dropout numbers, mod tensors
  void add_lengths(const Problem& problem);  // cu_seqlens, seqused
  void add_block_lists(const Problem& problem);
  void add_mod(const ModView& mod);  // the tensors of a mod
  void add_append_kv(const AppendKvProblem& problem);
  void add_made_list(const char* count, const char* index, const MakeBlocksProblem& problem, const MadeList& made,
                     bool by_keys);

  std::vector<gpu::NamedBuffer> list;

 private:
  struct DimStep {
    int64_t count, stride;
  };
  enum class Access : uint8_t { read, write, update };

  void add(const char* name, Access access, const void* data, DType dtype, std::initializer_list<DimStep> steps);
  void add_rows(const char* name, Access access, const Problem& problem, const View& view, int64_t dim);
  void add_bias(const char* name, Access access, const BiasView& bias);
  static Access gradient_access(const Problem& problem) { return problem.accumulate ? Access::update : Access::write; }
  void add_keys(const char* name, Access access, const Problem& problem, const View& view, int64_t dim);
};

}  // namespace tandem::plan
