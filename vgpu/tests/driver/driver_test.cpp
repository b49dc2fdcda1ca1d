// Tests the library that replaces the CUDA driver: loaded by its path, and by programs under `tandem vgpu exec`.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/text.h"
#include "vgpu/src/driver/cuda.h"

namespace tandem::vgpu::driver {
namespace {

constexpr const char* kScale = R"(
.version 8.0
.target sm_90a
.address_size 64
.visible .global .align 4 .f32 factor = 0f40000000;
.visible .entry scale(.param .u64 to, .param .u32 count)
{
  .reg .pred %p<2>;
  .reg .b32 %r<6>;
  .reg .b64 %rd<5>;
  .reg .f32 %f<4>;
  ld.param.u64 %rd1, [to];
  ld.param.u32 %r1, [count];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.u32 %r5, %r2, %r3, %r4;
  setp.ge.u32 %p1, %r5, %r1;
  @%p1 bra DONE;
  mul.wide.u32 %rd2, %r5, 4;
  add.u64 %rd3, %rd1, %rd2;
  ld.global.f32 %f1, [%rd3];
  ld.global.f32 %f2, [factor];
  mul.f32 %f3, %f1, %f2;
  st.global.f32 [%rd3], %f3;
DONE:
  ret;
}
)";

// A function of the library, called with the arguments' types.
template <class... Parameters>
CUresult call(const char* name, Parameters... parameters) {
  static void* const library = dlopen(VIRTUAL_CUDA, RTLD_NOW | RTLD_LOCAL);
  auto* const function = library ? reinterpret_cast<CUresult (*)(Parameters...)>(dlsym(library, name)) : nullptr;
  if (function == nullptr) ADD_FAILURE() << name << ": " << dlerror();
  return function ? function(parameters...) : kUnknown;
}

class Driver : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(call("cuInit", 0u), kSuccess);
    ASSERT_EQ(call("cuDevicePrimaryCtxRetain", &context_, 0), kSuccess);
    ASSERT_EQ(call("cuCtxPushCurrent_v2", context_), kSuccess);
  }
  void TearDown() override {
    void* popped = nullptr;
    EXPECT_EQ(call("cuCtxPopCurrent_v2", &popped), kSuccess);
    EXPECT_EQ(popped, context_);
    EXPECT_EQ(call("cuDevicePrimaryCtxRelease_v2", 0), kSuccess);
  }

  void* load(const void* image) {
    void* module = nullptr;
    EXPECT_EQ(call("cuModuleLoadData", &module, image), kSuccess);
    return module;
  }
  void* kernel_of(void* module) {
    void* kernel = nullptr;
    EXPECT_EQ(call("cuModuleGetFunction", &kernel, module, "scale"), kSuccess);
    return kernel;
  }
  CUresult launch(void* kernel, uint64_t to, uint32_t count, unsigned threads = 64) {
    void* parameters[] = {&to, &count};
    return call("cuLaunchKernel", kernel, (count + threads - 1) / threads, 1u, 1u, threads, 1u, 1u, 0u,
                static_cast<void*>(nullptr), &parameters[0], static_cast<void**>(nullptr));
  }

  void* context_ = nullptr;
};

TEST_F(Driver, RunsAKernel) {
  void* const module = load(kScale);
  std::vector<float> numbers(100, 3.0f);
  uint64_t at = 0;
  ASSERT_EQ(call("cuMemAlloc_v2", &at, size_t{400}), kSuccess);
  ASSERT_EQ(call("cuMemcpyHtoDAsync_v2", at, static_cast<const void*>(numbers.data()), size_t{400},
                 static_cast<void*>(nullptr)),
            kSuccess);
  ASSERT_EQ(launch(kernel_of(module), at, 100), kSuccess);
  ASSERT_EQ(call("cuMemcpyDtoH_v2", static_cast<void*>(numbers.data()), at, size_t{400}), kSuccess);
  for (const float x : numbers) EXPECT_EQ(x, 6.0f);

  // Reads a variable of the module, and passes the launch's parameters as one block.
  uint64_t factor_at = 0;
  size_t bytes = 0;
  ASSERT_EQ(call("cuModuleGetGlobal_v2", &factor_at, &bytes, module, "factor"), kSuccess);
  EXPECT_EQ(bytes, sizeof(float));
  const float ten = 10;
  ASSERT_EQ(call("cuMemcpyHtoD_v2", factor_at, static_cast<const void*>(&ten), sizeof ten), kSuccess);
  struct {
    uint64_t to;
    uint32_t count;
  } block{at, 100};
  size_t block_bytes = sizeof block;
  void* extra[] = {reinterpret_cast<void*>(1), &block, reinterpret_cast<void*>(2), &block_bytes, nullptr};
  ASSERT_EQ(call("cuLaunchKernel", kernel_of(module), 2u, 1u, 1u, 64u, 1u, 1u, 0u, static_cast<void*>(nullptr),
                 static_cast<void**>(nullptr), &extra[0]),
            kSuccess);
  ASSERT_EQ(call("cuMemcpyDtoH_v2", static_cast<void*>(numbers.data()), at, size_t{400}), kSuccess);
  for (const float x : numbers) EXPECT_EQ(x, 60.0f);
  EXPECT_EQ(call("cuMemFree_v2", at), kSuccess);
  EXPECT_EQ(call("cuMemFree_v2", at), kInvalidValue);
  EXPECT_EQ(call("cuModuleUnload", module), kSuccess);
  EXPECT_EQ(call("cuModuleUnload", module), kInvalidHandle);
}

TEST_F(Driver, RefusesWhatTheDriverRefuses) {
  void* const module = load(kScale);
  void *kernel = kernel_of(module), *other = nullptr;
  EXPECT_EQ(call("cuModuleGetFunction", &other, module, "absent"), kNotFound);
  EXPECT_EQ(call("cuModuleLoadData", &other, static_cast<const void*>("no PTX")), kInvalidPtx);
  EXPECT_EQ(call("cuModuleLoadData", &other, static_cast<const void*>("\177ELF\2\1\1")), kNoBinaryForGpu);
  EXPECT_EQ(launch(kernel, 0, 100, 2048), kInvalidValue);
  void* parameters[2] = {};
  const auto with_shared = [&](unsigned bytes) {
    return call("cuLaunchKernel", kernel, 0u, 1u, 1u, 64u, 1u, 1u, bytes, static_cast<void*>(nullptr), &parameters[0],
                static_cast<void**>(nullptr));
  };
  EXPECT_EQ(with_shared(0), kInvalidValue);  // no blocks
  EXPECT_EQ(call("cuFuncSetAttribute", kernel, 8, 300000), kInvalidValue);
  EXPECT_EQ(call("cuFuncSetAttribute", kernel, 8, 200000), kSuccess);
  int value = 0;
  EXPECT_EQ(call("cuFuncGetAttribute", &value, 8, kernel), kSuccess);
  EXPECT_EQ(value, 200000);
  EXPECT_EQ(call("cuMemcpyHtoD_v2", uint64_t{0}, static_cast<const void*>(&value), size_t{4}), kInvalidValue);
  EXPECT_EQ(call("cuGraphClone", &other, other), kNotSupported);
  EXPECT_EQ(call("cuModuleUnload", module), kSuccess);
}

TEST_F(Driver, StreamsAndEventsAreInOrder) {
  void *stream = nullptr, *begin = nullptr, *end = nullptr;
  ASSERT_EQ(call("cuStreamCreate", &stream, 1u), kSuccess);
  ASSERT_EQ(call("cuEventCreate", &begin, 0u), kSuccess);
  ASSERT_EQ(call("cuEventCreate", &end, 0u), kSuccess);
  float milliseconds = -1;
  EXPECT_EQ(call("cuEventElapsedTime", &milliseconds, begin, end), kInvalidHandle);  // not recorded
  EXPECT_EQ(call("cuEventRecord", begin, stream), kSuccess);
  EXPECT_EQ(call("cuEventRecord", end, stream), kSuccess);
  EXPECT_EQ(call("cuStreamWaitEvent", stream, end, 0u), kSuccess);
  EXPECT_EQ(call("cuEventElapsedTime", &milliseconds, begin, end), kSuccess);
  EXPECT_GE(milliseconds, 0);
  EXPECT_EQ(call("cuStreamDestroy_v2", stream), kSuccess);
  EXPECT_EQ(call("cuStreamSynchronize", stream), kInvalidHandle);
  EXPECT_EQ(call("cuEventDestroy_v2", begin), kSuccess);
  EXPECT_EQ(call("cuEventDestroy_v2", end), kSuccess);
}

TEST_F(Driver, RegistersMemoryOfTheProgram) {
  void* const module = load(kScale);
  std::vector<float> numbers(100, 3.0f);
  void* const host = numbers.data();
  const auto at = reinterpret_cast<uint64_t>(host);
  EXPECT_EQ(call("cuMemHostUnregister", host), kHostMemoryNotRegistered);
  ASSERT_EQ(call("cuMemHostRegister_v2", host, size_t{400}, 0u), kSuccess);
  EXPECT_EQ(call("cuMemHostRegister_v2", static_cast<void*>(&numbers[50]), size_t{8}, 0u),
            kHostMemoryAlreadyRegistered);
  EXPECT_EQ(call("cuMemFreeHost", host), kInvalidValue);
  uint64_t device = 0;
  ASSERT_EQ(call("cuMemHostGetDevicePointer_v2", &device, host, 0u), kSuccess);
  EXPECT_EQ(device, at);
  EXPECT_EQ(launch(kernel_of(module), device, 100), kSuccess);
  for (const float x : numbers) EXPECT_EQ(x, 6.0f);
  EXPECT_EQ(call("cuMemHostUnregister", host), kSuccess);
  EXPECT_EQ(call("cuMemHostGetDevicePointer_v2", &device, host, 0u), kInvalidValue);
  EXPECT_EQ(call("cuModuleUnload", module), kSuccess);
}

// A stream captures a copy, a launch of another stream that waits for it, and a copy back. Each launch of the graph
// executes them again, with the captured parameters.
TEST_F(Driver, CapturesAndReplaysAStream) {
  void* const module = load(kScale);
  void *const kernel = kernel_of(module), *first = nullptr, *second = nullptr, *event = nullptr;
  ASSERT_EQ(call("cuStreamCreate", &first, 1u), kSuccess);
  ASSERT_EQ(call("cuStreamCreate", &second, 1u), kSuccess);
  ASSERT_EQ(call("cuEventCreate", &event, 0u), kSuccess);
  uint64_t at = 0;
  ASSERT_EQ(call("cuMemAlloc_v2", &at, size_t{400}), kSuccess);
  std::vector<float> in(100, 3.0f), out(100, -1.0f);
  const auto join = [&](void* recording, void* waiting) {
    ASSERT_EQ(call("cuEventRecord", event, recording), kSuccess);
    ASSERT_EQ(call("cuStreamWaitEvent", waiting, event, 0u), kSuccess);
  };
  EXPECT_EQ(call("cuStreamBeginCapture_v2", static_cast<void*>(nullptr), 0), kStreamCaptureUnsupported);
  ASSERT_EQ(call("cuStreamBeginCapture_v2", first, 0), kSuccess);
  EXPECT_EQ(call("cuStreamBeginCapture_v2", first, 0), kIllegalState);
  ASSERT_EQ(call("cuMemcpyHtoDAsync_v2", at, static_cast<const void*>(in.data()), size_t{400}, first), kSuccess);
  join(first, second);
  {
    uint64_t to = at;
    uint32_t count = 100;
    void* parameters[] = {&to, &count};
    ASSERT_EQ(call("cuLaunchKernel", kernel, 2u, 1u, 1u, 64u, 1u, 1u, 0u, second, &parameters[0],
                   static_cast<void**>(nullptr)),
              kSuccess);
    to = count = 0;
  }
  join(second, first);
  ASSERT_EQ(call("cuMemcpyDtoHAsync_v2", static_cast<void*>(out.data()), at, size_t{400}, first), kSuccess);
  EXPECT_EQ(call("cuStreamSynchronize", first), kStreamCaptureUnsupported);
  void *graph = nullptr, *exec = nullptr;
  EXPECT_EQ(call("cuStreamEndCapture", second, &graph), kStreamCaptureUnmatched);
  ASSERT_EQ(call("cuStreamEndCapture", first, &graph), kSuccess);
  EXPECT_EQ(out[0], -1.0f);
  EXPECT_EQ(call("cuStreamSynchronize", second), kSuccess);
  size_t nodes = 0;
  EXPECT_EQ(call("cuGraphGetNodes", graph, static_cast<void**>(nullptr), &nodes), kSuccess);
  EXPECT_EQ(nodes, 3u);
  ASSERT_EQ(call("cuGraphInstantiateWithFlags", &exec, graph, 0ull), kSuccess);
  EXPECT_EQ(call("cuGraphDestroy", graph), kSuccess);
  for (const float x : {3.0f, 5.0f}) {
    in.assign(100, x);
    ASSERT_EQ(call("cuGraphLaunch", exec, first), kSuccess);
    EXPECT_EQ(out, std::vector<float>(100, 2 * x));
  }
  EXPECT_EQ(call("cuGraphExecDestroy", exec), kSuccess);
  EXPECT_EQ(call("cuGraphLaunch", exec, first), kInvalidValue);
  EXPECT_EQ(call("cuMemFree_v2", at), kSuccess);
  EXPECT_EQ(call("cuModuleUnload", module), kSuccess);
}

// Nodes follow their dependencies in any order of insertion.
TEST_F(Driver, MakesAGraphNodeByNode) {
  void* const module = load(kScale);
  uint64_t at = 0;
  ASSERT_EQ(call("cuMemAlloc_v2", &at, size_t{400}), kSuccess);
  void *graph = nullptr, *exec = nullptr, *launched = nullptr, *filled = nullptr;
  ASSERT_EQ(call("cuGraphCreate", &graph, 0u), kSuccess);
  uint32_t count = 100;
  void* parameters[] = {&at, &count};
  struct {
    void* function;
    unsigned grid[3], block[3], shared_bytes;
    void **parameters, **extra;
  } launch{kernel_of(module), {2, 1, 1}, {64, 1, 1}, 0, &parameters[0], nullptr};
  struct {
    uint64_t to;
    size_t pitch;
    unsigned value, element_bytes;
    size_t width, height;
  } fill{at, 0, 0x40400000, 4, 100, 1};  // 3.0f
  void* const none = nullptr;
  ASSERT_EQ(call("cuGraphAddKernelNode_v2", &launched, graph, none, size_t{0}, static_cast<void*>(&launch)), kSuccess);
  ASSERT_EQ(call("cuGraphAddMemsetNode", &filled, graph, none, size_t{0}, static_cast<void*>(&fill), context_),
            kSuccess);
  ASSERT_EQ(call("cuGraphAddDependencies_v2", graph, &filled, &launched, none, size_t{1}), kSuccess);
  ASSERT_EQ(call("cuGraphInstantiateWithFlags", &exec, graph, 0ull), kSuccess);
  std::vector<float> numbers(100);
  for (int n = 0; n < 2; ++n) {
    ASSERT_EQ(call("cuGraphLaunch", exec, none), kSuccess);
    ASSERT_EQ(call("cuMemcpyDtoH_v2", static_cast<void*>(numbers.data()), at, size_t{400}), kSuccess);
    EXPECT_EQ(numbers, std::vector<float>(100, 6.0f));
  }
  ASSERT_EQ(call("cuGraphAddDependencies_v2", graph, &launched, &filled, none, size_t{1}), kSuccess);
  void* cyclic = nullptr;
  EXPECT_EQ(call("cuGraphInstantiateWithFlags", &cyclic, graph, 0ull), kInvalidValue);
  EXPECT_EQ(call("cuGraphExecDestroy", exec), kSuccess);
  EXPECT_EQ(call("cuGraphDestroy", graph), kSuccess);
  EXPECT_EQ(call("cuMemFree_v2", at), kSuccess);
  EXPECT_EQ(call("cuModuleUnload", module), kSuccess);
}

TEST_F(Driver, FindsFunctionsByNameAndVersion) {
  void* function = nullptr;
  int status = -1;
  const auto find = [&](const char* name, int version) {
    return call("cuGetProcAddress_v2", name, &function, version, uint64_t{0}, &status);
  };
  EXPECT_EQ(find("cuMemAlloc", 12000), kSuccess);
  uint64_t at = 0;
  EXPECT_EQ(reinterpret_cast<CUresult (*)(uint64_t*, size_t)>(function)(&at, 16), kSuccess);
  unsigned type = 0;
  EXPECT_EQ(call("cuPointerGetAttribute", static_cast<void*>(&type), 2, at + 8), kSuccess);
  EXPECT_EQ(type, 2u);
  EXPECT_EQ(call("cuPointerGetAttribute", static_cast<void*>(&type), 2, uint64_t{16}), kInvalidValue);
  EXPECT_EQ(call("cuMemFree_v2", at), kSuccess);
  EXPECT_EQ(find("cuSuchNameThereIsNot", 12000), kNotFound);
  EXPECT_EQ(status, 1);
  EXPECT_EQ(function, nullptr);
}

// ---- fat binaries ----

void append(std::string* bytes, auto value) { bytes->append(reinterpret_cast<const char*>(&value), sizeof value); }

// Returns a fat binary with one entry for this compute capability.
std::string fat_binary(const std::string& payload, uint16_t kind, uint32_t capability, uint64_t flags, uint64_t size) {
  std::string padded = payload;
  padded.resize((payload.size() + 8) / 8 * 8);
  std::string bytes;
  append(&bytes, uint32_t{0xba55ed50});
  append(&bytes, uint16_t{1});
  append(&bytes, uint16_t{16});
  append(&bytes, uint64_t{64 + padded.size()});
  append(&bytes, kind);
  append(&bytes, uint16_t{0x101});
  append(&bytes, uint32_t{64});
  append(&bytes, uint64_t{padded.size()});
  append(&bytes, static_cast<uint32_t>(flags ? payload.size() : 0));
  append(&bytes, uint32_t{0});
  append(&bytes, uint32_t{0x90000});
  append(&bytes, capability);
  append(&bytes, uint64_t{0});
  append(&bytes, flags);
  append(&bytes, uint64_t{0});
  append(&bytes, size);
  return bytes + padded;
}

// Encodes LZ4 in which only the first 20 spaces repeat.
std::string packed(const std::string& text) {
  std::string bytes("\x1f \x01\x00\x00", 5);  // one literal, then 15 + 0 + 4 = 19 repetitions
  bytes += '\xf0';
  for (size_t left = text.size() - 15;; left -= 255) {
    bytes += static_cast<char>(left < 255 ? left : 255);
    if (left < 255) break;
  }
  return bytes + text;
}

TEST_F(Driver, LoadsFatBinaries) {
  const std::string text = kScale;
  const auto loads = [&](const std::string& image) {
    void* module = nullptr;
    const CUresult result = call("cuModuleLoadData", &module, static_cast<const void*>(image.data()));
    if (result == kSuccess) kernel_of(module), call("cuModuleUnload", module);
    return result;
  };
  EXPECT_EQ(loads(fat_binary(text, 1, 90, 0, 0)), kSuccess);
  EXPECT_EQ(loads(fat_binary(packed(text), 1, 90, 0x2000, text.size() + 20)), kSuccess);
  EXPECT_EQ(loads(fat_binary(packed(text), 1, 90, 0x2000, text.size() + 19)), kNoBinaryForGpu);  // broken
  EXPECT_EQ(loads(fat_binary(text, 1, 100, 0, 0)), kNoBinaryForGpu);                             // for a later GPU
  EXPECT_EQ(loads(fat_binary(text, 2, 90, 0, 0)), kNoBinaryForGpu);                              // machine code
}

// nvcc -rdc=true: the wrapper's image is machine code, and a list has the PTX of each object.
TEST_F(Driver, LinksTheObjectsOfAProgram) {
  std::string text = kScale;
  const std::string visible = ".visible .global .align 4 .f32 factor = 0f40000000;";
  text.replace(text.find(visible), visible.size(), ".extern .global .align 4 .f32 factor;");
  const std::string header = ".version 8.0\n.target sm_90a\n.address_size 64\n";
  const std::string code = fat_binary("", 2, 90, 0, 0), user = fat_binary(text, 1, 90, 0, 0),
                    owner = fat_binary(header + visible, 1, 90, 0, 0);
  const auto load_linked = [&](std::vector<const void*> objects) {
    objects.push_back(nullptr);
    const struct {
      int magic, version;
      const void *data, *objects;
    } wrapper{0x466243b1, 2, code.data(), objects.data()};
    void* module = nullptr;
    const CUresult result = call("cuModuleLoadData", &module, static_cast<const void*>(&wrapper));
    if (result != kSuccess) return result;
    void* function = nullptr;
    const CUresult found = call("cuModuleGetFunction", &function, module, "scale");
    uint64_t factor = 0;
    EXPECT_EQ(call("cuModuleGetGlobal_v2", &factor, static_cast<size_t*>(nullptr), module, "factor"), found);
    call("cuModuleUnload", module);
    return found;
  };
  EXPECT_EQ(load_linked({user.data(), code.data(), owner.data()}), kSuccess);
  EXPECT_EQ(load_linked({owner.data(), user.data()}), kSuccess);
  EXPECT_EQ(load_linked({user.data(), owner.data(), owner.data()}), kNoBinaryForGpu);  // defined twice
  EXPECT_EQ(load_linked({code.data()}), kNoBinaryForGpu);
}

TEST(DriverDeathTest, TheRuntimesOwnTablesAreNotThere) {
  const std::array<unsigned char, 16> other{1},
      runtime{0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9};
  const void* table = &other;
  EXPECT_EQ(call("cuGetExportTable", &table, static_cast<const void*>(&other)), kNotSupported);
  EXPECT_EQ(table, nullptr);
  EXPECT_EXIT(call("cuGetExportTable", &table, static_cast<const void*>(&runtime)), testing::ExitedWithCode(2),
              "nvcc -cudart shared");
}

// ---- the runtime's interface ----

template <class Result = CUresult, class... Parameters>
Result runtime(const char* name, Parameters... parameters) {
  static void* const library = dlopen(VIRTUAL_CUDART, RTLD_NOW | RTLD_LOCAL);
  auto* const function = library ? reinterpret_cast<Result (*)(Parameters...)>(dlsym(library, name)) : nullptr;
  if (function == nullptr) ADD_FAILURE() << name << ": " << dlerror();
  return function ? function(parameters...) : Result();
}

struct Size {
  unsigned x, y, z;
};

// Makes the registrations that nvcc generates for `__device__ float factor` and `scale<<<2, 64>>>(to, 100)`.
TEST(Runtime, RunsAKernelOfTheProgram) {
  static const std::string image = fat_binary(kScale, 1, 90, 0, 0);
  const struct {
    int magic, version;
    const void* data;
    void* file;
  } wrapper{0x466243b1, 1, image.data(), nullptr};
  char kernel = 0, variable = 0, stranger = 0;  // their addresses stand for the kernel and the variable
  auto** const binary = runtime<void**>("__cudaRegisterFatBinary", static_cast<const void*>(&wrapper));
  void* const no = nullptr;
  runtime<char>("__cudaRegisterFunction", binary, static_cast<const char*>(&kernel), &kernel, "scale", -1, no, no, no,
                no, static_cast<int*>(nullptr));
  runtime<char>("__cudaRegisterVar", binary, &variable, &variable, "factor", 0, size_t{4}, 0, 0);
  runtime<char>("__cudaRegisterFatBinaryEnd", binary);

  std::vector<float> numbers(100, 3.0f);
  const float ten = 10;
  void* to = nullptr;
  constexpr int kToDevice = 1, kToHost = 2;
  ASSERT_EQ(runtime("cudaMalloc", &to, size_t{400}), kSuccess);
  ASSERT_EQ(runtime("cudaMemcpy", to, static_cast<const void*>(numbers.data()), size_t{400}, kToDevice), kSuccess);
  ASSERT_EQ(runtime("cudaMemcpyToSymbol", static_cast<const void*>(&variable), static_cast<const void*>(&ten),
                    sizeof ten, size_t{0}, kToDevice),
            kSuccess);
  uint32_t count = 100;
  void* parameters[] = {&to, &count};
  const auto launch = [&](const void* symbol, unsigned threads) {
    return runtime("cudaLaunchKernel", symbol, Size{2, 1, 1}, Size{threads, 1, 1}, &parameters[0], size_t{0}, no);
  };
  EXPECT_EQ(launch(&kernel, 64), kSuccess);
  EXPECT_EQ(runtime("cudaDeviceSynchronize"), kSuccess);
  ASSERT_EQ(
      runtime("cudaMemcpy", static_cast<void*>(numbers.data()), static_cast<const void*>(to), size_t{400}, kToHost),
      kSuccess);
  for (const float x : numbers) EXPECT_EQ(x, 30.0f);

  // Captures the same launch, and a copy after it.
  void *stream = nullptr, *captured = nullptr, *exec = nullptr;
  ASSERT_EQ(runtime("cudaStreamCreate", &stream), kSuccess);
  ASSERT_EQ(runtime("cudaStreamBeginCapture", stream, 0), kSuccess);
  const void* const symbol = &kernel;
  EXPECT_EQ(runtime("cudaLaunchKernel", symbol, Size{2, 1, 1}, Size{64, 1, 1}, &parameters[0], size_t{0}, stream),
            kSuccess);
  EXPECT_EQ(runtime("cudaMemcpyAsync", static_cast<void*>(numbers.data()), static_cast<const void*>(to), size_t{400},
                    kToHost, stream),
            kSuccess);
  ASSERT_EQ(runtime("cudaStreamEndCapture", stream, &captured), kSuccess);
  ASSERT_EQ(runtime("cudaGraphInstantiate", &exec, captured, 0ull), kSuccess);
  for (const float expected : {300.0f, 3000.0f}) {
    ASSERT_EQ(runtime("cudaGraphLaunch", exec, stream), kSuccess);
    EXPECT_EQ(numbers, std::vector<float>(100, expected));
  }
  ASSERT_EQ(runtime("cudaHostRegister", static_cast<void*>(numbers.data()), size_t{400}, 0u), kSuccess);
  EXPECT_EQ(runtime("cudaHostUnregister", static_cast<void*>(numbers.data())), kSuccess);

  EXPECT_EQ(runtime("cudaGetLastError"), kSuccess);
  EXPECT_EQ(launch(&stranger, 64), kInvalidHandle);
  EXPECT_EQ(runtime("cudaPeekAtLastError"), kInvalidHandle);
  EXPECT_EQ(launch(&kernel, 2048), kInvalidValue);
  EXPECT_EQ(runtime("cudaGetLastError"), kInvalidValue);
  EXPECT_EQ(runtime("cudaGetLastError"), kSuccess);
  EXPECT_STREQ(runtime<const char*>("cudaGetErrorName", kInvalidValue), "cudaErrorInvalidValue");
  void* graph = nullptr;
  EXPECT_EQ(runtime("cudaGraphClone", &graph, graph), kNotSupported);
  EXPECT_EQ(runtime("cudaFree", to), kSuccess);
  EXPECT_EQ(runtime("cudaFree", to), kInvalidValue);
}

#ifdef TANDEM_COMMAND
struct Ran {
  std::string output;
  int code = -1;
};
Ran run(const std::string& command) {
  Ran ran;
  std::FILE* const pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return ran;
  std::array<char, 4096> part;
  for (size_t bytes; (bytes = fread(part.data(), 1, part.size(), pipe)) > 0;) ran.output.append(part.data(), bytes);
  const int status = pclose(pipe);
  ran.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return ran;
}
constexpr const char* kExec = TANDEM_COMMAND " vgpu exec ";

TEST(Exec, RunsTheExample) {
  for (const char* schedule : {"0", "1", "5"}) {
    const Ran ran = run(str_cat(kExec, "--schedule ", schedule, " " COLUMN_SUMS));
    EXPECT_EQ(ran.code, 0) << ran.output;
    EXPECT_NE(ran.output.find("NVIDIA H200 (virtual): 0 of 256 sums are wrong"), std::string::npos) << ran.output;
    EXPECT_NE(ran.output.find("1 launch, 0 findings"), std::string::npos) << ran.output;
  }
}

TEST(Exec, ReportsTheMistake) {
  const Ran ran = run(std::string(kExec) + COLUMN_SUMS " --without-wait");
  EXPECT_EQ(ran.code, 1) << ran.output;
  EXPECT_NE(ran.output.find("data-race in column_sums: handed"), std::string::npos) << ran.output;
}

TEST(Exec, LimitsTheInstructionsOfABlock) {
  const Ran ran = run(str_cat(kExec, "--max-instructions 10 " COLUMN_SUMS));
  EXPECT_NE(ran.code, 0) << ran.output;
  EXPECT_NE(ran.output.find("endless-loop in column_sums"), std::string::npos) << ran.output;
  EXPECT_EQ(run(std::string(kExec) + "--max-instructions 0 " COLUMN_SUMS).code, 0);
}

TEST(Exec, TakesAMarkBeforeTheProgram) {
  EXPECT_EQ(run(std::string(kExec) + "--schedule 1 -- sh -c 'exit 7'").code, 7);
  EXPECT_EQ(run(std::string(kExec) + "--schedule=1 -- sh -c 'exit $#' -- a b").code, 2);
}

TEST(Exec, HandsOnTheProgramsOwnExitCode) {
  EXPECT_EQ(run(std::string(kExec) + "sh -c 'exit 7'").code, 7);
  EXPECT_EQ(run(std::string(kExec) + "/no/such/program").code, 127);
  const Ran idle = run(std::string(kExec) + "true");
  EXPECT_EQ(idle.code, 2);
  EXPECT_NE(idle.output.find("used the virtual GPU"), std::string::npos) << idle.output;
  EXPECT_EQ(run(std::string(kExec) + "--device cuda true").code, 2);
  EXPECT_EQ(run(kExec).code, 2);
}
#endif

}  // namespace
}  // namespace tandem::vgpu::driver
