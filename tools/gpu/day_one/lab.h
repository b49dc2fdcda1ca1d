// The device of an experiment, its kernels, and the outcome that day_one.sh reads.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "gpu/device.h"
#include "support/gpu.h"

namespace tandem::day_one {

struct Setup {
  std::string device = "cuda:0";
  std::string plant;   // names of planted faults, separated by commas
  std::string shapes;  // file of the problems to time
  double scale = 1;    // factor for the counts of launches
};

enum class Verdict { ok, failed, measured, skipped };
struct Outcome {
  Verdict verdict = Verdict::ok;
  std::string text;  // one sentence for the page
};

// Memory of a kernel's parameter.
class GpuBuffer {
 public:
  GpuBuffer(const test::Gpu& gpu, const char* name, size_t bytes, bool writable);
  template <class T>
  GpuBuffer(const test::Gpu& gpu, const char* name, const std::vector<T>& values, bool writable = false)
      : GpuBuffer(gpu, name, values.size() * sizeof(T), writable) {
    upload(values.data());
  }
  void* address() const { return memory_.at(0); }
  void clear() const;
  template <class T>
  std::vector<T> read() const {
    std::vector<T> values(memory_.bytes() / sizeof(T));
    download(values.data());
    return values;
  }
  gpu::NamedBuffer named() const { return {name_, memory_.at(0), memory_.bytes(), writable_}; }

 private:
  void upload(const void* from) const;
  void download(void* to) const;

  const test::Gpu& gpu_;
  const char* name_;
  test::DeviceMemory memory_;
  bool writable_;
};

struct Grid {
  unsigned blocks = 1, threads = 128, dynamic_smem_bytes = 0;
  bool cooperative = false;
  gpu::Stream stream = nullptr;  // null: the lab's
};

class Lab {
 public:
  explicit Lab(const Setup& setup);

  const test::Gpu& gpu() const { return gpu_; }
  const gpu::Properties& properties() const { return gpu_.device().properties(); }
  bool is_blackwell() const { return properties().compute_major == 10; }
  bool is_virtual() const { return gpu_.is_virtual(); }
  bool plants(std::string_view fault) const { return lists(setup.plant, fault); }
  // A count for a real GPU, scaled by --scale, or the reduced one of a virtual GPU.
  int count(double real, int reduced) const;
  // Polls of a bounded wait, of 100 ns at least.
  int polls() const { return is_virtual() ? 2000 : 5'000'000; }

  // Launches an entry of a file of kernels/, which is compiled for `ctas` per cluster. Throws std::runtime_error.
  void launch(const char* file, const char* entry, int ctas, const Grid& grid, std::vector<void*> args,
              const std::vector<const GpuBuffer*>& buffers);
  void synchronize() const;

  const Setup setup;

 private:
  gpu::Kernel kernel_of(const std::string& file, const char* entry, int ctas, unsigned dynamic_smem_bytes);

  const test::Gpu gpu_;
  struct Loaded {
    std::string key;
    std::unique_ptr<gpu::Module> module;
  };
  std::vector<Loaded> modules_;
};

struct Experiment {
  const char* name;
  std::function<Outcome(Lab&)> run;
};
// Experiments with the tensor core, with other parts of a GPU, and with calls of the library.
std::vector<Experiment> tensor_core_experiments();
std::vector<Experiment> machine_experiments();
std::vector<Experiment> call_experiments();

}  // namespace tandem::day_one
