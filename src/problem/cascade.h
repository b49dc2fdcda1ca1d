// CascadeCall: the two calls and the merge of a tandem_cascade, after their only check.
#pragma once

#include <cstddef>

#include "base/status.h"
#include "problem/merge.h"
#include "problem/problem.h"
#include "tandem/tandem.h"

namespace tandem {

// A forward whose results are a part in the workspace.
struct CascadePart {
  tandem_attention_args args;
  Problem problem;
  int64_t out_shape[3], out_strides[3], lse_shape[2], lse_strides[2];
  tandem_tensor out, lse;
};

// The object points to its own tensors, so that it is not copied.
class CascadeCall {
 public:
  CascadeCall() = default;
  CascadeCall(const CascadeCall&) = delete;
  CascadeCall& operator=(const CascadeCall&) = delete;

  // Checks all rules that the host can check. The check never writes through a tensor.
  Status read(const tandem_cascade_args* args, tandem_device device, bool with_data);

  CascadePart shared, own;

  // Returns the bytes of both parts, which begin at a multiple of kPartAlignment.
  size_t part_bytes() const;
  // Places the parts in the workspace, and fills in the merge. memory: part_bytes().
  Status place(void* memory, tandem_device device, MergeProblem* merge);

  // Returns the name of a tensor whose memory overlaps [begin, begin + bytes), or NULL.
  const char* operand_in_range(const void* begin, size_t bytes) const;

  static constexpr size_t kPartAlignment = 256;

 private:
  Status read_own(const tandem_cascade_args& args, tandem_device device, bool with_data);
  Status read_shared(const tandem_cascade_args& args, tandem_device device, bool with_data);
  void describe_part(CascadePart* part) const;
  // Returns the bytes of a part's tensor with this number of columns per row and head.
  size_t bytes_of(int64_t columns) const;

  tandem_attention_args call_ = {}, group_call_ = {};  // the caller's tensors
  const tandem_tensor* part_outs_[2] = {};
  const tandem_tensor* part_lses_[2] = {};
};

// Returns the status with the names of a cascade's arguments instead of its shared part's names.
Status with_group_names(Status status);

}  // namespace tandem
