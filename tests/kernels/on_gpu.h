// Tests on a GPU: main() opens the one of --device, and skips them all where there is none. A virtual one runs each
// case under --schedules N schedules.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support/check_accuracy.h"
#include "support/gpu.h"

namespace tandem::test {

const Gpus& the_gpus();
inline const std::shared_ptr<const Gpu>& the_gpu() { return the_gpus().front(); }

// What every case here has, so that a GPU serves it: forward alone, in multiples of 16 bytes, and with the longest of
// packed sequences, for which only a virtual GPU can look.
inline const std::string kServed = "--gradients none --align 8 --max-seqlen 0 ";

struct CheckedCase {
  CheckedCase(std::string its_flags, std::function<void(Instance&)> adjusted = nullptr)
      : flags(std::move(its_flags)), adjust(std::move(adjusted)) {}

  std::string flags;  // those of kServed go before
  std::function<void(Instance&)> adjust;
};

// Where "each" stands, one number for each sequence: some among the keys, some, if wanted, far beyond.
std::string with_diagonals(const std::string& flags, bool far = true);

// By the judge, on all cores. A case that is refused is not good.
void expect_all_good(const std::vector<CheckedCase>& cases);

// The bytes of all elements, in order.
std::vector<std::byte> bytes_of(const Tensor& t);

// Tensors of the host, in a GPU's memory. Each of these throws std::runtime_error with the sentence of what fails.
class DeviceCopies {
 public:
  DeviceCopies(const Gpu& gpu, std::vector<Tensor*> tensors);
  DeviceCopies(const DeviceCopies&) = delete;

  const tandem_tensor* of(const tandem_tensor* host) const;  // one that is not among them stays what it is
  void fetch();                                              // back to the host, all of them

 private:
  const Gpu& gpu_;
  const std::vector<Tensor*> tensors_;
  std::vector<DeviceMemory> memories_;
  std::vector<tandem_tensor> copies_;
};

// A call on a GPU, ready to be made again and again.
struct Repeated {
  explicit Repeated(const std::string& flags, const Gpu& gpu = *the_gpu());
  explicit Repeated(std::unique_ptr<Instance> instance, const Gpu& gpu = *the_gpu());

  // Makes the call on poisoned outputs and waits; the bytes of out and lse.
  std::vector<std::byte> run();
  std::vector<std::byte> fetch(gpu::Stream stream);

  const Gpu& gpu;
  std::unique_ptr<Instance> instance;
  Outputs outputs;
  DeviceCall call;
};

}  // namespace tandem::test
