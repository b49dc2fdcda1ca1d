// A planned forward call -> what its kernels are given.
#pragma once

#include "gpu/device.h"
#include "plan/forward.h"
#include "problem/problem.h"
#include "problem/status.h"

namespace tandem {

struct ForwardKernels {
  gpu::Kernel forward = nullptr, schedule = nullptr;  // schedule: where the tile is ragged
};

// Everything but the tensor maps. workspace: any alignment.
ForwardParams forward_params(const Problem& problem, const plan::ForwardPlan& plan, void* workspace);

// The four maps of params; params is filled.
Status encode_maps(gpu::Device& device, const Problem& problem, const plan::ForwardPlan& plan, void* workspace,
                   ForwardParams* params);

Status launch_forward(gpu::Device& device, const Problem& problem, const plan::ForwardPlan& plan,
                      const ForwardKernels& kernels, void* workspace, gpu::Stream stream);

}  // namespace tandem
