// Rules of all kernels, each with its error message, for the checks of the passes.
#pragma once

#include "base/status.h"
#include "gpu/device.h"
#include "problem/problem.h"

namespace tandem::plan {

// Returns ok if the device has kernels.
Status check_device(const gpu::Properties& device);

// Checks type and options.
Status check_options(const Problem& problem);

// Checks that a kernel has capacity for a modification's scalars and tensors.
Status check_mod(const char* name, const ModView& mod);

Status check_head_dim(const char* tensor, int64_t head_dim);

// Checks a tensor that TMA reads or writes. empty: the kernel accesses no element.
Status check_tensor(const char* name, const View& view, bool packed, bool empty);

Status check_index(const char* name, const IndexView& view);

}  // namespace tandem::plan
