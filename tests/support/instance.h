// The tensors of a Case: filled inputs, poison in all bytes that must not be read, and outputs that begin as NaN.
#pragma once

#include <functional>
#include <vector>

#include "problem/problem.h"
#include "support/case.h"
#include "support/tensor.h"

namespace tandem::test {

struct Outputs {
  Tensor out, lse, max_scores;      // outputs of forward
  Tensor dq, dk, dv, dbias, dsink;  // outputs of backward
  Tensor dslope, dtable, dtemperature;

  std::vector<Tensor*> gradients() { return {&dq, &dk, &dv, &dbias, &dsink, &dslope, &dtable, &dtemperature}; }
  std::vector<Tensor*> all() {
    std::vector<Tensor*> tensors = gradients();
    tensors.insert(tensors.begin(), {&out, &lse});
    tensors.push_back(&max_scores);
    return tensors;
  }
};

class Instance {
 public:
  explicit Instance(const Case& c);
  Instance(const Instance&) = delete;

  // The outputs of the case, in its dtypes and layouts.
  Outputs outputs(tandem_pass pass) const;
  // All outputs as compact float64, for the reference and for standard attention.
  Outputs exact_outputs(tandem_pass pass) const;

  // Arguments of the C interface. The arguments point into *this and *outputs, so both must not move.
  tandem_attention_args args(tandem_pass pass, Outputs* outputs);
  // The same problem through make_problem(). Throws std::runtime_error with its sentence for a refused case.
  Problem problem(tandem_pass pass, Outputs* outputs);

  // The same problem with all outputs in *exact.
  Problem exact_problem(tandem_pass pass, Outputs* exact);

  // Sets backward's inputs to out and lse of these results, rounded. Padding that forward skips is poison.
  void give_results(Outputs* results);

  uint64_t fingerprint() const;  // hash of all inputs
  std::vector<Tensor*> inputs();

  const Case c;
  Tensor q, k, v, bias, sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table,
      diagonal_offsets, places;
  Tensor kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices;
  Tensor dout, dlse, given_out, given_lse;
  Tensor slope, table, temperature, doc, seen;  // captured by score_mod, mask_mod
  std::vector<tandem_mod_scalar> scalars;       // scalars of the expressions: c, n, on

 private:
  void bind_mods();
  void fill_blocks();
  void fill_places();
  const tandem_mod* mod(size_t which, const std::string& text, Outputs* outputs);
  void fill();
  void fill_bias();
  void fill_pages();
  int64_t first_seen_key(int64_t b) const;
  void sharpen();
  void fill_gradients(Outputs* outputs) const;
  int64_t layout_of(int tensor) const;
  int64_t margin_of(int tensor) const;
  Tensor tensor(DType dtype, std::vector<int64_t> shape, int which) const;
  std::vector<int64_t> shape_q(int64_t dim) const;
  std::vector<int64_t> shape_k(int64_t dim) const;
  std::vector<int64_t> shape_lse() const;
  std::vector<int64_t> shape_bias() const;
  DType lse_type() const;
  // The type of a result, or of the backward's input with the same name: 'o', 'g' or 'd' of Case::float32.
  DType result_type(char which, DType otherwise) const;

  std::vector<tandem_mod_tensor> captured_[2];  // tensors of score_mod, of mask_mod
  tandem_mod mods_[2];
  uint64_t dropout_seed_ = 0, dropout_offset_ = 0;
};

// The problem with other outputs: the outputs present in *outputs replace the old outputs.
Problem with_outputs(Problem problem, Outputs* outputs);

// The number of used rows of sequence b.
int64_t used_q(const Case& c, int64_t b);
int64_t used_k(const Case& c, int64_t b);

}  // namespace tandem::test
