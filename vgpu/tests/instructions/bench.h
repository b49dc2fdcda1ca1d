// Small PTX kernels on every available device: the virtual GPUs, and the CUDA driver's GPU if one is present. Such a
// GPU then checks the tables of this folder.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gpu/device.h"

namespace tandem::test {

// The device features that an instruction needs.
enum class Needs : uint8_t {
  any,        // every device of these tests: sm_90 and later
  hopper,     // sm_90a alone: wgmma
  blackwell,  // sm_100a alone: tcgen05 and its kin
};

struct Bench {
  std::string name;  // "vgpu:h200", "cuda"
  std::unique_ptr<gpu::Device> device;
  mutable std::string lost;  // the device is unusable afterwards

  bool has(Needs needs) const;
  const char* target() const;  // PTX's .target: "sm_90a"
  bool is_virtual() const { return name != "cuda"; }
};

// All devices, opened once.
const std::vector<Bench>& benches();

// Memory of a device that a kernel receives as a parameter.
struct Memory {
  std::vector<std::byte> bytes;  // before the launch, afterwards what the kernel left
  bool output = false;           // else the kernel only reads the memory
  bool scratch = false;          // the contents are no result: addresses, for example

  Memory() = default;
  template <class T>
  static Memory in(const std::vector<T>& values) {
    Memory m;
    m.bytes.resize(values.size() * sizeof(T));
    std::memcpy(m.bytes.data(), values.data(), m.bytes.size());
    return m;
  }
  static Memory out(size_t bytes) {
    Memory m;
    m.bytes.assign(bytes, std::byte{0xa5});
    m.output = true;
    return m;
  }
  // Memory that the kernel reads and writes.
  template <class T>
  static Memory inout(const std::vector<T>& values) {
    Memory m = in(values);
    m.output = true;
    return m;
  }
  template <class T>
  T at(size_t index) const {
    T value;
    std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
    return value;
  }
};

// A tensor map parameter: spec.address is the address of memory[of] plus offset.
struct MapParameter {
  gpu::TensorMapSpec spec;
  size_t of = 0;
  size_t offset = 0;
};

// A kernel "test" whose parameters are the memories' addresses (.u64 p0, p1, ...), then the tensor maps (map0, ...).
// The kernel has these shared arrays of the module and dynamic shared memory "smem".
struct BenchKernel {
  std::string declarations;  // outside of the entry: variables, functions
  std::string directives;    // directives of the entry: ".reqnctapercluster 2"
  std::string body;          // without the braces
  gpu::Dim3 grid, block{32, 1, 1}, cluster;
  uint32_t dynamic_smem_bytes = 0;
  std::vector<Memory> memory;
  std::vector<MapParameter> maps;
  Needs needs = Needs::any;
  bool settled = true;  // false: the device chooses a part of the result
};

// Returns the module's text for a device.
std::string text_of(const BenchKernel& kernel, const Bench& bench);

// Returns a form of an instruction, "cp.async.bulk...", with its qualifiers sorted, because their order is free.
std::string in_order(const std::string& form);

// Names a file. Launches then only append the forms of all instructions to it. Launches also append "key" and the key
// of each form that a recording should have (recording.h).
inline constexpr const char* kListVariable = "TANDEM_LIST_INSTRUCTIONS";

// Loads and launches the kernel. The memories then hold its results. A failure fails the test with the text.
bool launch(const Bench& bench, BenchKernel* kernel);

// Calls body(bench, kernel after the launch) on each device that has the features the kernel needs.
template <class F>
void on_each(const BenchKernel& kernel, F&& body) {
  for (const Bench& bench : benches()) {
    if (!bench.has(kernel.needs)) continue;
    SCOPED_TRACE(bench.name);
    BenchKernel copy = kernel;
    if (launch(bench, &copy)) body(bench, copy);
  }
}

}  // namespace tandem::test
