// Numbers in global memory by which CTAs tell each other what they have done (PTX ISA "ld", "red"); and other ways to
// it that the language has no words for.
#pragma once
#include "ptx/base.cuh"

// What others wrote before they added to it is seen after.
TANDEM_DEVICE int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
TANDEM_DEVICE void add_release(int* to, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
// What it was before. What those wrote who added before is seen after, too.
TANDEM_DEVICE int add_acquire_release(int* to, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}
// What is read there soon is on its way to this SM (PTX ISA "prefetch"). Any address of a tensor.
TANDEM_DEVICE void prefetch_global(const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }
// Sums, or bits, that are the same in any order.
TANDEM_DEVICE void global_add(u64* to, u64 x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}
TANDEM_DEVICE void global_or(u64* to, u64 x) {
  asm volatile("red.relaxed.gpu.global.or.b64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}
// Between waiting for another CTA's bulk copies and own ones to the same place, either way. "fence.proxy.async".
TANDEM_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
TANDEM_DEVICE void global_add(float4* to, float4 x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}
// 16 bytes. The compiler makes four stores of an assignment at times.
TANDEM_DEVICE void global_store(u16* to, const u32 (&x)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
