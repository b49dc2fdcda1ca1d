// Tests on a GPU: main() opens the GPU of --device, and skips all tests if that fails. A virtual GPU runs each case
// under --schedules N schedules.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "support/check_accuracy.h"
#include "support/gpu.h"

namespace tandem::test {

const Gpus& the_gpus();
inline const std::shared_ptr<const Gpu>& the_gpu() { return the_gpus().front(); }

// Plans use these constants during its lifetime.
class ForcedTuning {
 public:
  explicit ForcedTuning(const plan::Tuning& tuning) {
    for (const auto& gpu : the_gpus()) gpu->set_tuning(tuning);
  }
  ForcedTuning(const ForcedTuning&) = delete;
  ~ForcedTuning() {
    for (const auto& gpu : the_gpus()) gpu->set_tuning(plan::kTuning);
  }
};

// Flags that every case here has, so that a GPU supports it: only a forward, in multiples of 16 bytes. Packed cases
// state their longest sequence, because only a virtual GPU can read lengths.
inline const std::string kServed = "--gradients none --align 8 --max-seqlen 0 ";

struct CheckedCase {
  CheckedCase(std::string its_flags, std::function<void(Instance&)> adjusted = nullptr)
      : flags(std::move(its_flags)), adjust(std::move(adjusted)) {}

  std::string flags;  // follow the flags of kServed
  std::function<void(Instance&)> adjust;
};

// Replaces "each" by one number for each sequence. Some are within the keys; with `far` some are far beyond them.
std::string with_diagonals(const std::string& flags, bool far = true);

// Checks every case on all cores. A refused case fails.
void expect_all_good(const std::vector<CheckedCase>& cases);

// Returns the plan of a case, whose flags follow the flags of kServed.
plan::Plan plan_of_case(tandem_pass pass, const std::string& flags, const plan::Tuning& tuning = plan::kTuning);

// The bytes of all elements, in order.
std::vector<std::byte> bytes_of(const Tensor& t);

// Copies host tensors to a GPU's memory. Each function throws std::runtime_error with the sentence of its failure.
class DeviceCopies {
 public:
  DeviceCopies(const Gpu& gpu, std::vector<Tensor*> tensors);
  DeviceCopies(const DeviceCopies&) = delete;

  const tandem_tensor* of(const tandem_tensor* host) const;  // returns an unknown tensor itself
  void fetch();                                              // copies all results back to the host

 private:
  const Gpu& gpu_;
  const std::vector<Tensor*> tensors_;
  std::vector<DeviceMemory> memories_;
  std::vector<tandem_tensor> copies_;
};

// A call on a GPU that can be repeated.
struct Repeated {
  explicit Repeated(const std::string& flags, const Gpu& gpu = *the_gpu());
  explicit Repeated(std::unique_ptr<Instance> instance, const Gpu& gpu = *the_gpu());

  // Makes the call on poisoned outputs and waits. Returns the bytes of out and lse.
  std::vector<std::byte> run();
  std::vector<std::byte> fetch(gpu::Stream stream);

  const Gpu& gpu;
  std::unique_ptr<Instance> instance;
  Outputs outputs;
  DeviceCall call;
};

}  // namespace tandem::test
