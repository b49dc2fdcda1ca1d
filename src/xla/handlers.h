// The handlers of XLA's foreign function interface. No part of XLA is linked.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/status.h"
#include "xla/ffi.h"

namespace tandem::xla {

// The contexts of the GPUs of a process, by XLA's device ordinals, never destroyed.
class Gpus {
 public:
  virtual ~Gpus() = default;
  // The context of a device, opened at its first use, and the device of its tensors.
  Status find(int32_t ordinal, tandem_context** context, tandem_device* device);

 protected:
  virtual Status open(int32_t ordinal, tandem_context** context, tandem_device* device);

 private:
  static constexpr int32_t kMaxDevices = 64;
  std::atomic<tandem_context*> contexts_[kMaxDevices] = {};
  tandem_device devices_[kMaxDevices] = {};
  std::mutex opening_;
};

// One execution of a handler. gpus: null on the CPU. Returns null or an error that XLA destroys.
XlaError* handle(const XlaFrame& frame, tandem_pass pass, Gpus* gpus) noexcept;

}  // namespace tandem::xla
