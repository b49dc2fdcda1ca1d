// tandem_context: the state that calls share.
#pragma once

#include <memory>
#include <string>

#include "cpu/threads.h"
#include "engine/device_pool.h"
#include "engine/engine.h"
#include "tandem/tandem.h"

struct tandem_context {
  // Creates a context of the CPU.
  explicit tandem_context(const tandem_context_options& options);
  // Creates a context of a GPU, real or virtual, whose tensors are on `place`. The host computes nothing for a call.
  tandem_context(std::unique_ptr<tandem::Engine> gpu, tandem_device place);

  tandem::Engine& engine_for(tandem::DType type) const {
    return type == tandem::DType::f64 && float64 ? *float64 : *engine;
  }

  tandem_device device{TANDEM_CPU, 0};
  tandem::cpu::Threads threads;
  std::unique_ptr<tandem::Engine> engine, float64;  // float64: engine of float64 tensors; null: same engine
  std::unique_ptr<tandem::DevicePool> pool;         // null: a context of the CPU
  std::string description;
};

namespace tandem {

// Returns the context, or the process default for NULL. The default is not created if an environment variable is
// invalid.
Status context_or_default(tandem_context* handle, tandem_context** context);

// The GPU of a context of a GPU. Tools and tests use this function.
gpu::Device& device_of(tandem_context& context);

}  // namespace tandem
