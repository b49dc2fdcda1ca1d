// Appends to a cache for tests: tensors with guards and poison, and the check of every element.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "problem/append_kv.h"
#include "support/tensor.h"

namespace tandem::test {

enum class Places : uint8_t { slots, pages, rows };

struct AppendCase {
  Places places = Places::pages;
  DType type = DType::bf16, table = DType::f32;
  int64_t heads_k = 2, heads_q = 0, head_dim = 64, head_dim_v = 64, page_size = 16, rotary_dim = 0;
  std::vector<int64_t> new_keys = {3, 3};  // new keys of each sequence; dense: equal numbers
  std::vector<int64_t> cached = {5, 40};   // keys that the cache has
  std::vector<int64_t> slots = {};         // Places::slots
  bool packed = false;
  int64_t rest = 0;  // rows after the last sequence or slot
  bool interleaved = false, batch_idx = false, rotary_seqlens = false, single_q = false, in_place = false;
  bool appends = true;  // false: k is absent
  int64_t layout = kCompact, gap = 8;
};
std::ostream& operator<<(std::ostream& stream, const AppendCase& c);

// Normal numbers in inputs and caches. Each sequence has its own pages, in random order; unused entries of page_table
// are no pages. A query belongs to each new key.
class AppendInstance {
 public:
  explicit AppendInstance(const AppendCase& c);
  AppendInstance(const AppendInstance&) = delete;

  tandem_append_kv_args args();  // points into *this
  std::vector<Tensor*> tensors();

  const AppendCase c;
  Tensor k, v, k_cache, v_cache, q, q_out, cos, sin;
  Tensor slot_mapping, page_table, cache_seqlens, cache_batch_idx, cu_seqlens, rotary_seqlens, positions;
};

// append() changes an instance after adjust() has. Unrotated elements must have the same bits. The largest error of
// rotated elements must be within twice the error of the float32 formula, plus the rounding of the type. Guards and
// inputs must be intact. Keys and positions outside must be skipped. Returns the error as a sentence, or "".
using ChangesAppend = std::function<void(AppendInstance&)>;
std::string check_append(const AppendCase& c, const ChangesAppend& append, const ChangesAppend& adjust = nullptr);

// Cases that every engine serves.
std::vector<AppendCase> append_cases();

}  // namespace tandem::test
