// Problem: one attention call after its only check, in the form every engine reads.
//
// make_problem() turns the arguments of the C interface into a Problem or returns the reason for a refusal. A Problem
// satisfies every rule of tandem.h that the host can check, so that engines need no further checks. The checks read
// lengths, strides and flags.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "tandem/tandem.h"

namespace tandem {

enum class DType : uint8_t { f64, f32, bf16, f16, boolean, i32, i64 };

constexpr int64_t size_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::bf16:
    case DType::f16: return 2;
    case DType::boolean: return 1;
  }
  return 0;
}

const char* name_of(DType t);  // "float32", "bfloat16", ...

// A (batch, row, head[, dim]) tensor whose dim is contiguous; strides in elements. The struct describes q, k, v, out,
// their gradients and, with dim 1, lse and max_scores. Packed tensors have batch stride 0, because rows count over all
// sequences.
struct View {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch = 0, row = 0, head = 0;

  explicit operator bool() const { return present; }
  bool present = false;  // data may be null if the call is only checked or planned

  std::byte* at(int64_t b, int64_t r, int64_t h) const {
    return data + (b * batch + r * row + h * head) * size_of(dtype);
  }
};

// (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1); broadcast dimensions have stride 0. Gradients of the tensors of a
// modification are also such views, and their dimensions come first.
struct BiasView {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  int64_t shape[4] = {1, 1, 1, 1};
  int64_t stride[4] = {0, 0, 0, 0};
  bool present = false;

  explicit operator bool() const { return present; }
  bool boolean() const { return present && dtype == DType::boolean; }
  std::byte* at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return data + (b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3]) * size_of(dtype);
  }
};

// One value per head, or per (batch, head): sink, dsink, alibi_slopes.
struct HeadView {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch = 0, head = 0;
  bool present = false;

  explicit operator bool() const { return present; }
  std::byte* at(int64_t b, int64_t h) const { return data + (b * batch + h * head) * size_of(dtype); }
};

// int32 indices along one dimension: cu_seqlens_*, seqused_*.
struct IndexView {
  const int32_t* data = nullptr;
  int64_t stride = 1;
  bool present = false;

  explicit operator bool() const { return present; }
  int64_t operator[](int64_t i) const { return data[i * stride]; }
};

// The page of each page_size keys of a sequence. k and v are then (pages, page_size, heads, dim): View::batch is the
// stride of pages.
struct PageTable {
  const int32_t* data = nullptr;
  int64_t batch = 0, column = 1;  // strides
  int64_t pages = 0, page_size = 0, max_pages = 0;
  bool present = false;

  explicit operator bool() const { return present; }
  int32_t at(int64_t sequence, int64_t index) const { return data[sequence * batch + index * column]; }
};

struct BoundExpression;  // problem/bound_expression.h

// A score_mod or mask_mod. CPU kernels only read whether it is present.
struct ModView {
  bool present = false;
  std::shared_ptr<const BoundExpression> read;

  explicit operator bool() const { return present; }
  const BoundExpression* operator->() const { return read.get(); }
};

enum class BlockState : uint8_t { hidden, partial, full };

// For each block of queries: the number and the indices of its blocks of keys. Broadcast dimensions have stride 0.
struct BlockList {
  const int32_t *count = nullptr, *index = nullptr;
  int64_t count_stride[3] = {}, index_stride[4] = {};  // batch, head, block of queries; number in the row
  int64_t shape[4] = {};                               // shape of the indices; the counts' may have 1 instead
  int64_t count_shape[3] = {};
  bool present = false;

  // Returns true if lists differ between sequences (0) or heads (1).
  bool varies(int dim) const { return shape[dim] > 1 || count_shape[dim] > 1; }
};

// The scores that are computed, by blocks of block_q queries and block_k keys.
struct BlockMaskView {
  int64_t block_q = 1, block_k = 1;
  BlockList partial, full;
  bool of_mask_mod = false;  // the lists follow from mask_mod and need not be read
  // The state of every block, if the host may read the lists: (batch|1, heads_q|1, blocks of queries, blocks of keys).
  std::shared_ptr<const BlockState[]> states;
  int64_t batch_stride = 0, head_stride = 0, blocks_k = 0;

  explicit operator bool() const { return partial.present; }
  BlockState at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return states[b * batch_stride + h * head_stride + i / block_q * blocks_k + j / block_k];
  }
};

struct DropoutOptions {
  double p = 0;                                               // a multiple of 1 / 256
  uint64_t seed = 0, offset = 0;                              // on the CPU read from seed_ptr and offset_ptr
  const uint64_t *seed_ptr = nullptr, *offset_ptr = nullptr;  // on GPUs, if the caller passes pointers

  explicit operator bool() const { return p > 0; }
};

struct Problem {
  tandem_pass pass = TANDEM_FORWARD;
  DType dtype = DType::f32;

  int64_t batch = 0, heads_q = 0, heads_k = 0;
  int64_t seqlen_q = 0, seqlen_k = 0;  // packed and pages: the longest sequence, or a bound on it
  int64_t total_q = 0, total_k = 0;    // rows of q and of k over the whole batch
  int64_t head_dim = 0, head_dim_v = 0;

  View q, k, v, out, lse, max_scores;
  View dout, dlse, dq, dk, dv;
  BiasView bias, dbias;
  HeadView sink, dsink, alibi_slopes;
  IndexView cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, diagonal_offsets;
  PageTable page_table;

  double softmax_scale = 1;     // resolved: 1/sqrt(head_dim) when the caller gave 0
  double softcap = 0;           // 0: off
  bool bottom_right = true;     // false: diagonal_offset and diagonal_offsets
  int64_t diagonal_offset = 0;  // within +-2^33
  int64_t window_left = TANDEM_UNBOUNDED, window_right = TANDEM_UNBOUNDED;  // causal is already window_right = 0
  DropoutOptions dropout;
  ModView score_mod, mask_mod;
  BlockMaskView block_mask;
  struct {
    bool softcap = false, window = false, alibi = false;
  } taken;  // options that replace expressions (problem/use_options.h)

  int32_t num_splits = 0;
  bool deterministic = false, batch_invariant = false, validate = false;
  bool accumulate = false;
  bool placed = false;
  const tandem_place* places = nullptr;  // placed: in device memory, for each sequence
  int32_t sm_limit = 0;                  // 0: none

  int64_t group() const { return heads_k > 0 ? heads_q / heads_k : 1; }
  bool packed_q() const { return cu_seqlens_q.present; }
  bool packed_k() const { return cu_seqlens_k.present; }
  // Returns true if a mask_mod or a block mask hides keys.
  bool masked() const { return mask_mod.present || block_mask.partial.present; }
  bool banded() const { return window_left != TANDEM_UNBOUNDED || window_right != TANDEM_UNBOUNDED; }
};

// Larger diagonal offsets have the same effect, because no sequence is longer. With window bounds and lengths up to
// 2^28 (the limits of GPUs) sums fit in int.
inline constexpr int64_t kFarDiagonal = int64_t{1} << 29;

constexpr int64_t clamp_diagonal(int64_t offset) {
  return offset < -kFarDiagonal ? -kFarDiagonal : offset > kFarDiagonal ? kFarDiagonal : offset;
}

// Converts the struct of a caller of any version to this version's form: members that an older version lacks are zero.
// Refuses a size that no version has, and nonzero members that this version does not know.
Status read_args(const tandem_attention_args* from, tandem_attention_args* args);

// Checks all rules that the host can check and fills *problem; never writes through a tensor. with_data: pointers,
// output overlaps and CPU index values are checked too. pass is a reference because a C caller may store any integer in
// it, and C++ may only read its bytes.
Status make_problem(const tandem_pass& pass, const tandem_attention_args* args, tandem_device device, bool with_data,
                    Problem* problem);

// Checks the call of a rank in context parallelism, whose tensors hold the rank's rows as one sequence. A bias has
// the rank's queries as rows, and a column for each of `bias_keys` positions of a document's keys, or more columns.
Status make_shard_problem(tandem_pass pass, const tandem_attention_args& args, tandem_device device, int64_t bias_keys,
                          Problem* problem);

// Checks the values of index tensors, which are in host memory.
Status check_values(const Problem& problem);

// One sequence of the batch. Row i of the sequence's q is q.at(batch_index, q_begin + i, head); keys are addressed the
// same way.
struct Sequence {
  int64_t batch_index = 0;           // index for View::at (strides are 0 if packed) and for bias
  int64_t q_begin = 0, k_begin = 0;  // first row in a packed tensor; 0 when dense
  int64_t q_len = 0, k_len = 0;      // used lengths
  int64_t q_rows = 0, k_rows = 0;    // rows in the tensors; outputs beyond the used rows are 0
  int64_t diagonal = 0;              // the offset of tandem.h
};

// Reads cu_seqlens and seqused from host memory. Only the CPU engine and the reference call it.
Sequence sequence_of(const Problem& problem, int64_t b);

// The place of a sequence; its own rows if the problem has no places.
tandem_place place_of(const Problem& problem, const Sequence& sequence);

struct KeySpan {
  int64_t begin = 0, end = 0;  // begin <= end, within [0, k_len]
};

// Keys that query row i sees through causal and window (a boolean bias may hide more).
inline KeySpan visible_keys(const Problem& p, const Sequence& s, int64_t i) {
  const int64_t at = i + s.diagonal;
  int64_t begin = 0, end = s.k_len;
  // |at| < 2^32, and make_problem() clamps bounds to +-2^61, so that no sum overflows.
  if (p.window_left != TANDEM_UNBOUNDED && at - p.window_left > begin) begin = at - p.window_left;
  if (p.window_right != TANDEM_UNBOUNDED && at + p.window_right + 1 < end) end = at + p.window_right + 1;
  if (begin > s.k_len) begin = s.k_len;
  if (end < begin) end = begin;
  return {begin, end};
}

// The first key that some query of a sequence sees. No engine reads a page that ends before this key, or its entry of
// the page table.
inline int64_t first_visible_key(const Problem& p, const Sequence& s) {
  return s.q_len > 0 ? visible_keys(p, s, 0).begin : s.k_len;
}

}  // namespace tandem
