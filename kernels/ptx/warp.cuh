// Synchronization of warps and warpgroups, and moves of fragments between lanes.
#pragma once
#include "ptx/base.cuh"

// Named barriers 0 to 15 (0 is __syncthreads). threads counts the threads that sync and the threads that only arrive.
TANDEM_DEVICE void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// named_sync for warps that reach the barrier at different places in the code. "bar" is "barrier" with .aligned, which
// the PTX ISA requires only of the threads of a warp. compute-sanitizer's synccheck reports two such instructions as
// divergent.
TANDEM_DEVICE void named_sync_from_anywhere(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// named_sync_from_anywhere that returns true in all threads if x is true in any thread.
TANDEM_DEVICE bool named_sync_or(int barrier, int threads, bool x) {
  u32 any;
  asm volatile(
      "{.reg .pred p, q;\n"
      "setp.ne.u32 q, %3, 0;\n"
      "barrier.red.or.pred p, %1, %2, q;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(u32{x})
      : "memory");
  return any != 0;
}
TANDEM_DEVICE void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Two instructions for kernels that may overlap the preceding kernel of the stream (PTX ISA "griddepcontrol"). The
// first waits for the preceding kernel's writes; the second lets the next kernel begin.
TANDEM_DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
TANDEM_DEVICE void sleep(u32 nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }
TANDEM_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Returns the sum of x over each group of `lanes` neighbouring lanes, in all lanes of the group. Every lane must call
// this function.
template <int lanes>
TANDEM_DEVICE float sum_over_lanes(float x) {
#pragma unroll
  for (int d = 1; d < lanes; d *= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// Reduces the registers of a warpgroup's threads, so that other warpgroups can have more (PTX ISA "setmaxnreg").
template <int n>
TANDEM_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n>
TANDEM_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}

// Loads four 8 x 8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8.
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

// Stores to shared memory without memory order. Other threads may store the same value.
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
// Returns the maximum, or NaN if an operand is NaN. PTX ISA "max".
TANDEM_DEVICE float max_or_nan(float x, float y) {
  float larger;
  asm("max.NaN.ftz.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}
