// What warps and warpgroups say to each other, and how they move fragments.
#pragma once
#include "ptx/base.cuh"

// Named barriers, 0 to 15 (0 is __syncthreads). threads counts those that sync and those that only arrive.
TANDEM_DEVICE void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// The same for warps that are at several places of the code. "bar" is "barrier" with .aligned, which the PTX ISA asks
// of a warp's threads only; but compute-sanitizer's synccheck takes warps that meet at two such instructions for
// divergent.
TANDEM_DEVICE void named_sync_from_anywhere(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
TANDEM_DEVICE void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// For a kernel that may begin before the one in front of it in the stream has ended (PTX ISA "griddepcontrol"): until
// that one's writes are there; and that the next one may begin, which waits in the same way.
TANDEM_DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
TANDEM_DEVICE void sleep(u32 nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }
TANDEM_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Of x over groups of `lanes` neighbouring lanes, in all of them; every lane of the warp takes part.
template <int lanes>
TANDEM_DEVICE float sum_over_lanes(float x) {
#pragma unroll
  for (int d = 1; d < lanes; d *= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// Registers of a warpgroup's threads: fewer, so that others may have more (PTX ISA "setmaxnreg").
template <int n>
TANDEM_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n>
TANDEM_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
TANDEM_DEVICE void ldmatrix(u32 (&to)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
TANDEM_DEVICE void stmatrix(u32 address, const u32 (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(from[0]),
               "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// To shared memory, where other threads may write the same.
TANDEM_DEVICE void store_relaxed(int* to, int value) {
  asm volatile("st.relaxed.cta.shared::cta.b32 [%0], %1;" ::"r"(shared_address(to)), "r"(value) : "memory");
}

TANDEM_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
TANDEM_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
TANDEM_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The larger, or NaN where there is one. PTX ISA "max".
TANDEM_DEVICE float max_or_nan(float x, float y) {
  float larger;
  asm("max.NaN.ftz.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}
