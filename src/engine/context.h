// tandem_context: what is not a call's.
#pragma once

#include <memory>
#include <string>

#include "cpu/threads.h"
#include "engine/engine.h"
#include "tandem/tandem.h"

struct tandem_context {
  // On the CPU.
  explicit tandem_context(const tandem_context_options& options);
  // On a GPU, real or virtual, whose tensors are at that place. The host computes nothing for a call.
  tandem_context(std::unique_ptr<tandem::Engine> gpu, tandem_device place);

  tandem::Engine& engine_for(tandem::DType type) const {
    return type == tandem::DType::f64 && float64 ? *float64 : *engine;
  }

  tandem_device device{TANDEM_CPU, 0};
  tandem::cpu::Threads threads;
  std::unique_ptr<tandem::Engine> engine, float64;  // float64: of such tensors; null: they are the engine's too
  std::string description;
};

namespace tandem {

// The context itself, or for NULL the process default, which is not made where a variable of the environment has no
// meaning.
Status context_or_default(tandem_context* handle, tandem_context** context);

// The GPU behind a context that has one: for tools and tests.
gpu::Device& device_of(tandem_context& context);

}  // namespace tandem
