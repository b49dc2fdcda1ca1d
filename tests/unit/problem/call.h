// A valid call with every tensor available, which tests change.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "problem/problem.h"

namespace tandem::test {

inline constexpr tandem_dtype kF64{TANDEM_FLOAT, 64, 1}, kF32{TANDEM_FLOAT, 32, 1}, kF16{TANDEM_FLOAT, 16, 1};
inline constexpr tandem_dtype kBf16{TANDEM_BFLOAT, 16, 1}, kBool{TANDEM_BOOL, 8, 1}, kI32{TANDEM_INT, 32, 1};

// A tensor of the C interface with its memory. The tensor must not move after its handle is in use.
struct Held {
  tandem_tensor handle{};
  std::vector<int64_t> shape, strides;
  std::vector<uint64_t> memory;

  // Allocates compact memory.
  void make(std::vector<int64_t> sizes, tandem_dtype dtype);
  void make(const std::vector<int32_t>& values);
  void set_strides(std::vector<int64_t> elements);
  // Uses another tensor's memory, from this element on.
  void lie_in(const Held& other, int64_t first_element);
  int32_t* ints() { return reinterpret_cast<int32_t*>(memory.data()); }
};

struct Call {
  tandem_pass pass = TANDEM_FORWARD;
  tandem_device device{TANDEM_CPU, 0};
  bool with_data = true;
  tandem_attention_args args{};
  uint64_t seed = 7, offset = 9;  // for dropout_seed_ptr, dropout_offset_ptr
  Held q, k, v, out, lse, dout, dlse, dq, dk, dv, bias, dbias, sink, dsink, alibi_slopes;
  Held cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table;

  Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Sets batch 2, heads 4 and 2, head_dim 8 and 6, float32, with every option of dense calls.
  void dense() { dense_of(3, 5); }
  void dense_of(int32_t seqlen_q, int32_t seqlen_k);
  // Sequences of 2 and 3 queries and of 3 and 4 keys, with every option that packed calls have.
  void packed();
  // dense() with k and v in 6 pages of 4 rows, up to 3 pages per sequence.
  void paged();

  // Tensors are absent until they are in args.
  void drop(const tandem_tensor* tandem_attention_args::*field) { args.*field = nullptr; }

  Status make(Problem* problem) const { return make_problem(pass, &args, device, with_data, problem); }
  // Returns the message of the refusal, or "accepted".
  std::string refusal() const;

 private:
  void per_head(int64_t batch, int64_t heads);
};

}  // namespace tandem::test
