// Tests the driver of this machine's GPU with kernels that NVRTC compiles. The tests are skipped without a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "base/text.h"
#include "gpu/driver/driver.h"
#include "jit/compiler.h"

namespace tandem::test {
namespace {

// Copies a box of the tensor through shared memory with the bulk copy engine. Stores the number of blocks of its
// cluster.
constexpr const char* kSource = R"(
struct alignas(64) TensorMap { unsigned char bytes[128]; };
extern "C" __global__ void copy_box(const __grid_constant__ TensorMap map, float* out, unsigned* cluster) {
  extern __shared__ __align__(128) float box[];  // 8 x 32
  __shared__ unsigned long long full;
  const unsigned bar = (unsigned)__cvta_generic_to_shared(&full), to = (unsigned)__cvta_generic_to_shared(box);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" :: "r"(bar) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];"
                 :: "r"(to), "l"(&map), "r"(bar), "r"(32), "r"(int(8 * blockIdx.x)) : "memory");
  }
  __syncthreads();
  asm volatile("{\n .reg .pred done;\n wait:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
               " @!done bra wait;\n }" :: "r"(bar) : "memory");
  for (int i = threadIdx.x; i < 256; i += blockDim.x) out[256 * blockIdx.x + i] = box[i];
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  if (threadIdx.x == 0) cluster[blockIdx.x] = size;
}
)";

class RealDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status status = gpu::cuda::open("cuda", &device); !status.ok()) {
      GTEST_SKIP() << "NOT RUN, no GPU: " << status.message;
    }
  }
  void ok(const Status& status) { ASSERT_TRUE(status.ok()) << status.message; }

  std::unique_ptr<gpu::Device> device;
};

TEST_F(RealDevice, HasPlausibleProperties) {
  const gpu::Properties& p = device->properties();
  std::printf(
      "%s, sm_%d%d, %d SMs, %d kHz, memory %d kHz x %d bits, L2 %lld MiB, %d bytes of shared memory per block, %lld "
      "GiB, driver %d\n",
      p.name.c_str(), p.compute_major, p.compute_minor, p.sm_count, p.clock_khz, p.memory_clock_khz, p.memory_bus_bits,
      static_cast<long long>(p.l2_bytes >> 20), p.max_dynamic_smem_bytes, static_cast<long long>(p.memory_bytes >> 30),
      p.driver_version);
  EXPECT_FALSE(p.name.empty());
  EXPECT_GE(p.compute_major, 5);
  EXPECT_GT(p.sm_count, 0);
  EXPECT_GT(p.l2_bytes, 0);
  EXPECT_GE(p.max_dynamic_smem_bytes, 48 << 10);
  EXPECT_GT(p.memory_bytes, int64_t{1} << 30);
  EXPECT_GE(p.driver_version, 12000);
}

TEST_F(RealDevice, MovesMemoryAndMeasuresTime) {
  std::vector<float> sent(1000), received(1000);
  std::iota(sent.begin(), sent.end(), 0.0f);
  const size_t bytes = sent.size() * sizeof(float);
  void *a = nullptr, *b = nullptr, *pinned = nullptr;
  gpu::Stream stream = nullptr;
  gpu::Event start = nullptr, stop = nullptr;
  float milliseconds = -1;
  bool capturing = true;
  ok(device->allocate(bytes, &a));
  ok(device->allocate(bytes, &b));
  ok(device->allocate_pinned(bytes, &pinned));
  ok(device->create_stream(&stream));
  ok(device->create_event(&start));
  ok(device->create_event(&stop));
  ok(device->record(start, stream));
  ok(device->copy_to_device(a, sent.data(), bytes, stream));
  ok(device->copy_on_device(b, a, bytes, stream));
  ok(device->fill(b, 0, 40, stream));
  ok(device->copy_to_host(pinned, b, bytes, stream));
  ok(device->record(stop, stream));
  ok(device->synchronize(stream));
  ok(device->elapsed_ms(start, stop, &milliseconds));
  ok(device->is_capturing(stream, &capturing));
  EXPECT_GT(milliseconds, 0);
  EXPECT_FALSE(capturing);
  const float* got = static_cast<const float*>(pinned);
  for (size_t i = 0; i < sent.size(); ++i) EXPECT_EQ(got[i], i < 10 ? 0.0f : sent[i]);
  ok(device->free(a));
  ok(device->free(b));
  ok(device->free_pinned(pinned));
  ok(device->destroy_event(start));
  ok(device->destroy_event(stop));
  ok(device->destroy_stream(stream));
  EXPECT_EQ(device->allocate(size_t{1} << 50, &a).code, TANDEM_DEVICE_ERROR);
}

TEST_F(RealDevice, CompilesLoadsAndLaunches) {
  const gpu::Properties& properties = device->properties();
  if (properties.compute_major < 9) GTEST_SKIP() << "NOT RUN: tensor maps need compute capability 9.0";
  std::unique_ptr<jit::Compiler> compiler;
  const jit::Search search{{}, properties.driver_version / 1000};
  if (const Status status = jit::Compiler::open(search, Env::get(), &compiler); !status.ok()) {
    GTEST_SKIP() << "NOT RUN: " << status.message;
  }
  const std::string arch = str_cat("sm_", properties.compute_major, properties.compute_minor, "a");
  const jit::Request request{"copy_box", kSource, arch, {"--std=c++20"}, jit::Output::cubin};
  std::string cubin, log;
  ok(compiler->compile(request, {}, &cubin, &log));

  std::unique_ptr<gpu::Module> module;
  gpu::Kernel kernel = nullptr;
  gpu::KernelAttributes attributes;
  ok(device->load(std::as_bytes(std::span(cubin)), &module));
  ok(module->find("copy_box", properties.max_dynamic_smem_bytes - 1024, &kernel));
  ok(module->attributes(kernel, &attributes));
  EXPECT_GT(attributes.registers, 0);
  EXPECT_EQ(attributes.local_bytes, 0);
  EXPECT_GE(attributes.static_smem_bytes, 8);
  EXPECT_EQ(module->find("absent", 0, &kernel).code, TANDEM_DEVICE_ERROR);

  // A tensor of 30 rows of 64. Each block copies the second half of 8 rows. The last two rows are beyond the end.
  constexpr int rows = 30, columns = 64, blocks = 4;
  std::vector<float> sent(rows * columns), received(blocks * 256, NAN);
  std::vector<uint32_t> clusters(blocks);
  std::iota(sent.begin(), sent.end(), 1.0f);
  void *tensor = nullptr, *out = nullptr, *cluster = nullptr;
  ok(device->allocate(sent.size() * 4, &tensor));
  ok(device->allocate(received.size() * 4, &out));
  ok(device->allocate(clusters.size() * 4, &cluster));
  ok(device->copy_to_device(tensor, sent.data(), sent.size() * 4, nullptr));
  gpu::TensorMapSpec spec;
  spec.address = tensor;
  spec.type = gpu::TensorType::f32;
  spec.rank = 2;
  spec.dims[0] = columns, spec.dims[1] = rows;
  spec.byte_strides[1] = columns * 4;
  spec.box[0] = 32, spec.box[1] = 8;
  gpu::TensorMap map;
  ok(device->encode(spec, &map));
  void* args[] = {&map, &out, &cluster};
  gpu::Launch launch;
  launch.kernel = kernel;
  launch.grid = {blocks};
  launch.block = {128};
  launch.cluster = {2};
  launch.dynamic_smem_bytes = static_cast<uint32_t>(properties.max_dynamic_smem_bytes - 1024);
  launch.overlap_previous = true;
  launch.args = args;
  ok(device->launch(launch));
  ok(device->copy_to_host(received.data(), out, received.size() * 4, nullptr));
  ok(device->copy_to_host(clusters.data(), cluster, clusters.size() * 4, nullptr));
  ok(device->synchronize(gpu::Stream{}));
  for (int i = 0; i < blocks * 256; ++i) {
    const int row = i / 32, column = 32 + i % 32;
    EXPECT_EQ(received[i], row < rows ? sent[row * columns + column] : 0.0f) << i;
  }
  EXPECT_EQ(clusters, std::vector<uint32_t>(blocks, 2));

  spec.byte_strides[1] = 100;  // no multiple of 16
  EXPECT_EQ(device->encode(spec, &map).code, TANDEM_DEVICE_ERROR);
  launch.dynamic_smem_bytes = 1 << 20;
  const Status refused = device->launch(launch);
  EXPECT_EQ(refused.code, TANDEM_DEVICE_ERROR);
  EXPECT_NE(refused.message.find("1048576 bytes"), std::string::npos) << refused.message;
  for (void* memory : {tensor, out, cluster}) ok(device->free(memory));
}

}  // namespace
}  // namespace tandem::test
