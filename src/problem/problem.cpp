#include "problem/problem.h"

#include <cstddef>
#include <cstring>

#include "base/text.h"
#include "problem/builder.h"
#include "problem/struct_size.h"

namespace tandem {
namespace {

// The size of the struct in version 0.1, the first version. Later members may be missing.
constexpr int64_t kFirstSize = offsetof(tandem_attention_args, diagonal_offset);

}  // namespace

const char* name_of(DType t) {
  switch (t) {
    case DType::f64: return "float64";
    case DType::f32: return "float32";
    case DType::bf16: return "bfloat16";
    case DType::f16: return "float16";
    case DType::boolean: return "bool";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
  }
  return "unknown";
}

Status ProblemBuilder::build() {
  p_.pass = mode_.pass;
  TANDEM_TRY(read_options());
  TANDEM_TRY(read_diagonal());
  TANDEM_TRY(read_window());
  TANDEM_TRY(read_queries());
  TANDEM_TRY(read_keys());
  TANDEM_TRY(read_scale());
  TANDEM_TRY(read_results());
  if (backward()) TANDEM_TRY(read_gradients());
  TANDEM_TRY(read_bias());
  TANDEM_TRY(read_per_head());
  TANDEM_TRY(read_used_lengths());
  TANDEM_TRY(read_longest());
  TANDEM_TRY(read_dropout());
  TANDEM_TRY(read_places());
  TANDEM_TRY(read_mods());
  TANDEM_TRY(read_block_mask());
  if (!mode_.with_data) return {};
  if (on_cpu()) TANDEM_TRY(check_values(p_));
  return check_sharing();
}

Status read_args(const tandem_attention_args* from, tandem_attention_args* args) {
  TANDEM_TRY(read_struct("args", "tandem_attention_args", from, kFirstSize, args));
  if (args->reserved != 0) {
    return Status::invalid(str_cat("reserved (", args->reserved, ") must be 0: zero the struct before filling it in"));
  }
  if (args->reserved_2 != 0) {
    return Status::invalid(
        str_cat("reserved_2 (", args->reserved_2, ") must be 0: zero the struct before filling it in"));
  }
  return {};
}

Status make_problem(const tandem_pass& pass, const tandem_attention_args* args, tandem_device device, bool with_data,
                    Problem* problem) {
  int32_t pass_value;
  static_assert(sizeof pass == sizeof pass_value);
  std::memcpy(&pass_value, &pass, sizeof pass);
  if (pass_value != TANDEM_FORWARD && pass_value != TANDEM_BACKWARD) {
    return Status::invalid(
        str_cat("pass (", pass_value, ") must be TANDEM_FORWARD (0) or TANDEM_BACKWARD (1): choose one of them"));
  }
  tandem_attention_args known;
  TANDEM_TRY(read_args(args, &known));
  *problem = {};
  return ProblemBuilder(known, {.pass = pass, .device = device, .with_data = with_data}, problem).build();
}

Status make_shard_problem(tandem_pass pass, const tandem_attention_args& args, tandem_device device, int64_t bias_keys,
                          Problem* problem) {
  *problem = {};
  return ProblemBuilder(args, {.pass = pass, .device = device, .with_data = true, .bias_keys = bias_keys}, problem)
      .build();
}

Sequence sequence_of(const Problem& p, int64_t b) {
  Sequence s;
  s.batch_index = b;
  s.q_rows = p.seqlen_q;
  s.k_rows = p.seqlen_k;
  if (p.packed_q()) {
    s.q_begin = p.cu_seqlens_q[b];
    s.q_rows = p.cu_seqlens_q[b + 1] - s.q_begin;
  }
  if (p.packed_k()) {
    s.k_begin = p.cu_seqlens_k[b];
    s.k_rows = p.cu_seqlens_k[b + 1] - s.k_begin;
  }
  s.q_len = p.seqused_q ? p.seqused_q[b] : s.q_rows;
  s.k_len = p.seqused_k ? p.seqused_k[b] : s.k_rows;
  const int64_t own = p.diagonal_offsets ? p.diagonal_offsets[b] : 0;
  s.diagonal = p.bottom_right ? s.k_len - s.q_len : clamp_diagonal(p.diagonal_offset + own);
  return s;
}

tandem_place place_of(const Problem& p, const Sequence& s) {
  if (p.placed) return p.places[s.batch_index];
  const auto number = [](int64_t n) { return static_cast<int32_t>(n); };
  return {.document = number(s.batch_index),
          .first_query = 0,
          .first_key = 0,
          .stride = 1,
          .seqlen_q = number(s.q_len),
          .seqlen_k = number(s.k_len),
          .diagonal = number(s.diagonal),
          .first_head = 0,
          .heads_q = number(p.heads_q)};
}

}  // namespace tandem
