// Tests gpu::Device with a fake CUDA driver: its calls, the current context during them, and the messages of its
// errors.
#include "gpu/driver/driver.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "unit/gpu/fake_cuda.h"

namespace tandem::test {
namespace {

using gpu::Device;
using gpu::Kernel;
using gpu::Module;

constexpr std::byte kCubin[] = {std::byte{0x7f}, std::byte{'E'}, std::byte{'L'}, std::byte{'F'}};

class Driver : public testing::Test {
 protected:
  void SetUp() override {
    void* library = dlopen(FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library, nullptr) << dlerror();
    fake = reinterpret_cast<FakeCuda* (*)()>(dlsym(library, "fake_cuda_state"))();
    current = reinterpret_cast<int (*)()>(dlsym(library, "fake_cuda_current"));
    make_current = reinterpret_cast<void (*)(int)>(dlsym(library, "fake_cuda_make_current"));
    fake->devices = 2;
    fake->init_result = 0;
    fake->capture_state = 0;
    fake->encoded = 0;
    fake->missing = fake->failing = "";
    make_current(0);
  }
  void TearDown() override {
    EXPECT_EQ(current(), 0) << "a call left a context current";
    EXPECT_EQ(fake->pushes, fake->pops);
    EXPECT_EQ(fake->wrong_context, 0);
    EXPECT_EQ(fake->retained[0], 0);
    EXPECT_EQ(fake->retained[1], 0);
    EXPECT_EQ(fake->allocated, 0);
  }

  std::unique_ptr<Device> open(const char* name = "cuda") {
    std::unique_ptr<Device> device;
    const Status status = gpu::cuda::open(name, &device, FAKE_CUDA);
    EXPECT_TRUE(status.ok()) << status.message;
    return device;
  }
  void refuses(const char* name, tandem_status code, const char* fragment, const char* library = FAKE_CUDA) {
    std::unique_ptr<Device> device;
    const Status status = gpu::cuda::open(name, &device, library);
    EXPECT_EQ(status.code, code) << status.message;
    EXPECT_NE(status.message.find(fragment), std::string::npos) << status.message;
    EXPECT_EQ(device, nullptr);
  }
  Kernel kernel_of(Device& device, std::unique_ptr<Module>* module) {
    Kernel kernel = nullptr;
    EXPECT_TRUE(device.load(kCubin, module).ok());
    EXPECT_TRUE((*module)->find("known", 200000, &kernel).ok());
    return kernel;
  }

  FakeCuda* fake = nullptr;
  int (*current)() = nullptr;
  void (*make_current)(int) = nullptr;
};

void fails(const Status& status, const std::string& sentence) {
  EXPECT_EQ(status.code, TANDEM_DEVICE_ERROR);
  EXPECT_EQ(status.message, sentence);
}

TEST_F(Driver, KnowsItsNames) {
  EXPECT_TRUE(gpu::cuda::is_cuda("cuda"));
  EXPECT_TRUE(gpu::cuda::is_cuda("cuda:x"));
  EXPECT_FALSE(gpu::cuda::is_cuda("cudax"));
  EXPECT_FALSE(gpu::cuda::is_cuda("cpu"));
  for (const char* name : {"cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda: 1", "cuda:99999999999"}) {
    refuses(name, TANDEM_INVALID_ARGUMENT, "must be \"cuda\" or \"cuda:N\"");
  }
}

TEST_F(Driver, AbsentDriverIsASentence) {
  refuses("cuda", TANDEM_UNSUPPORTED, "/nowhere/libcuda.so.1 cannot be loaded", "/nowhere/libcuda.so.1");
  refuses("cuda", TANDEM_UNSUPPORTED, "CUDA 12.0 or newer", "libm.so.6");
  fake->missing = "cuLaunchKernelEx";
  refuses("cuda", TANDEM_UNSUPPORTED, "lacks the function cuLaunchKernelEx");
}

TEST_F(Driver, NoUsableDeviceIsASentence) {
  fake->init_result = gpu::cuda::kNoDevice;
  refuses("cuda", TANDEM_UNSUPPORTED, "the driver sees none");
  fake->init_result = gpu::cuda::kStubLibrary;
  refuses("cuda", TANDEM_UNSUPPORTED, "stub of libcuda.so.1");
  fake->init_result = 803;
  refuses("cuda", TANDEM_DEVICE_ERROR, "starting NVIDIA's driver (cuInit) failed: CUDA error 803");
  fake->init_result = 0;
  refuses("cuda:2", TANDEM_UNSUPPORTED, "device \"cuda:2\" must be below \"cuda:2\": the driver sees 2 GPUs");
}

TEST_F(Driver, RequestsTheInterfaceOfOneVersion) {
  (void)open();
  EXPECT_EQ(fake->asked_version, 12000);
}

TEST_F(Driver, ReadsProperties) {
  const auto device = open("cuda:1");
  const gpu::Properties& p = device->properties();
  EXPECT_EQ(p.name, "Fake 1");
  EXPECT_EQ(p.compute_major, 1075);
  EXPECT_EQ(p.compute_minor, 1076);
  EXPECT_EQ(p.sm_count, 1016);
  EXPECT_EQ(p.clock_khz, 1013);
  EXPECT_EQ(p.memory_clock_khz, 1036);
  EXPECT_EQ(p.memory_bus_bits, 1037);
  EXPECT_EQ(p.l2_bytes, 1038);
  EXPECT_EQ(p.max_dynamic_smem_bytes, 1097);
  EXPECT_EQ(p.driver_version, 12080);
  EXPECT_EQ(p.memory_bytes, int64_t{80} << 30);
}

TEST_F(Driver, MovesMemory) {
  const auto device = open();
  void *a = nullptr, *b = nullptr, *pinned = nullptr;
  ASSERT_TRUE(device->allocate(64, &a).ok());
  ASSERT_TRUE(device->allocate(64, &b).ok());
  ASSERT_TRUE(device->allocate_pinned(64, &pinned).ok());
  const std::vector<char> sent(64, 'x');
  EXPECT_TRUE(device->copy_to_device(a, sent.data(), 64, nullptr).ok());
  EXPECT_TRUE(device->fill(a, 'y', 8, nullptr).ok());
  EXPECT_TRUE(device->copy_on_device(b, a, 64, nullptr).ok());
  EXPECT_TRUE(device->copy_to_host(pinned, b, 64, nullptr).ok());
  std::vector<char> expected(64, 'x');
  std::fill_n(expected.begin(), 8, 'y');
  EXPECT_EQ(std::memcmp(pinned, expected.data(), 64), 0);
  EXPECT_TRUE(device->free(a).ok());
  EXPECT_TRUE(device->free(b).ok());
  EXPECT_TRUE(device->free_pinned(pinned).ok());

  fake->failing = "cuMemAlloc";
  fake->failure = gpu::cuda::kOutOfMemory;
  fails(device->allocate(size_t{1} << 40, &a),
        "allocating device memory failed: out of memory (CUDA_ERROR_OUT_OF_MEMORY): 1099511627776 bytes");
  EXPECT_EQ(a, nullptr);
}

TEST_F(Driver, StreamsAndEvents) {
  const auto device = open();
  gpu::Stream stream = nullptr;
  gpu::Event start = nullptr, stop = nullptr;
  float milliseconds = 0;
  bool capturing = true;
  ASSERT_TRUE(device->create_stream(&stream).ok());
  ASSERT_TRUE(device->create_event(&start).ok());
  ASSERT_TRUE(device->create_event(&stop).ok());
  EXPECT_TRUE(device->record(start, stream).ok());
  EXPECT_TRUE(device->record(stop, stream).ok());
  EXPECT_TRUE(device->wait(stream, stop).ok());
  EXPECT_TRUE(device->synchronize_event(stop).ok());
  EXPECT_TRUE(device->synchronize(stream).ok());
  EXPECT_TRUE(device->elapsed_ms(start, stop, &milliseconds).ok());
  EXPECT_EQ(milliseconds, 1.5f);
  EXPECT_TRUE(device->is_capturing(stream, &capturing).ok());
  EXPECT_FALSE(capturing);
  for (const int state : {1, 2}) {
    fake->capture_state = state;
    EXPECT_TRUE(device->is_capturing(stream, &capturing).ok());
    EXPECT_TRUE(capturing);
  }
  EXPECT_TRUE(device->destroy_event(start).ok());
  EXPECT_TRUE(device->destroy_event(stop).ok());
  EXPECT_TRUE(device->destroy_stream(stream).ok());
  fake->failing = "cuStreamSynchronize";
  fake->failure = 719;
  fails(device->synchronize(nullptr),
        "waiting for a stream failed: unspecified launch failure (CUDA_ERROR_LAUNCH_FAILED)");
}

TEST_F(Driver, ModulesAndKernels) {
  const auto device = open();
  std::unique_ptr<Module> module;
  const std::byte text[] = {std::byte{'P'}, std::byte{'T'}, std::byte{'X'}, std::byte{'.'}};
  fails(
      device->load(text, &module),
      "loading kernels failed: CUDA error 200: the driver, for CUDA 12.8, may be older than the compiler; update it or "
      "install an NVRTC of its version");
  const Kernel known = kernel_of(*device, &module);
  Kernel kernel = nullptr;
  fails(
      module->find("unknown", 0, &kernel),
      "looking up or preparing a kernel failed: CUDA error 500: kernel \"unknown\", 0 bytes of dynamic shared memory");
  fails(module->find("known", 1 << 20, &kernel),
        "looking up or preparing a kernel failed: CUDA error 1: kernel \"known\", 1048576 bytes of dynamic shared "
        "memory");
  EXPECT_EQ(kernel, nullptr);
  gpu::KernelAttributes attributes;
  EXPECT_TRUE(module->attributes(known, &attributes).ok());
  EXPECT_EQ(attributes.registers, 40);
  EXPECT_EQ(attributes.local_bytes, 30);
  EXPECT_EQ(attributes.static_smem_bytes, 10);
  EXPECT_EQ(attributes.max_threads, 0);
}

TEST_F(Driver, AModuleMayOutliveItsDevice) {
  auto device = open();
  std::unique_ptr<Module> module;
  (void)kernel_of(*device, &module);
  device.reset();
  EXPECT_EQ(fake->retained[0], 1);
  const int unloads = fake->unloads;
  module.reset();
  EXPECT_EQ(fake->unloads, unloads + 1);
}

TEST_F(Driver, LaunchesWithAttributes) {
  const auto device = open();
  std::unique_ptr<Module> module;
  int argument = 0;
  void* args[] = {&argument};
  char stream;
  gpu::Launch launch;
  launch.kernel = kernel_of(*device, &module);
  launch.grid = {132, 2, 3};
  launch.block = {384};
  launch.dynamic_smem_bytes = 200000;
  launch.args = args;
  launch.stream = &stream;
  ASSERT_TRUE(device->launch(launch).ok());
  EXPECT_EQ(fake->config.grid_x, 132u);
  EXPECT_EQ(fake->config.grid_y, 2u);
  EXPECT_EQ(fake->config.grid_z, 3u);
  EXPECT_EQ(fake->config.block_x, 384u);
  EXPECT_EQ(fake->config.block_z, 1u);
  EXPECT_EQ(fake->config.shared_bytes, 200000u);
  EXPECT_EQ(static_cast<void*>(fake->config.stream), &stream);
  EXPECT_EQ(fake->config.attribute_count, 0u);
  EXPECT_EQ(fake->first_argument, &argument);

  launch.cluster = {2};
  launch.overlap_previous = true;
  ASSERT_TRUE(device->launch(launch).ok());
  ASSERT_EQ(fake->config.attribute_count, 2u);
  EXPECT_EQ(fake->attributes[0].id, gpu::cuda::kClusterDimension);
  EXPECT_EQ(fake->attributes[0].value.cluster.x, 2u);
  EXPECT_EQ(fake->attributes[0].value.cluster.y, 1u);
  EXPECT_EQ(fake->attributes[1].id, gpu::cuda::kProgrammaticStreamSerialization);
  EXPECT_EQ(fake->attributes[1].value.programmatic_stream_serialization, 1);

  fake->failing = "cuLaunchKernelEx";
  fake->failure = 719;
  fails(
      device->launch(launch),
      "launching a kernel failed: unspecified launch failure (CUDA_ERROR_LAUNCH_FAILED): grid 132x2x3, block 384x1x1, "
      "cluster 2x1x1, 200000 bytes of dynamic shared memory");
}

TEST_F(Driver, EncodesTensorMaps) {
  const auto device = open();
  gpu::TensorMapSpec spec;
  spec.address = reinterpret_cast<void*>(uintptr_t{0x1008});
  spec.type = gpu::TensorType::bf16;
  spec.rank = 3;
  const uint64_t dims[] = {128, 16, 4096}, byte_strides[] = {2, 256, 4096};
  const uint32_t box[] = {64, 1, 128};
  std::copy_n(dims, 3, spec.dims);
  std::copy_n(byte_strides, 3, spec.byte_strides);
  std::copy_n(box, 3, spec.box);
  spec.swizzle = gpu::Swizzle::b128;
  spec.l2_promotion = gpu::L2Promotion::b256;
  spec.oob_fill = gpu::OobFill::nan;
  gpu::TensorMap map{};
  ASSERT_TRUE(device->encode(spec, &map).ok());
  EXPECT_EQ(map.bytes[127], 7);
  EXPECT_EQ(fake->map_type, 9);
  EXPECT_EQ(fake->map_rank, 3u);
  EXPECT_EQ(fake->map_swizzle, 3);
  EXPECT_EQ(fake->map_promotion, 3);
  EXPECT_EQ(fake->map_fill, 1);
  EXPECT_TRUE(std::equal(dims, dims + 3, fake->map_dims));
  EXPECT_TRUE(std::equal(byte_strides + 1, byte_strides + 3, fake->map_byte_strides));
  EXPECT_TRUE(std::equal(box, box + 3, fake->map_box));
  fake->failing = "cuTensorMapEncodeTiled";
  fake->failure = 1;
  spec.address = reinterpret_cast<void*>(uintptr_t{0x2008});  // the map of 0x1008 is cached
  fails(device->encode(spec, &map),
        "encoding a tensor map failed: CUDA error 1: type 9, rank 3, swizzle 3, address modulo 16 8; dimension 0: size "
        "128, box 64; dimension 1: size 16, box 1, byte stride 256; dimension 2: size 4096, box 128, byte stride 4096");
}

gpu::TensorMapSpec spec_at(uint64_t address, uint64_t rows) {
  gpu::TensorMapSpec spec;
  spec.address = reinterpret_cast<void*>(address);
  spec.rank = 3;
  std::copy_n(std::array{uint64_t{128}, uint64_t{8}, rows}.begin(), 3, spec.dims);
  std::copy_n(std::array{uint64_t{0}, uint64_t{256}, uint64_t{2048}}.begin(), 3, spec.byte_strides);
  std::copy_n(std::array{64u, 1u, 128u}.begin(), 3, spec.box);
  return spec;
}

TEST_F(Driver, EncodesATensorMapOnce) {
  const auto device = open();
  const gpu::TensorMapSpec spec = spec_at(0x1000, 100);
  gpu::TensorMap first{}, again{};
  ASSERT_TRUE(device->encode(spec, &first).ok());
  ASSERT_TRUE(device->encode(spec, &again).ok());
  EXPECT_EQ(fake->encoded, 1);
  EXPECT_EQ(std::memcmp(&first, &again, sizeof first), 0);
  std::thread([&] { EXPECT_TRUE(device->encode(spec, &again).ok()); }).join();
  EXPECT_EQ(fake->encoded, 2);  // each thread has a separate cache
  const auto other = open("cuda:1"), reopened = open();
  ASSERT_TRUE(other->encode(spec, &again).ok());
  ASSERT_TRUE(reopened->encode(spec, &again).ok());
  EXPECT_EQ(fake->encoded, 4);  // each device has a separate cache, too
}

TEST_F(Driver, EncodesATensorMapThatDiffersInAnything) {
  const auto device = open();
  const gpu::TensorMapSpec spec = spec_at(0x1000, 100);
  std::vector<gpu::TensorMapSpec> others;
  const auto differs = [&](const std::function<void(gpu::TensorMapSpec&)>& change) {
    change(others.emplace_back(spec));
  };
  differs([](auto& s) { s.address = reinterpret_cast<void*>(uintptr_t{0x1010}); });
  differs([](auto& s) { s.type = gpu::TensorType::f16; });
  differs([](auto& s) { s.rank = 4; });
  for (int n = 0; n < 3; ++n) {
    differs([n](auto& s) { ++s.dims[n]; });
    differs([n](auto& s) { s.byte_strides[n] += 16; });
    differs([n](auto& s) { ++s.box[n]; });
    differs([n](auto& s) { ++s.element_strides[n]; });
  }
  differs([](auto& s) { s.swizzle = gpu::Swizzle::b64; });
  differs([](auto& s) { s.l2_promotion = gpu::L2Promotion::b128; });
  differs([](auto& s) { s.oob_fill = gpu::OobFill::nan; });
  gpu::TensorMap map{};
  for (const gpu::TensorMapSpec& other : others) {
    ASSERT_TRUE(device->encode(spec, &map).ok());
    const int before = fake->encoded;
    ASSERT_TRUE(device->encode(other, &map).ok());
    EXPECT_EQ(fake->encoded, before + 1) << &other - others.data();
  }
}

TEST_F(Driver, NeverMistakesOneTensorMapForAnother) {
  const auto device = open();
  std::mt19937 random(7);
  for (int n = 0; n < 20000; ++n) {
    const uint64_t address = 0x1000 + 16 * (random() % 20), rows = 1 + random() % 20;
    gpu::TensorMap map{};
    ASSERT_TRUE(device->encode(spec_at(address, rows), &map).ok());
    uint64_t words[2];
    std::memcpy(words, &map, sizeof words);
    ASSERT_EQ(words[0], address);
    ASSERT_EQ(words[1], rows);
  }
  EXPECT_LT(fake->encoded, 20000);  // some maps were still cached
}

TEST_F(Driver, AFailedTensorMapIsNotKept) {
  const auto device = open();
  gpu::TensorMap map{};
  fake->failing = "cuTensorMapEncodeTiled";
  fake->failure = 1;
  EXPECT_FALSE(device->encode(spec_at(0x1000, 100), &map).ok());
  EXPECT_FALSE(device->encode(spec_at(0x1000, 100), &map).ok());
  fake->failing = "";
  EXPECT_TRUE(device->encode(spec_at(0x1000, 100), &map).ok());
  EXPECT_EQ(fake->encoded, 3);
}

TEST_F(Driver, LeavesTheCallersContextAlone) {
  const auto device = open("cuda:1");
  std::unique_ptr<Module> module;
  gpu::Launch launch;
  launch.kernel = kernel_of(*device, &module);

  make_current(1);  // the context of another device
  const int pushes = fake->pushes;
  EXPECT_TRUE(device->launch(launch).ok());
  EXPECT_EQ(current(), 1);
  EXPECT_EQ(fake->pushes, pushes + 1);

  make_current(2);  // the current context already fits
  EXPECT_TRUE(device->launch(launch).ok());
  EXPECT_EQ(current(), 2);
  EXPECT_EQ(fake->pushes, pushes + 1);
  make_current(0);
}

TEST_F(Driver, ManyThreadsOnTwoDevices) {
  constexpr int threads = 8, calls = 500;
  const std::unique_ptr<Device> devices[] = {open("cuda:0"), open("cuda:1")};
  std::unique_ptr<Module> modules[2];
  const Kernel kernels[] = {kernel_of(*devices[0], &modules[0]), kernel_of(*devices[1], &modules[1])};
  const int before[] = {fake->launches[0], fake->launches[1]};
  std::vector<std::thread> running;
  for (int t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      make_current(t % 3);
      for (int i = 0; i < calls; ++i) {
        gpu::Launch launch;
        launch.kernel = kernels[(t + i) % 2];
        EXPECT_TRUE(devices[(t + i) % 2]->launch(launch).ok());
        if (i % 100 == 0) (void)open();
      }
      EXPECT_EQ(current(), t % 3);
    });
  }
  for (std::thread& thread : running) thread.join();
  EXPECT_EQ(fake->launches[0], before[0] + threads * calls / 2);
  EXPECT_EQ(fake->launches[1], before[1] + threads * calls / 2);
}

}  // namespace
}  // namespace tandem::test
