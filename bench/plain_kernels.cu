// Kernels with one memory access pattern each. virtual_gpu.py times the checker on them.
extern "C" {
__global__ void saxpy(int n, const float* x, float* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * x[i] + y[i];
}
__global__ void stencil(int n, const float* x, float* y) {  // neighbours, but not aligned to 16 bytes
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i > 0 && i < n - 1) y[i] = x[i - 1] + 2 * x[i] + x[i + 1];
}
__global__ void strided(int n, const float* x, float* y) {  // a separate line per lane
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[static_cast<long long>(i) * 17 % n] = x[static_cast<long long>(i) * 17 % n] + 1;
}
__global__ void bytes(int n, const unsigned char* x, unsigned char* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + 1;
}
__global__ void vectors(int n, const float4* x, float4* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n / 4) y[i] = x[i];
}
__global__ void transpose(int n, const float* x, float* y) {  // through shared memory; n: 512 x 512
  __shared__ float tile[16][17];
  const int row = threadIdx.x / 16, column = threadIdx.x % 16, bx = blockIdx.x % 32 * 16, by = blockIdx.x / 32 * 16;
  tile[row][column] = x[(by + row) * 512 + bx + column];
  __syncthreads();
  y[(bx + row) * 512 + by + column] = tile[column][row];
}
__global__ void reduction(int n, const float* x, float* y) {
  __shared__ float sums[256];
  sums[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
  __syncthreads();
  for (int d = 128; d > 0; d /= 2) {
    if (threadIdx.x < d) sums[threadIdx.x] += sums[threadIdx.x + d];
    __syncthreads();
  }
  if (threadIdx.x == 0) atomicAdd(y, sums[0]);
}
__global__ void histogram(int n, const unsigned char* x, unsigned* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(&y[x[i]], 1u);
}
__global__ void product(int n, const float* a, float* c) {  // rows of 64, which every block reads
  const int row = blockIdx.x * 4 + threadIdx.x / 64, column = threadIdx.x % 64;
  float sum = 0;
  for (int k = 0; k < 64; ++k) sum += a[row * 64 + k] * a[k * 64 + column];
  c[row * 64 + column] = sum;
}
}
