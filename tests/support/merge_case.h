// Merges for tests: parts with guards and poison, an engine that merges them, and the check of accuracy.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "problem/merge.h"
#include "support/tensor.h"

namespace tandem::test {

struct MergeCase {
  int64_t parts = 2, batch = 1, seqlen = 5, heads = 2, head_dim = 8;
  bool packed = false;
  std::vector<DType> types = {DType::f32};  // types of the parts, in turn
  DType out = DType::f32;
  bool lse = true;
  int64_t layout = kCompact, gap = 3;
  bool in_place = false;   // the result is the first part's place
  bool undefined = false;  // some lse are NaN or +inf
};
std::ostream& operator<<(std::ostream& stream, const MergeCase& c);

// Parts of normal numbers. A third of the rows have an lse of -inf and an out of NaN.
class MergeInstance {
 public:
  explicit MergeInstance(const MergeCase& c);
  MergeInstance(const MergeInstance&) = delete;

  // Arguments that point into *this.
  tandem_merge_args args();
  std::vector<Tensor*> tensors();  // all tensors, once each
  Tensor& out() { return c.in_place ? part_out_[0] : out_; }
  Tensor& lse() { return c.in_place ? part_lse_[0] : lse_; }

  const MergeCase c;

 private:
  std::vector<Tensor> part_out_, part_lse_;
  Tensor out_, lse_;
  std::vector<const tandem_tensor*> out_list_, lse_list_;
};

// merge() merges an instance. The largest error must be within twice the error of the formula in float32, plus the
// rounding of the result's type. Guards must be intact. Returns the error as a sentence, or "".
std::string check_merge_accuracy(const MergeCase& c, const std::function<void(MergeInstance&)>& merge);

// Cases of all types, layouts and sizes that every engine supports.
std::vector<MergeCase> merge_cases();

}  // namespace tandem::test
