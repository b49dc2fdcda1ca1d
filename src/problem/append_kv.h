// AppendKvProblem: the arguments of a tandem_append_kv after their only check.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "problem/problem.h"
#include "tandem/tandem.h"

namespace tandem {

// int64 numbers along one dimension.
struct LongView {
  const int64_t* data = nullptr;
  int64_t stride = 1, length = 0;
  bool present = false;

  explicit operator bool() const { return present; }
  int64_t operator[](int64_t i) const { return data[i * stride]; }
};

// One table of the rotation, (rows, rotary_dim / 2).
struct RotaryTable {
  const std::byte* data = nullptr;
  DType dtype = DType::f32;
  int64_t row = 0;  // stride

  const std::byte* at(int64_t position) const { return data + position * row * size_of(dtype); }
};

struct AppendKvProblem {
  // Rows of new keys, or of queries. Packed rows have one sequence number after another in cu_seqlens. Rows with their
  // own slots or positions belong to no sequence.
  struct Rows {
    int64_t total = 0, seqlen = 0, heads = 0;  // seqlen: of each sequence, unless packed
    IndexView cu_seqlens;
  };

  DType dtype = DType::f32;
  int64_t batch = 0, head_dim = 0, head_dim_v = 0;
  Rows keys, queries;
  View k, v, k_cache, v_cache, q, q_out;  // k or q may be absent
  int64_t pages = 0, page_size = 0;       // caches' sizes; without pages: rows and places
  LongView slot_mapping, positions;
  PageTable page_table;
  int64_t table_rows = 0;
  IndexView cache_seqlens, cache_batch_idx, rotary_seqlens;
  RotaryTable cos, sin;
  int64_t rotary_dim = 0, rotary_rows = 0;  // rotary_dim 0: no rotation
  bool interleaved = false, single_q_position = false;

  bool by_token() const { return slot_mapping || positions; }
  bool empty() const { return keys.total * keys.heads == 0 && queries.total * queries.heads == 0; }
};

// Checks all rules that the host can check. The check reads no tensor's elements.
Status make_append_kv_problem(const tandem_append_kv_args* args, tandem_device device, AppendKvProblem* problem);

// A row of new keys or queries, the place of a new key in the cache, and the row of the rotary tables.
struct AppendRow {
  int64_t batch = 0, row = 0;
  int64_t page = 0, place = 0;
  int64_t position = 0;
};
struct AppendRows {
  std::vector<AppendRow> keys, queries;
};

// Reads lengths, slots, pages and positions, which must be in host memory, and checks them. Skipped keys and rows of no
// sequence are not listed.
Status read_append_rows(const AppendKvProblem& problem, AppendRows* rows);

}  // namespace tandem
