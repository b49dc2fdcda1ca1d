#include "vgpu/tests/instructions/bench.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include "base/text.h"
#include "gpu/driver/driver.h"
#include "gpu/virtual.h"
#include "vgpu/src/device.h"
#include "vgpu/src/ptx/parser.h"
#include "vgpu/tests/instructions/recording.h"

namespace tandem::test {
namespace {

std::vector<Bench> open_all() {
  std::vector<Bench> list;
  for (const char* name : {"vgpu:h200", "vgpu:b200", "cuda"}) {
    Bench bench;
    bench.name = name;
    const bool ours = gpu::is_virtual(name);
    const Status status = ours ? vgpu::open(name, &bench.device) : gpu::cuda::open(name, &bench.device);
    if (status.ok()) {
      list.push_back(std::move(bench));
    } else if (ours) {
      ADD_FAILURE() << name << ": " << status.message;
    } else {
      std::printf("No GPU (%s): on the virtual ones alone.\n", status.message.c_str());
    }
  }
  return list;
}

// Device memory for a launch, freed at its end.
class Copies {
 public:
  explicit Copies(gpu::Device& device) : device_(device) {}
  Copies(const Copies&) = delete;
  ~Copies() {
    for (void* address : addresses_) (void)device_.free(address);
  }

  Status add(const Memory& memory) {
    void* address = nullptr;
    TANDEM_TRY(device_.allocate(memory.bytes.size(), &address));
    addresses_.push_back(address);
    return device_.copy_to_device(address, memory.bytes.data(), memory.bytes.size(), nullptr);
  }
  void* address(size_t i) const { return addresses_[i]; }
  void** argument(size_t i) { return &addresses_[i]; }

 private:
  gpu::Device& device_;
  std::vector<void*> addresses_;
};

Status run(const Bench& bench, const std::string& text, BenchKernel* kernel) {
  gpu::Device& device = *bench.device;
  std::unique_ptr<gpu::Module> module;
  TANDEM_TRY(device.load(std::as_bytes(std::span(text.data(), text.size())), &module));
  gpu::Kernel handle = nullptr;
  TANDEM_TRY(module->find("test", static_cast<int32_t>(kernel->dynamic_smem_bytes), &handle));

  Copies copies(device);
  std::vector<std::string> names;
  std::vector<gpu::NamedBuffer> buffers;
  std::vector<gpu::TensorMap> maps(kernel->maps.size());
  std::vector<void*> arguments;
  for (size_t i = 0; i < kernel->memory.size(); ++i) {
    TANDEM_TRY(copies.add(kernel->memory[i]));
    names.push_back(str_cat("p", i));
  }
  for (size_t i = 0; i < kernel->memory.size(); ++i) {
    const Memory& memory = kernel->memory[i];
    buffers.push_back({names[i].c_str(), copies.address(i), memory.bytes.size(), memory.output, true});
    arguments.push_back(copies.argument(i));
  }
  for (size_t i = 0; i < kernel->maps.size(); ++i) {
    gpu::TensorMapSpec spec = kernel->maps[i].spec;
    spec.address = static_cast<std::byte*>(copies.address(kernel->maps[i].of)) + kernel->maps[i].offset;
    TANDEM_TRY(device.encode(spec, &maps[i]));
    arguments.push_back(&maps[i]);
  }

  gpu::Launch launch;
  launch.kernel = handle;
  launch.grid = kernel->grid, launch.block = kernel->block, launch.cluster = kernel->cluster;
  launch.dynamic_smem_bytes = kernel->dynamic_smem_bytes;
  launch.args = arguments.data();
  launch.buffers = buffers;
  TANDEM_TRY(device.launch(launch));
  TANDEM_TRY(device.synchronize(nullptr));
  for (size_t i = 0; i < kernel->memory.size(); ++i) {
    std::vector<std::byte>& bytes = kernel->memory[i].bytes;
    TANDEM_TRY(device.copy_to_host(bytes.data(), copies.address(i), bytes.size(), nullptr));
  }
  return device.synchronize(nullptr);
}

void add_forms(const std::string& text, const char* path) {
  vgpu::ptx::Module module;
  const Status status = vgpu::ptx::parse(text, &module);
  if (!status.ok()) ADD_FAILURE() << status.message;
  static std::set<std::string> added;
  std::ofstream file(path, std::ios::app);
  for (const auto& function : module.functions)
    for (const auto& instruction : function.instructions)
      if (added.insert(instruction.full_name()).second) file << in_order(instruction.full_name()) << "\n";
}

void add_key(const BenchKernel& kernel, const std::string& text, const char* path) {
  char line[32];
  std::snprintf(line, sizeof line, "key %016llx\n", static_cast<unsigned long long>(key_of(kernel, text)));
  std::ofstream(path, std::ios::app) << line;
}

// After an error of one kernel a GPU refuses all further work of the process.
bool works(gpu::Device& device) {
  void* address = nullptr;
  if (!device.allocate(256, &address).ok()) return false;
  return device.free(address).ok() && device.synchronize(nullptr).ok();
}

}  // namespace

bool Bench::has(Needs needs) const {
  const int32_t major = device->properties().compute_major;
  if (needs == Needs::any) return major >= 9;
  return major == (needs == Needs::hopper ? 9 : 10);
}

const char* Bench::target() const { return device->properties().compute_major == 10 ? "sm_100a" : "sm_90a"; }

const std::vector<Bench>& benches() {
  static const std::vector<Bench> all = open_all();
  return all;
}

std::string text_of(const BenchKernel& kernel, const Bench& bench) {
  const std::string target = bench.target();
  std::string text =
      str_cat(".version ", target == "sm_90a" ? "8.7" : "9.0", "\n.target ", target, "\n.address_size 64\n");
  if (kernel.dynamic_smem_bytes > 0) text += ".extern .shared .align 1024 .b8 smem[];\n";
  text += kernel.declarations;
  text += ".visible .entry test(";
  for (size_t i = 0; i < kernel.memory.size(); ++i) text += str_cat(i == 0 ? "" : ", ", ".param .u64 p", i);
  for (size_t i = 0; i < kernel.maps.size(); ++i)
    text += str_cat(kernel.memory.empty() && i == 0 ? "" : ", ", ".param .align 64 .b8 map", i, "[128]");
  text += str_cat(")\n", kernel.directives, "\n{\n", kernel.body, "\n}\n");
  return text;
}

std::string in_order(const std::string& form) {
  std::vector<std::string> words;
  std::istringstream text(form);
  for (std::string word; std::getline(text, word, '.');) words.push_back(word);
  std::sort(words.begin() + 1, words.end());
  std::string joined = words[0];
  for (size_t i = 1; i < words.size(); ++i) joined += "." + words[i];
  return joined;
}

bool launch(const Bench& bench, BenchKernel* kernel) {
  const std::string text = text_of(*kernel, bench);
  if (const char* path = std::getenv(kListVariable)) {
    add_forms(text, path);
    if (bench.name == "vgpu:h200" && kernel->settled) add_key(*kernel, text, path);
    return false;
  }
  if (!bench.lost.empty()) {
    ADD_FAILURE() << bench.name << " is lost to this process since another kernel failed: " << bench.lost
                  << "\nctest runs each test in a process of its own";
    return false;
  }
  const uint64_t key = kernel->settled ? key_of(*kernel, text) : 0;
  const Status status = run(bench, text, kernel);
  if (!status.ok()) {
    ADD_FAILURE() << bench.name << ": " << status.message << "\n" << text;
    if (!works(*bench.device)) bench.lost = status.message;
    return false;
  }
  if (kernel->settled) recorded_launch(bench, key, *kernel, text);
  return true;
}

}  // namespace tandem::test
