// Tests the virtual GPU through gpu::Device, with kernels of a few instructions.
#include "vgpu/src/device.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <thread>

#include "gpu/virtual.h"

namespace tandem::vgpu {
namespace {

constexpr const char* kKernels = R"(
.version 8.0
.target sm_90a
.address_size 64

// to[i] = factor * from[i] for i < count.
.visible .entry scale(.param .u64 to, .param .f32 factor, .param .u64 from, .param .u32 count)
.maxntid 64, 1, 1
{
  .reg .pred %p1;
  .reg .b32 %r<5>;
  .reg .f32 %f<3>;
  .reg .b64 %rd<6>;
  ld.param.u64 %rd1, [to];
  ld.param.f32 %f1, [factor];
  ld.param.u64 %rd2, [from];
  ld.param.u32 %r1, [count];
  mov.u32 %r2, %tid.x;
  mov.u32 %r3, %ctaid.x;
  mov.u32 %r4, %ntid.x;
  mad.lo.s32 %r2, %r3, %r4, %r2;
  setp.ge.u32 %p1, %r2, %r1;
  @%p1 bra done;
  mul.wide.u32 %rd3, %r2, 4;
  add.s64 %rd4, %rd2, %rd3;
  ld.global.f32 %f2, [%rd4];
  mul.f32 %f2, %f2, %f1;
  add.s64 %rd5, %rd1, %rd3;
  st.global.f32 [%rd5], %f2;
done:
  ret;
}

.visible .entry keeps() {
  .local .align 4 .b8 stack[48];
  .shared .align 4 .b8 table[256];
  .reg .b32 %r1;
  mov.u32 %r1, 7;
  st.shared.u32 [table], %r1;
  st.local.u32 [stack], %r1;
  ret;
}
)";

constexpr int kCount = 100;

class DeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    open_with({.report = [this](const Outcome& o) { keep(o); }});
  }

  void open_with(Options options) {
    module.reset();
    device.reset();
    options.run.threads = 1;
    good(open("vgpu:h200", std::move(options), &device));
    good(device->load(std::as_bytes(std::span(kKernels, std::strlen(kKernels))), &module));
    good(module->find("scale", 0, &scale));
  }
  void keep(const Outcome& outcome) {
    findings.assign(outcome.findings.begin(), outcome.findings.end());
    text = text_of(outcome);
    ++launches;
  }
  static void good(const Status& status) { ASSERT_TRUE(status.ok()) << status.message; }
  static bool says(const Status& status, const std::string& part) {
    if (!status.ok() && status.message.find(part) != std::string::npos) return true;
    ADD_FAILURE() << "\"" << status.message << "\" does not say: " << part;
    return false;
  }

  float* floats(int count) {
    void* address = nullptr;
    good(device->allocate(static_cast<size_t>(count) * sizeof(float), &address));
    return static_cast<float*>(address);
  }
  float* numbers(int count) {
    std::vector<float> values(static_cast<size_t>(count));
    std::iota(values.begin(), values.end(), 1.0f);
    float* const to = floats(count);
    good(device->copy_to_device(to, values.data(), values.size() * sizeof(float), nullptr));
    return to;
  }
  Status launch(float* to, float factor, float* from, uint32_t count, std::span<const gpu::NamedBuffer> buffers = {}) {
    void* args[] = {&to, &factor, &from, &count};
    return device->launch(
        {.kernel = scale, .grid = {2}, .block = {64}, .cluster = {}, .args = args, .buffers = buffers});
  }

  std::unique_ptr<gpu::Device> device;
  std::unique_ptr<gpu::Module> module;
  gpu::Kernel scale = nullptr;
  std::vector<Finding> findings;  // findings of the last launch
  std::string text;
  int launches = 0;
};

TEST(VirtualGpus, HaveTheNamesOfRealOnes) {
  const struct {
    const char *name, *arch;
    int32_t sms;
  } models[] = {{"vgpu:h200", "sm_90a", 132},
                {"vgpu:h100", "sm_90a", 132},
                {"vgpu:b200", "sm_100a", 148},
                {"vgpu:b300", "sm_103a", 148}};
  for (const auto& model : models) {
    EXPECT_TRUE(gpu::is_virtual(model.name));
    std::unique_ptr<gpu::Device> device;
    ASSERT_TRUE(open(model.name, Options{}, &device).ok());
    const gpu::Properties& p = device->properties();
    EXPECT_EQ(p.opened_as, model.name);
    EXPECT_EQ(p.arch(), model.arch);
    EXPECT_EQ(p.image, gpu::Image::ptx);
    EXPECT_EQ(p.sm_count, model.sms);
    EXPECT_EQ(p.max_dynamic_smem_bytes, 232448);
    EXPECT_EQ(p.driver_version, 0);
    EXPECT_GT(p.memory_bytes, int64_t{70} << 30);
    EXPECT_NE(p.name.find("virtual"), std::string::npos);
  }
  EXPECT_FALSE(gpu::is_virtual("cuda:0"));
  EXPECT_FALSE(gpu::is_virtual("vgpux"));
  for (const char* name : {"vgpu:", "vgpu:h300", "vgpu:H200", "vgpu:h200 "}) {
    std::unique_ptr<gpu::Device> device;
    const Status status = open(name, Options{}, &device);
    EXPECT_EQ(status.code, TANDEM_INVALID_ARGUMENT) << name;
    EXPECT_NE(status.message.find("\"vgpu:h200\""), std::string::npos) << status.message;
  }
}

TEST_F(DeviceTest, MemoryKeepsWhatItIsGiven) {
  float* const a = numbers(kCount);
  float* const b = floats(kCount);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % 256, 0u);
  EXPECT_NE(b[0], b[0]) << "NaN until it is written";
  good(device->copy_on_device(b, a, kCount * sizeof(float), nullptr));
  std::vector<float> seen(kCount);
  good(device->copy_to_host(seen.data(), b, kCount * sizeof(float), nullptr));
  EXPECT_EQ(seen[99], 100.0f);
  good(device->fill(b + 50, 0, 50 * sizeof(float), nullptr));
  EXPECT_EQ(b[49], 50.0f);
  EXPECT_EQ(b[50], 0.0f);
  says(device->fill(b + 50, 0, 51 * sizeof(float), nullptr), "200 bytes from there on");
  says(device->copy_to_host(seen.data(), b + 1, kCount * sizeof(float), nullptr), "from (400 bytes) must end within");
  good(device->free(a));
  says(device->free(a), "that has not been freed");
  says(device->free(b + 1), "that has not been freed");
  good(device->free(nullptr));
  void* huge = nullptr;
  says(device->allocate(size_t{1} << 50, &huge), "left of the virtual GPU's memory");
  EXPECT_EQ(huge, nullptr);
}

TEST_F(DeviceTest, StreamsAndEventsHaveNothingToOrder) {
  gpu::Stream stream = nullptr;
  gpu::Event start = nullptr, stop = nullptr;
  bool capturing = true;
  float milliseconds = -1;
  good(device->create_stream(&stream));
  EXPECT_NE(stream, nullptr);
  good(device->is_capturing(stream, &capturing));
  EXPECT_FALSE(capturing);
  good(device->create_event(&start));
  good(device->create_event(&stop));
  good(device->record(start, stream));
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  good(device->record(stop, stream));
  good(device->wait(stream, stop));
  good(device->synchronize_event(stop));
  good(device->elapsed_ms(start, stop, &milliseconds));
  EXPECT_GE(milliseconds, 2.0f);
  good(device->synchronize(stream));
  good(device->destroy_event(start));
  good(device->destroy_event(stop));
  good(device->destroy_stream(stream));
}

TEST_F(DeviceTest, ModulesAreTextThatParses) {
  std::unique_ptr<gpu::Module> other;
  gpu::Kernel kernel = nullptr;
  const std::string cubin =
      "\x7f"
      "ELF and more";
  EXPECT_FALSE(device->load(std::as_bytes(std::span(cubin)), &other).ok());
  says(module->find("nothing", 0, &kernel), "nothing");
  good(module->find("keeps", 232448 - 256, &kernel));
  says(module->find("keeps", 232448 - 255, &kernel), "must be at most the 232192");
  gpu::KernelAttributes attributes;
  good(module->attributes(kernel, &attributes));
  EXPECT_EQ(attributes.static_smem_bytes, 256);
  EXPECT_EQ(attributes.local_bytes, 48);
  EXPECT_EQ(attributes.max_threads, 1024);
  good(module->attributes(scale, &attributes));
  EXPECT_EQ(attributes.max_threads, 64);
  EXPECT_GT(attributes.registers, 3);
}

TEST_F(DeviceTest, KernelsGetTheirParameters) {
  float* const from = numbers(kCount);
  float* const to = floats(kCount);
  good(launch(to, 0.5f, from, kCount));
  EXPECT_EQ(launches, 1);
  EXPECT_TRUE(findings.empty()) << text;
  for (int i = 0; i < kCount; ++i) ASSERT_EQ(to[i], 0.5f * static_cast<float>(i + 1));
}

TEST_F(DeviceTest, WhatLiesOutsideOfNamedBuffersIsAFinding) {
  ASSERT_TRUE(device->wants_buffers());
  float* const from = numbers(kCount);
  float* const to = numbers(kCount);
  gpu::NamedBuffer buffers[] = {{"from", from, kCount * sizeof(float)}, {"to", to, 90 * sizeof(float), true, false}};
  const Status status = launch(to, 2, from, kCount, buffers);
  EXPECT_EQ(status.code, TANDEM_DEVICE_ERROR);
  says(status, "kernel \"scale\" on vgpu:h200: out-of-bounds");
  says(status, "TANDEM_VGPU_SCHEDULE=0");
  EXPECT_EQ(status.message.find('\n'), std::string::npos) << "a sentence";
  ASSERT_EQ(findings.size(), 1u) << text;
  EXPECT_EQ(findings[0].rule, Rule::out_of_bounds);
  EXPECT_NE(text.find("PTX line 29"), std::string::npos) << text;
  EXPECT_EQ(to[89], 180.0f);
  EXPECT_EQ(to[90], 91.0f) << "nothing was written there";

  buffers[1].bytes = kCount * sizeof(float);
  good(launch(to, 2, from, kCount, buffers));
  buffers[1].writable = false;
  says(launch(to, 2, from, kCount, buffers), "only to be read");
}

TEST_F(DeviceTest, UnwrittenMemoryIsAFinding) {
  float* const from = floats(kCount);
  float* const to = floats(kCount);
  says(launch(to, 2, from, kCount), "uninitialised");
  good(device->fill(from, 0, kCount * sizeof(float), nullptr));
  good(launch(to, 2, from, kCount));
  good(launch(from, 2, to, kCount));  // a kernel has written the memory
  const gpu::NamedBuffer buffers[] = {{"from", from, kCount * sizeof(float), false, false},
                                      {"to", to, kCount * sizeof(float), true, false}};
  says(launch(to, 2, from, kCount, buffers), "from");
}

TEST_F(DeviceTest, WithoutNamesAllAllocationsMayBeTouched) {
  float* const from = numbers(kCount);
  float* const to = floats(kCount - 1);
  says(launch(to, 2, from, kCount), "out-of-bounds");
  good(launch(to, 2, from, kCount - 1));
  good(device->free(from));
  EXPECT_FALSE(launch(to, 2, from, 1).ok()) << "freed";
}

TEST_F(DeviceTest, TheCheckerCanBeOff) {
  open_with({.check = false});
  EXPECT_FALSE(device->wants_buffers());
  std::vector<float> from(kCount, 3.0f), to(kCount);
  good(launch(to.data(), 2, from.data(), kCount));
  EXPECT_EQ(to[99], 6.0f);
}

// The store stores the loaded value, so that both need the same permissions.
constexpr const char* kLoadsAndStores = R"(
.version 9.0
.target sm_100a
.address_size 64
.shared .align 4 .b32 base;
.visible .entry kernel()
{
  .reg .b32 r<4>;
  mov.u32 r1, base;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [r1], 32;
  bar.sync 0;
  ld.shared.u32 r1, [base];
  tcgen05.st.sync.aligned.32x32b.x1.b32 [r1], {r1};
  tcgen05.wait::st.sync.aligned;
  tcgen05.ld.sync.aligned.32x32b.x1.b32 {r2}, [r1];
  add.u32 r3, r2, 1;
  tcgen05.st.sync.aligned.32x32b.x1.b32 [r1], {r3};
  tcgen05.wait::st.sync.aligned;
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 r1, 32;
  ret;
}
)";

TEST_F(DeviceTest, WarningsFailNothing) {
  std::string used = kLoadsAndStores;
  std::string unused = used;
  unused.replace(unused.find("add.u32 r3, r2, 1"), std::strlen("add.u32 r3, r2, 1"), "mov.u32 r3, 1");
  for (const bool uses : {true, false}) {
    const std::string& text_of_it = uses ? used : unused;
    module.reset();
    good(open("vgpu:b200", Options{.report = [this](const Outcome& o) { keep(o); }}, &device));
    good(device->load(std::as_bytes(std::span(text_of_it)), &module));
    gpu::Kernel kernel = nullptr;
    good(module->find("kernel", 0, &kernel));
    const Status status =
        device->launch({.kernel = kernel, .grid = {1}, .block = {32}, .cluster = {}, .args = nullptr, .buffers = {}});
    ASSERT_EQ(findings.size(), 1u) << text;
    EXPECT_EQ(findings[0].rule, uses ? Rule::pending_load : Rule::missing_wait);
    EXPECT_EQ(status.ok(), uses) << status.message;
  }
}

TEST_F(DeviceTest, AWholeWarpMayInitialiseABarrier) {
  const std::string begin = R"(
.version 9.0
.target sm_90a
.address_size 64
.shared .align 8 .b64 bar;
.visible .entry kernel()
{
  .reg .b32 at, count;
  mov.u32 at, bar;
  mov.u32 count, %laneid;
  )";
  const std::string end = "  mbarrier.init.shared::cta.b64 [at], count;\n  ret;\n}\n";
  for (const bool alike : {true, false}) {
    const std::string kernel_text = begin + (alike ? "mov.u32 count, 3;\n" : "add.u32 count, count, 3;\n") + end;
    good(device->load(std::as_bytes(std::span(kernel_text)), &module));
    gpu::Kernel kernel = nullptr;
    good(module->find("kernel", 0, &kernel));
    const Status status =
        device->launch({.kernel = kernel, .grid = {1}, .block = {32}, .cluster = {}, .args = nullptr, .buffers = {}});
    EXPECT_EQ(status.ok(), alike) << status.message;
    if (!alike) {
      says(status, "invalid-barrier");
    }
  }
}

class Count : public Observer {
 public:
  bool wants_instructions() const override { return true; }
  void executes(const Actor&) override { ++executed; }
  int executed = 0;
};

TEST_F(DeviceTest, OthersMayObserve) {
  const auto count = std::make_shared<Count>();
  uint32_t blocks = 0;
  open_with({.observe = [&](const LaunchDescription& launch, const Model& model) {
    blocks = launch.grid.x;
    EXPECT_EQ(model.name, "h200");
    return count;
  }});
  std::vector<float> from(kCount, 3.0f), to(kCount);
  good(launch(to.data(), 2, from.data(), kCount));
  EXPECT_EQ(to[99], 6.0f);
  EXPECT_EQ(blocks, 2u);
  EXPECT_GE(count->executed, 4 * 16) << "four warps";
}

TEST_F(DeviceTest, ManyThreadsLaunchAtOnce) {
  constexpr int kThreads = 8;
  open_with({.report = [](const Outcome&) {}});
  std::vector<std::string> wrong(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::vector<float> from(kCount, static_cast<float>(t)), to(kCount);
      const gpu::NamedBuffer buffers[] = {{"from", from.data(), kCount * sizeof(float)},
                                          {"to", to.data(), kCount * sizeof(float), true, false}};
      for (int n = 0; n < 20; ++n) {
        const Status status = launch(to.data(), 2, from.data(), kCount, buffers);
        if (!status.ok()) wrong[static_cast<size_t>(t)] = status.message;
      }
      if (to[99] != 2.0f * static_cast<float>(t)) wrong[static_cast<size_t>(t)] = "the result";
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& one : wrong) EXPECT_EQ(one, "");
}

}  // namespace
}  // namespace tandem::vgpu
