// Functions that host and device compile.
#pragma once

#ifdef __CUDACC__
#define TANDEM_HOST_DEVICE __device__ __forceinline__ constexpr
TANDEM_HOST_DEVICE int smaller(int a, int b) { return min(a, b); }
TANDEM_HOST_DEVICE int larger(int a, int b) { return max(a, b); }
TANDEM_HOST_DEVICE long long smaller(long long a, long long b) { return min(a, b); }
TANDEM_HOST_DEVICE long long larger(long long a, long long b) { return max(a, b); }
#else
#define TANDEM_HOST_DEVICE constexpr
TANDEM_HOST_DEVICE int smaller(int a, int b) { return b < a ? b : a; }
TANDEM_HOST_DEVICE int larger(int a, int b) { return a < b ? b : a; }
TANDEM_HOST_DEVICE long long smaller(long long a, long long b) { return b < a ? b : a; }
TANDEM_HOST_DEVICE long long larger(long long a, long long b) { return a < b ? b : a; }
#endif
TANDEM_HOST_DEVICE int clamp(int x, int low, int high) { return smaller(larger(x, low), high); }
