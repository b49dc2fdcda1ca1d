// mbarrier objects in shared memory (PTX ISA "Parallel Synchronization: mbarrier"). A phase completes after its
// expected arrivals and its expected bytes.
#pragma once
#include "ptx/base.cuh"

// One thread calls this function before any use; a fence_mbarrier_init and a CTA barrier must follow.
TANDEM_DEVICE void mbarrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the async proxy (TMA).
TANDEM_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
TANDEM_DEVICE void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and adds this many bytes to the expected bytes of the phase.
TANDEM_DEVICE void mbarrier_expect_tx(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Waits for the phase with this parity. Returns immediately for parity 1 of a fresh barrier.
TANDEM_DEVICE void mbarrier_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done:}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Returns true if the phase with this parity has completed.
TANDEM_DEVICE bool mbarrier_test(u64* barrier, u32 parity) {
  u32 there;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(there)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return there != 0;
}
