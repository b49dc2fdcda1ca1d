// What sample.ptx was made of, to have a compiler's own text of many kinds:
//   nvcc -ptx -arch=compute_90a -lineinfo -std=c++20 sample.cu
#include <cstdio>

__constant__ float table[16] = {1.f, 2.5f, -3.f};
__constant__ double halves[2] = {0.5, -0.5};
__device__ int counter = 7;
__device__ unsigned char bytes[5] = {1, 2, 255};

struct Pair {
  int a[6];
  double b;
};

__device__ __noinline__ float pick(float x, int k) { return k > 3 ? x * table[k & 15] : x - 1; }
__device__ __noinline__ Pair make_pair(int n) {
  Pair pair;
  for (int i = 0; i < 6; ++i) pair.a[i] = n * i;
  pair.b = n * halves[n & 1];
  return pair;
}
__device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
__device__ __noinline__ void rest() { asm volatile("nanosleep.u32 20;"); }
__device__ int next(int x) { return x + 1; }
__device__ int triple(int x) { return x * 3; }

extern "C" __global__ void print(int n) { printf("%d %f\n", n, 1.5); }

extern "C" __global__ void choose(int* p, int k) {
  int v = p[threadIdx.x];
  switch (k) {
    case 0: v += 3; break;
    case 1: v *= 5; break;
    case 2: v ^= 77; break;
    case 3: v = fibonacci(v); break;
    case 4: v = __popc(v); break;
    case 5: v = __clz(v); break;
    default: v = v % 10;
  }
  p[threadIdx.x] = v;
}

extern "C" __global__ void indirect(int* p, int k) {
  int (*f)(int) = k ? next : triple;
  p[0] = f(p[0]);
}

extern "C" __global__ void local(float* p, int k) {
  float a[32];
  for (int i = 0; i < 32; ++i) a[(i * k) & 31] = p[i];
  const Pair pair = make_pair(k);
  p[0] = a[k & 31] + pick(a[1], k) + pair.a[k % 6] + static_cast<float>(pair.b);
  rest();
}

extern "C" __global__ void atomics(int* p, float* f, unsigned long long* u) {
  __shared__ int sum;
  if (threadIdx.x == 0) sum = counter;
  __syncthreads();
  atomicAdd(&sum, 1);
  atomicCAS(p, 3, 4);
  atomicAdd(f, 1.f);
  atomicMax(u, 5ull);
  __syncthreads();
  p[2] = __shfl_xor_sync(~0u, sum, 3) + __ballot_sync(~0u, sum > 4);
  bytes[0] = p[2];
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(256, 2) clusters(float* p, Pair pair) {
  extern __shared__ float dynamic[];
  dynamic[threadIdx.x] = p[threadIdx.x] + pair.a[threadIdx.x % 6];
  asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
  const long long now = clock64();
  // Twice the same names.
  asm volatile("{\n .reg .pred P1;\n WAIT:\n setp.lt.s64 P1, %0, 5;\n @P1 bra DONE;\n bra WAIT;\n DONE:\n}" ::"l"(now));
  asm volatile("{ .reg .pred P1; WAIT: setp.lt.s64 P1, %0, 6; @P1 bra DONE; bra WAIT; DONE: }" ::"l"(now));
  unsigned other;
  asm volatile("mapa.shared::cluster.u32 %0, %1, 1;"
               : "=r"(other)
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(dynamic))));
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1+4];" : "=f"(value) : "r"(other));
  p[threadIdx.x] = value;
}
