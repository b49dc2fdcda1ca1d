// Shows which releases of shared memory racecheck (compute-sanitizer) follows. 128 threads read a value and release it,
// and a thread overwrites it after its wait for the release. Every form is ordered.
//
//   nvcc -arch=sm_90a -o race_minimal tools/gpu/race_minimal.cu
//   compute-sanitizer --tool racecheck ./race_minimal all
//
// all: every thread arrives at the mbarrier. warp: one lane of each warp arrives after __syncwarp. barrier: one thread
// arrives after a named barrier of all. bulk: as warp, and cp.async.bulk overwrites the value.
#include <cstdint>
#include <cstdio>
#include <cstring>

enum class Release { all, warp, barrier, bulk };
constexpr const char* kNames[] = {"all", "warp", "barrier", "bulk"};
constexpr int kReaders = 128, kSteps = 5;

__device__ uint32_t address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ void init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count));
}
__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}
__device__ void wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(
          address(barrier)),
      "r"(parity)
      : "memory");
}
__device__ void copy(void* to, const void* from, uint64_t* full) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16;" ::"r"(address(full)) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];" ::"r"(
                   address(to)),
               "l"(from), "r"(address(full))
               : "memory");
}

template <Release release>
__global__ void exchange(const int4* from, int* sums) {
  __shared__ int4 value;
  __shared__ uint64_t full, empty;
  if (threadIdx.x == 0) {
    init(&full, 1);
    init(&empty, release == Release::all ? kReaders : release == Release::barrier ? 1 : kReaders / 32);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int i = 0; threadIdx.x == 0 && i < kSteps; ++i) {
      wait(&empty, (i & 1) ^ 1);
      if (release == Release::bulk) {
        copy(&value, from + i, &full);
      } else {
        value.x = from[i].x;
        arrive(&full);
      }
    }
    return;
  }
  int sum = 0;
  for (int i = 0; i < kSteps; ++i) {
    wait(&full, i & 1);
    sum += value.x;
    if (release == Release::barrier) {
      asm volatile("bar.sync 1, 128;" ::: "memory");
      if (threadIdx.x == 32) arrive(&empty);
    } else {
      __syncwarp();
      if (release == Release::all || threadIdx.x % 32 == 0) arrive(&empty);
    }
  }
  sums[threadIdx.x - 32] = sum;
}

int main(int count, char** names) {
  int4 from[kSteps] = {};
  for (int i = 0; i < kSteps; ++i) from[i].x = 10 + i;
  int4* values;
  int *sums, found[kReaders];
  cudaMalloc(&values, sizeof from);
  cudaMalloc(&sums, sizeof found);
  cudaMemcpy(values, from, sizeof from, cudaMemcpyHostToDevice);
  constexpr void (*kKernels[])(const int4*, int*) = {exchange<Release::all>, exchange<Release::warp>,
                                                          exchange<Release::barrier>, exchange<Release::bulk>};
  for (int i = 0; i < 4; ++i)
    if (count == 2 && strcmp(names[1], kNames[i]) == 0) kKernels[i]<<<1, kReaders + 32>>>(values, sums);
  cudaMemcpy(found, sums, sizeof found, cudaMemcpyDeviceToHost);
  int wrong = 0;
  for (int sum : found) wrong += sum != 60;
  printf("%s: %d of %d sums are wrong: %s\n", count == 2 ? names[1] : "usage: race_minimal all|warp|barrier|bulk", wrong,
         kReaders, cudaGetErrorString(cudaGetLastError()));
  return wrong != 0;
}
