// Rules that all kernels share, each with its sentence: for the checks of the passes.
#pragma once

#include "base/status.h"
#include "gpu/device.h"
#include "problem/problem.h"

namespace tandem::plan {

// Whether there are kernels for the device.
Status check_device(const gpu::Properties& device);

// Type and options.
Status check_options(const Problem& problem);

// What a kernel has room for of a modification's names.
Status check_mod(const char* name, const ModView& mod);

Status check_head_dim(const char* tensor, int64_t head_dim);

// A tensor that the bulk copy engine reads or writes. empty: nothing of it is touched.
Status check_tensor(const char* name, const View& view, bool packed, bool empty);

Status check_index(const char* name, const IndexView& view);

}  // namespace tandem::plan
