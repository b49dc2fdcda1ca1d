// tandem_context: what is not a call's.
#pragma once

#include <memory>
#include <string>

#include "cpu/threads.h"
#include "engine/gpu.h"
#include "tandem/tandem.h"

struct tandem_context {
  // On the CPU.
  explicit tandem_context(const tandem_context_options& options);
  // On a GPU, real or virtual, whose tensors are at that place. The host computes nothing for a call.
  tandem_context(std::unique_ptr<tandem::GpuEngine> engine, tandem_device place);

  tandem_device device{TANDEM_CPU, 0};
  tandem::cpu::Threads threads;
  std::string description;
  std::unique_ptr<tandem::GpuEngine> gpu;  // or null
};

namespace tandem {

// The context itself, or for NULL the process default.
tandem_context& context_or_default(tandem_context* context);

// The GPU behind a context that has one: for tools and tests.
gpu::Device& device_of(tandem_context& context);

}  // namespace tandem
