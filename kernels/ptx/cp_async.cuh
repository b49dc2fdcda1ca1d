// Copies from global to shared memory that a thread does not wait for (PTX ISA "cp.async"). Unlike those of TMA they
// need no alignment but that of 4 bytes, and each thread copies its own.
#pragma once
#include "ptx/base.cuh"

// given: so many of the bytes are read, the others are zeros.
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
// The thread's copies since the last commit become a group (PTX ISA "cp.async.commit_group").
TANDEM_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all of the thread's groups but the last `under_way` are there (PTX ISA "cp.async.wait_group").
template <int under_way>
TANDEM_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(under_way) : "memory");
}
