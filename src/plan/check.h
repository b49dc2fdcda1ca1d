// Rules that all kernels share, each with its error message, for the checks of the passes.
#pragma once

#include "base/status.h"
#include "gpu/device.h"
#include "problem/problem.h"

namespace tandem::plan {

// Ok if there are kernels for the device.
Status check_device(const gpu::Properties& device);

// Checks type and options.
Status check_options(const Problem& problem);

// Checks that a kernel has capacity for a modification's scalars and tensors.
Status check_mod(const char* name, const ModView& mod);

Status check_head_dim(const char* tensor, int64_t head_dim);

// Checks a tensor that TMA reads or writes. empty: no element is accessed.
Status check_tensor(const char* name, const View& view, bool packed, bool empty);

Status check_index(const char* name, const IndexView& view);

}  // namespace tandem::plan
