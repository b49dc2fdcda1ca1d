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

// Checks the head dimensions, the tensors that TMA reads or writes, and the index tensors of a pass.
Status check_tensors(const Problem& problem);

}  // namespace tandem::plan
