// Asynchronous copies from global to shared memory (PTX ISA "cp.async"). The copies need only 4-byte alignment, unlike
// TMA, and each thread copies its own bytes.
#pragma once
#include "ptx/base.cuh"

// Copies the first `given` bytes and fills the rest with zeros.
template <int bytes>
TANDEM_DEVICE void cp_async(u32 to, const void* from, int given) {
  static_assert(bytes == 4 || bytes == 16);
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(given) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(given) : "memory");
  }
}
TANDEM_DEVICE void cp_async_16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Commits the thread's copies since the last commit as one group (PTX ISA "cp.async.commit_group").
TANDEM_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Arrives when the thread's earlier copies are complete. The barrier's count includes this arrival (PTX ISA
// "cp.async.mbarrier.arrive").
TANDEM_DEVICE void cp_async_arrive(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Waits until at most the last `under_way` groups of this thread are outstanding (PTX ISA "cp.async.wait_group").
template <int under_way>
TANDEM_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(under_way) : "memory");
}
