#include "kernels/on_gpu.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace tandem::test {
namespace {

Gpus opened;

// The cases of this process. Neighbours in a list often differ in one option only, so their parts follow no pattern.
struct Part {
  size_t index = 0, count = 1;

  bool has(size_t n) const { return (n * 2654435761 >> 16) % count == index; }
} part;

Passes passes = Passes::both;

// Returns the number of concurrent cases: with several processes, each checks one at a time.
unsigned threads_to_judge() { return part.count > 1 ? 1 : std::max(1u, std::thread::hardware_concurrency()); }

}  // namespace

const Gpus& the_gpus() { return opened; }

plan::Plan plan_of_case(tandem_pass pass, const std::string& flags, const plan::Tuning& tuning) {
  Instance instance(from_flags(kServed + flags));
  Outputs outputs = instance.outputs(pass);
  const tandem_attention_args args = instance.args(pass, &outputs);
  Problem problem;
  require(make_problem(pass, &args, {TANDEM_CPU, 0}, false, &problem));
  return plan::make_plan(problem, the_gpu()->device().properties(), tuning);
}

std::string with_diagonals(const std::string& flags, bool far) {
  const size_t at = flags.find("each");
  if (at == std::string::npos) return flags;
  static constexpr int64_t kFar[] = {60, -40, INT32_MAX, 3, INT32_MIN}, kNear[] = {60, -40, 300, 3, -300};
  std::string list;
  const int64_t count = from_flags(flags.substr(0, at) + "0" + flags.substr(at + 4)).sequences();
  for (int64_t b = 0; b < count; ++b) list += (b == 0 ? "" : ",") + std::to_string((far ? kFar : kNear)[b % 5]);
  return flags.substr(0, at) + list + flags.substr(at + 4);
}

void expect_all_good(const std::vector<CheckedCase>& cases) {
  const NamedEngine engine = gpu_engine(the_gpus());
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  std::vector<std::string> bad;
  const auto work = [&] {
    for (size_t n = next++; n < cases.size(); n = next++) {
      if (!part.has(n)) continue;
      const std::string flags = kServed + cases[n].flags;
      if (part.count > 1) {
        std::printf("case: %s\n", flags.c_str());  // the last printed case is the case that ends a process
        std::fflush(stdout);
      }
      const Verdict verdict =
          run_case(from_flags(flags), engine.run, engine.supports, cases[n].adjust, engine.flags, passes);
      if (verdict.failure.empty() && verdict.refusal.empty()) continue;
      const std::lock_guard lock(mutex);
      bad.push_back(verdict.failure.empty() ? "refused: " + verdict.refusal + "\n  case: " + flags : verdict.failure);
    }
  };
  std::vector<std::thread> threads(threads_to_judge());
  for (std::thread& thread : threads) thread = std::thread(work);
  for (std::thread& thread : threads) thread.join();
  for (size_t n = 0; n < bad.size() && n < 20; ++n) ADD_FAILURE() << bad[n];
  EXPECT_EQ(bad.size(), 0u) << "of " << cases.size() << " cases";
}

std::vector<std::byte> bytes_of(const Tensor& t) {
  std::vector<std::byte> bytes;
  for (int64_t n = 0; t && n < t.size(); ++n)
    bytes.insert(bytes.end(), t.element(n), t.element(n) + size_of(t.dtype()));
  return bytes;
}

DeviceCopies::DeviceCopies(const Gpu& gpu, std::vector<Tensor*> tensors) : gpu_(gpu), tensors_(std::move(tensors)) {
  for (Tensor* tensor : tensors_) {
    const std::span<const std::byte> bytes = tensor->storage();
    memories_.emplace_back(gpu_.device(), bytes.size());
    require(gpu_.device().copy_to_device(memories_.back().at(0), bytes.data(), bytes.size(), gpu_.stream()));
    copies_.push_back(*tensor->describe());
    copies_.back().data = memories_.back().at(0);
    copies_.back().device = gpu_.where();
  }
  require(gpu_.device().synchronize(gpu_.stream()));
}

const tandem_tensor* DeviceCopies::of(const tandem_tensor* host) const {
  for (size_t n = 0; n < tensors_.size(); ++n) {
    if (tensors_[n]->describe() == host) return &copies_[n];
  }
  return host;
}

void DeviceCopies::fetch() {
  for (size_t n = 0; n < tensors_.size(); ++n) {
    const std::span<std::byte> bytes = tensors_[n]->storage();
    require(gpu_.device().copy_to_host(bytes.data(), memories_[n].at(0), bytes.size(), gpu_.stream()));
  }
  require(gpu_.device().synchronize(gpu_.stream()));
}

Repeated::Repeated(const std::string& flags, const Gpu& its_gpu)
    : Repeated(std::make_unique<Instance>(from_flags(kServed + flags)), its_gpu) {}

Repeated::Repeated(std::unique_ptr<Instance> its_instance, const Gpu& its_gpu)
    : gpu(its_gpu),
      instance(std::move(its_instance)),
      outputs(instance->outputs(TANDEM_FORWARD)),
      call(gpu, *instance, TANDEM_FORWARD, outputs) {
  call.allocate_workspace();
}

std::vector<std::byte> Repeated::run() {
  call.poison_outputs();
  call.forward(gpu.stream());
  return fetch(gpu.stream());
}

std::vector<std::byte> Repeated::fetch(gpu::Stream stream) {
  call.fetch(stream);
  std::vector<std::byte> bytes = bytes_of(outputs.out);
  const std::vector<std::byte> lse = bytes_of(outputs.lse);
  bytes.insert(bytes.end(), lse.begin(), lse.end());
  return bytes;
}

}  // namespace tandem::test

namespace {

// Tests of several GPUs, speed, graphs, streams, the size of a GPU's memory, and refusals of devices.
constexpr const char* kNotVirtual = "-KernelsDevices.*:KernelsGraph.*:KernelsRepeat.*:KernelsLarge.*:KernelsRefusal.*";

// Names tests without cases. Only the first part runs these tests.
constexpr const char* kWhole =
    ":KernelsExact.*:KernelsLargeStrides.*:KernelsPlacement.*:KernelsPoison.*:KernelsRecorded.*";

struct Flags {
  std::string device = "cuda:0";
  int schedules = 1;
  tandem::test::Part part;
  tandem::test::Passes passes = tandem::test::Passes::both;
};

// Returns false for unknown flags.
bool read_flags(int argc, char** argv, Flags* flags) {
  for (int n = 1; n < argc; n += 2) {
    const std::string flag = argv[n], value = n + 1 < argc ? argv[n + 1] : "";
    if (flag == "--device" && !value.empty()) {
      flags->device = value;
    } else if (flag == "--schedules" && std::atoi(value.c_str()) > 0) {
      flags->schedules = std::atoi(value.c_str());
    } else if (flag == "--part" && std::sscanf(value.c_str(), "%zu/%zu", &flags->part.index, &flags->part.count) == 2 &&
               flags->part.index < flags->part.count) {
    } else if (flag == "--passes" && (value == "both" || value == "backward")) {
      flags->passes = value == "both" ? tandem::test::Passes::both : tandem::test::Passes::backward;
    } else {
      std::fprintf(
          stderr,
          "kernels_test [--device cuda|cuda:N|vgpu:MODEL] [--schedules N] [--part I/N] [--passes both|backward] "
          "[--gtest_...]\n"
          "  --part I/N: this is process I of N that share the cases, from 0 on; each checks one "
          "case at a time\n"
          "  --passes backward: only gradients, of cases that have them; the reference computes the forward\n");
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  Flags flags;
  if (!read_flags(argc, argv, &flags)) return 2;
  if (!testing::GTEST_FLAG(list_tests)) {
    try {
      tandem::test::opened = tandem::test::open_gpus(flags.device, flags.schedules);
    } catch (const std::runtime_error& error) {
      std::printf("**** THE KERNELS ARE NOT TESTED: %s ****\n", error.what());
      return 77;
    }
    std::printf("%s\n", tandem_context_description(tandem::test::the_gpu()->context()));
    tandem::test::part = flags.part;
    tandem::test::passes = flags.passes;
    if (tandem::test::the_gpu()->is_virtual() && testing::GTEST_FLAG(filter) == "*")
      testing::GTEST_FLAG(filter) = std::string(kNotVirtual) + (flags.part.index > 0 ? kWhole : "");
  }
  const int result = RUN_ALL_TESTS();
  tandem::test::opened.clear();
  return result;
}
