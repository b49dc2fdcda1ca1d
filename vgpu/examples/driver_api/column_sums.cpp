// A program that uses the CUDA driver's interface: PTX, a tensor map, a launch with clusters. The program runs on a
// GPU, or on a virtual GPU without a driver:
//
//   g++ -std=c++20 column_sums.cpp -o column_sums -ldl
//   tandem vgpu exec ./column_sums
//   tandem vgpu exec ./column_sums --without-wait     # the same with a mistake in the kernel
//
// The program sums the columns of a matrix. Each block sums 32 rows of a bulk copy. The second block of each cluster of
// two passes its sums to the first one through shared memory.
#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr int kColumns = 64, kRowsOfBlock = 32, kBlocks = 8, kRows = kRowsOfBlock * kBlocks;

constexpr const char* kKernel = R"(
.version 8.0
.target sm_90a
.address_size 64

.visible .entry column_sums(.param .align 64 .b8 map[128], .param .u64 sums)
{
  .reg .pred %p<5>;
  .reg .b32 %r<16>;
  .reg .b64 %rd<6>;
  .reg .f32 %f<4>;
  .shared .align 128 .b8 tile[8192];
  .shared .align 16 .b8 handed[256];
  .shared .align 8 .b8 full[8];

  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %cluster_ctarank;
  mov.u32 %r3, %ctaid.x;
  mov.u32 %r4, tile;
  mov.u32 %r5, handed;
  mov.u32 %r6, full;
  shl.b32 %r9, %r1, 2;

  // A single thread copies the block's rows.
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra ASKED;
  mbarrier.init.shared::cta.b64 [%r6], 1;
  fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 8192;
  mov.b64 %rd1, map;
  cvta.param.u64 %rd1, %rd1;
  mov.u32 %r7, 0;
  shl.b32 %r8, %r3, 5;
  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd1, {%r7, %r8}], [%r6];
ASKED:
  barrier.cluster.arrive.release.aligned;
  barrier.cluster.wait.acquire.aligned;
ARRIVING:
  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r6], 0;
  @!%p2 bra ARRIVING;

  // Each thread has a column.
  add.u32 %r10, %r4, %r9;
  mov.f32 %f1, 0f00000000;
  mov.u32 %r11, 0;
ROW:
  ld.shared.f32 %f2, [%r10];
  add.f32 %f1, %f1, %f2;
  add.u32 %r10, %r10, 256;
  add.u32 %r11, %r11, 1;
  setp.lt.u32 %p3, %r11, 32;
  @%p3 bra ROW;

  // The second block hands over, the first adds and writes.
  add.u32 %r12, %r5, %r9;
  setp.eq.u32 %p4, %r2, 0;
  @%p4 bra HANDED;
  mapa.shared::cluster.u32 %r13, %r12, 0;
  st.shared::cluster.f32 [%r13], %f1;
HANDED:
  barrier.cluster.arrive.release.aligned;
  barrier.cluster.wait.acquire.aligned;  // both have handed over
  @!%p4 bra DONE;
  ld.shared.f32 %f3, [%r12];
  add.f32 %f1, %f1, %f3;
  ld.param.u64 %rd2, [sums];
  cvta.to.global.u64 %rd2, %rd2;
  shr.u32 %r14, %r3, 1;
  shl.b32 %r14, %r14, 8;
  add.u32 %r14, %r14, %r9;
  cvt.u64.u32 %rd3, %r14;
  add.u64 %rd3, %rd2, %rd3;
  st.global.f32 [%rd3], %f1;
DONE:
  ret;
}
)";

// Declarations of cuda.h, which a build of this program does not need.
struct Attribute {
  unsigned id, pad;
  union {
    char bytes[64];
    unsigned cluster[3];
  };
};
struct Config {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned attribute_count;
};

template <class... Parameters>
void call(const char* name, Parameters... parameters) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  auto* const function = driver ? reinterpret_cast<int (*)(Parameters...)>(dlsym(driver, name)) : nullptr;
  if (function == nullptr) {
    std::fprintf(stderr, "column_sums: %s\n", dlerror());
    std::exit(2);
  }
  if (const int result = function(parameters...); result != 0) {
    std::fprintf(stderr, "column_sums: %s failed with error %d\n", name, result);
    std::exit(2);
  }
}

std::string kernel_text(bool without_wait) {
  std::string text = kKernel;
  if (without_wait) {
    const size_t end = text.find("  // both have handed over"), begin = text.rfind("barrier.cluster.wait", end);
    text.erase(begin, end - begin);
  }
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  const bool without_wait = argc > 1 && std::string(argv[1]) == "--without-wait";
  int device = 0;
  void *context = nullptr, *module = nullptr, *kernel = nullptr;
  call("cuInit", 0u);
  call("cuDeviceGet", &device, 0);
  char name[128];
  call("cuDeviceGetName", &name[0], int{sizeof name}, device);
  call("cuDevicePrimaryCtxRetain", &context, device);
  call("cuCtxSetCurrent", context);
  const std::string text = kernel_text(without_wait);
  call("cuModuleLoadData", &module, static_cast<const void*>(text.c_str()));
  call("cuModuleGetFunction", &kernel, module, "column_sums");

  std::vector<float> matrix(size_t{kRows} * kColumns), sums(size_t{kBlocks / 2} * kColumns);
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<float>(i % 17) - 8;
  uint64_t matrix_at = 0, sums_at = 0;
  call("cuMemAlloc_v2", &matrix_at, matrix.size() * sizeof(float));
  call("cuMemAlloc_v2", &sums_at, sums.size() * sizeof(float));
  call("cuMemcpyHtoD_v2", matrix_at, static_cast<const void*>(matrix.data()), matrix.size() * sizeof(float));

  alignas(64) char map[128];
  const uint64_t dims[] = {kColumns, kRows}, byte_strides[] = {kColumns * sizeof(float)};
  const uint32_t box[] = {kColumns, kRowsOfBlock}, steps[] = {1, 1};
  constexpr int f32 = 7, none = 0;
  call("cuTensorMapEncodeTiled", static_cast<void*>(map), f32, 2u, reinterpret_cast<void*>(matrix_at), &dims[0],
       &byte_strides[0], &box[0], &steps[0], none, none, none, none);

  Attribute clusters{4, 0, {}};
  clusters.cluster[0] = 2, clusters.cluster[1] = clusters.cluster[2] = 1;
  const Config config{{kBlocks, 1, 1}, {kColumns, 1, 1}, 0, nullptr, &clusters, 1};
  void* parameters[] = {map, &sums_at};
  call("cuLaunchKernelEx", &config, kernel, &parameters[0], static_cast<void**>(nullptr));
  call("cuCtxSynchronize");
  call("cuMemcpyDtoH_v2", static_cast<void*>(sums.data()), sums_at, sums.size() * sizeof(float));

  size_t wrong = 0;
  for (size_t i = 0; i < sums.size(); ++i) {
    float sum = 0;
    for (size_t row = 0; row < 2 * kRowsOfBlock; ++row)
      sum += matrix[(i / kColumns * 2 * kRowsOfBlock + row) * kColumns + i % kColumns];
    wrong += !(std::fabs(sums[i] - sum) < 1e-3f);
  }
  std::printf("%s: %zu of %zu sums are wrong\n", name, wrong, sums.size());
  call("cuMemFree_v2", matrix_at);
  call("cuMemFree_v2", sums_at);
  call("cuModuleUnload", module);
  call("cuDevicePrimaryCtxRelease_v2", device);
  return wrong == 0 ? 0 : 1;
}
