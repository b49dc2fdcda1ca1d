// ProblemBuilder reads one call into a Problem, step by step. Each step relies on the earlier steps.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "problem/operands.h"
#include "problem/problem.h"

namespace tandem {

namespace score_mod {
struct Name;
struct Signature;
}  // namespace score_mod

class ProblemBuilder {
 public:
  ProblemBuilder(const tandem_attention_args& args, const ReadMode& mode, Problem* problem)
      : args_(args), mode_(mode), p_(*problem) {}

  Status build();

  // Reads a mask_mod and its tensors, without a call.
  Status read_mask_mod(const tandem_mod* given, ModView* view) { return read_mod("mask_mod", given, true, view); }
  int captured_count() const { return static_cast<int>(mod_operands_.size()); }
  const Operand& captured(int i) const { return mod_operands_[static_cast<size_t>(i)]->operand; }

 private:
  // options.cpp: arguments that are not tensors.
  Status read_options();
  Status read_diagonal();
  Status read_window();
  Status read_scale();
  Status read_dropout();

  // tensors.cpp: shapes and types, and how they depend on each other.
  Status read_queries();
  Status read_keys();
  Status read_page_table();
  Status read_results();
  Status read_gradients();
  Status read_bias();
  Status check_bias_shape() const;
  Status read_per_head();
  Status read_used_lengths();
  Status read_places();
  Status read_longest();

  // modifications.cpp
  Status read_mods();
  Status read_mod(const std::string& mod, const tandem_mod* given, bool mask, ModView* view);
  Status place_mod(const std::string& mod, const char* text, bool mask, score_mod::Signature* signature,
                   BoundExpression* read);
  Status read_mod_tensor(const std::string& mod, const tandem_mod_tensor& tensor, bool mask, score_mod::Name* name,
                         BoundExpression* read);
  Status read_captured(const std::string& name, const tandem_tensor& tensor, const Operand* model, Use use);

  // block_mask.cpp
  Status read_block_mask();
  Status read_block_list(Field count, Field index, BlockList* list);
  void read_block_states();

  // values.cpp: checks that read the data.
  Status check_sharing() const;

  // Reads the tensor args.*field, which must be present, into operand(field).
  Status read(Field field, DTypes dtypes, const char* dtype_why, std::span<const Dim> dims, const char* dims_why,
              bool contiguous_last);
  Status read(Field field, DTypes dtypes, const char* dtype_why, std::initializer_list<Dim> dims) {
    return read(field, dtypes, dtype_why, {dims.begin(), dims.size()}, "", false);
  }
  // Reads a gradient: it has the shape of its tensor, and this type or float32.
  Status read_like(Field field, Field model, DType type, bool contiguous_last);
  Status read_lse(Field field, View* view);
  Status read_index(Field field, const Dim& length, IndexView* view);

  const Operand& operand(Field field) const;

  // The number of tensors that a call may have. The tensors of expressions come last.
  int operand_count() const { return kOperandCount + static_cast<int>(mod_operands_.size()); }
  const Operand& operand(int i) const;
  Use use(int i) const;

  bool given(Field field) const { return args_.*field != nullptr; }
  bool on_cpu() const { return mode_.device.type == TANDEM_CPU; }
  bool backward() const { return mode_.pass == TANDEM_BACKWARD; }
  bool is_shard() const { return mode_.bias_keys >= 0; }
  bool paged() const { return given(&Args::page_table); }
  bool packed() const { return given(&Args::cu_seqlens_q); }

  const tandem_attention_args& args_;
  const ReadMode mode_;
  Problem& p_;
  Operand operands_[kOperandCount];

  // Tensors of modifications. The caller defines their names.
  struct Captured {
    std::string name;
    Use use;
    Operand operand;
  };
  std::vector<std::unique_ptr<Captured>> mod_operands_;
};

}  // namespace tandem
