// The interface of a target (an instruction set) for the scheduler: plain functions on plain structs, one table per
// target.
//
// The scheduler (forward.cpp, backward.cpp) assigns rows, keys and scratch to threads; a kernel computes one piece on
// one thread. Kernels call no inline function of a shared header. The linker could keep such a function's copy with
// wider instructions than the machine has.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/problem.h"

namespace tandem::cpu {

// The query rows of one (sequence, key head). Row r is query r / group of head head_k * group + r % group. All query
// heads that share keys are neighbours, and one tile serves them (GQA packing).
struct Piece {
  const Problem* problem;
  Sequence sequence;
  int64_t sequence_number;  // its index in the batch, packed or not
  int64_t head_k;
  int64_t head_first, heads;  // row r: query r / heads of head head_first + r % heads
  int64_t streamed_rows;      // decode: query rows of the sequence and key head; else 0
  int64_t row_begin, row_end;
  int64_t key_begin, key_end;  // the piece's keys; key_begin is a multiple of the key tile
};

// Unnormalised results of a part of the keys: out[row][head_dim_v padded], running maximum (a stored score), sum, and
// the largest score if the caller needs it.
struct Partial {
  float* out;
  float* max;
  float* sum;
  float* largest;
  int64_t stride;  // floats between rows of out
};
constexpr int64_t kRowFloats = 3;  // floats per row in addition to out

// A float32 accumulator of dq: row r of a piece lies at data[r / heads * query + r % heads * head - origin].
struct RowAccumulator {
  float* data;
  int64_t query, head, origin;
};

// The values from which the backward computes a row's probabilities.
struct RowTerms {
  float delta;        // sum(dout * out) or sum(P dP), - dlse
  float max;          // the row's largest stored score if inverse_sum is not 0
  float inverse_sum;  // 1 / sum of e^(score - max) and the sink; 0: lse is exact
  float sink;         // the sink's probability, where inverse_sum is not 0
};

// The terms of a row of a piece: data[query * query_stride + head * head_stride].
struct RowTermsView {
  RowTerms* data;
  int64_t query_stride, head_stride;
};

// Returns true if any of a tile's rows may see a key of the block that begins at this key.
struct BlockFilter {
  bool (*needed)(const void* context, int64_t key);
  const void* context;
};

struct Kernels {
  const char* name;
  bool bf16_dot;
  int panel;         // queries per panel; rows per piece should be a multiple
  int64_t key_tile;  // keys per step of the forward

  // The forward on tiles of queries. partial: NULL writes out and lse, otherwise the function fills the partial of rows
  // [0, rows).
  size_t (*forward_scratch)(const Problem&, int64_t rows);
  void (*forward)(const Piece&, const Partial* partial, void* scratch);
  // The forward for few queries and many keys, which reads the keys once, without packing.
  size_t (*decode_scratch)(const Problem&, int64_t rows);
  void (*decode)(const Piece&, const Partial* partial, void* scratch);
  // Joins the partials of consecutive key ranges, in order, into out and lse. A part is rows x stride floats of out,
  // then rows of max, of sum and of the largest score.
  void (*combine)(const Piece&, const float* parts, int64_t count, int64_t stride, void* scratch);

  // Fills in the backward's terms of a piece's rows. A float32 lse may be too imprecise for a row's probabilities. The
  // sums of such rows are computed again over the blocks of keys for which needed(context, first key) is true.
  void (*row_terms)(const Piece&, RowTermsView, BlockFilter, void* scratch);
  size_t (*backward_scratch)(const Problem&);
  // Packs keys [key_begin, key_end) (at most kBackwardKeys) and clears their gradients.
  void (*backward_keys)(const Piece&, bool want_dkv, bool want_dq, void* scratch);
  // One tile of rows (at most kBackwardRows) against the packed keys: adds to dk and dv, stores the tile of dq.
  // captured: null, or the table of all captured gradients (problem/bound_expression.h). Returns false if no row sees a
  // key; then nothing need be added.
  bool (*backward_tile)(const Piece&, RowTermsView, bool want_dkv, bool want_dq, double* captured, void* scratch);
  void (*backward_add_dq)(const Piece&, RowAccumulator dq, void* scratch);
  void (*backward_store_dkv)(const Piece&, void* scratch);
  // Adds the tile of dscore to sum[query * query_stride + key * key_stride], after a backward_tile() that computed no
  // gradient. A broadcast bias sums over whole heads, for which float32 would lose digits.
  void (*backward_add_dbias)(const Piece&, double* sum, int64_t query_stride, int64_t key_stride, void* scratch);
  // 2^src as the softmax of this dtype computes it. Tests and the error table of docs/numerics.md use it.
  void (*exp2)(DType, const float* src, int64_t n, float* dst);
  // Converts between float32 and float32, bfloat16 or float16: dst[0, n) = src; add_row: += src.
  void (*load_row)(DType, const void* src, int64_t n, float* dst);
  void (*store_row)(DType, const float* src, int64_t n, void* dst);
  void (*add_row)(DType, const float* src, int64_t n, void* dst);
};

constexpr int64_t kBackwardKeys = 192;
constexpr int64_t kBackwardRows = 192;

// The table of instruction_set() (base/instruction_set.h): the best that this machine can run, or the table that the
// environment names.
const Kernels& kernels();

}  // namespace tandem::cpu
