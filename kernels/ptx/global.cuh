// Counters in global memory that synchronize CTAs (PTX ISA "ld", "red"), and global accesses that C++ cannot express.
#pragma once
#include "ptx/base.cuh"

// Loads with acquire semantics: writes before another CTA's releasing addition are visible afterwards.
TANDEM_DEVICE int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
// Loads without memory order. A later fence_gpu() acquires the value.
TANDEM_DEVICE int load_relaxed(const int* from) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
TANDEM_DEVICE void add_relaxed(int* to, int value) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
// Acquires the values of earlier loads, and releases earlier writes with later additions. PTX ISA "fence".
TANDEM_DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
TANDEM_DEVICE void add_release(int* to, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
// Returns the old value. Acquires the writes of earlier adders and releases the writes of this thread.
TANDEM_DEVICE int add_acquire_release(int* to, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}
// Prefetches a line to this SM's L1 (PTX ISA "prefetch"). Any address of a tensor is allowed.
TANDEM_DEVICE void prefetch_global(const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }
// Adds or stores without memory order. The results are exact, so that they do not depend on the order.
TANDEM_DEVICE void global_add(u64* to, u64 x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}
TANDEM_DEVICE void global_or(u64* to, u64 x) {
  asm volatile("red.relaxed.gpu.global.or.b64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}
// Orders other CTAs' bulk copies before a wait, and this CTA's copies to the same address after it. PTX ISA
// "fence.proxy.async".
TANDEM_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
TANDEM_DEVICE void global_add(float4* to, float4 x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}
// Stores 16 bytes. The compiler sometimes splits an assignment into four stores.
TANDEM_DEVICE void global_store(u16* to, const u32 (&x)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
