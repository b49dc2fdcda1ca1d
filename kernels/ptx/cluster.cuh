// Instructions between the CTAs of a cluster, which access each other's shared memory.
#pragma once
#include "ptx/base.cuh"

// Synchronizes all threads of all CTAs of the cluster and orders their memory accesses. PTX ISA "barrier.cluster".
TANDEM_DEVICE void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Arrives at the barrier at the same offset in the CTA with this rank. Orders tensor memory (with tcgen05_fence_before)
// and TMA writes; it orders ordinary writes only for threads of the same CTA. PTX ISA "mapa", "mbarrier.arrive".
TANDEM_DEVICE void mbarrier_arrive_at(u64* barrier, u32 rank) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
// Also orders ordinary writes of this thread and of the threads that it has synchronized with. The waiting thread must
// use mbarrier_wait_cluster. Costs a round trip to L2.
TANDEM_DEVICE void mbarrier_release_at(u64* barrier, u32 rank) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
// Stores a number at the same offset in the CTA with this rank. The number is visible after mbarrier_release_at. PTX
// ISA "st".
TANDEM_DEVICE void store_at(int* place, u32 rank, int value) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.b32 [there], %2;}" ::"r"(shared_address(place)),
      "r"(rank), "r"(value)
      : "memory");
}
// Copies bytes (a multiple of 16) from this CTA's shared memory to the CTA with this rank, and signals its barrier. One
// thread calls this function after the writers' fence_proxy_async. PTX ISA "cp.async.bulk".
TANDEM_DEVICE void bulk_send(void* to, const void* from, u32 bytes, u64* barrier, u32 rank) {
  asm volatile(
      "{.reg .b32 there, counts; mapa.shared::cluster.u32 there, %0, %4; mapa.shared::cluster.u32 counts, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %2, [counts];}" ::"r"(
          shared_address(to)),
      "r"(shared_address(from)), "r"(bytes), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}
// mbarrier_wait for a phase that other CTAs complete with mbarrier_release_at. PTX ISA "mbarrier.try_wait".
TANDEM_DEVICE void mbarrier_wait_cluster(u64* barrier, u32 parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done:}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Cluster launch control: requests the blocks of a cluster that has not begun. One thread of one CTA calls it. The
// 16-byte response is written in every CTA (ctas > 1). After a response without blocks a further request is undefined.
// PTX ISA "clusterlaunchcontrol.try_cancel".
template <int ctas>
TANDEM_DEVICE void clc_try_cancel(void* answer, u64* barrier) {
  if constexpr (ctas > 1) {
    asm volatile(
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 "
        "[%0], [%1];" ::"r"(shared_address(answer)),
        "r"(shared_address(barrier))
        : "memory");
  } else {
    asm volatile(
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];" ::"r"(
            shared_address(answer)),
        "r"(shared_address(barrier))
        : "memory");
  }
}
// Returns the x index of the first block of the response, or -1. PTX ISA "clusterlaunchcontrol.query_cancel".
TANDEM_DEVICE int clc_query_cancel(const void* answer) {
  int first;
  asm volatile(
      "{.reg .pred yes; .reg .b128 answer; .reg .b64 low, high;\n"
      "ld.shared.v2.b64 {low, high}, [%1];\n"
      "mov.b128 answer, {low, high};\n"
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 yes, answer;\n"
      "mov.b32 %0, -1;\n"
      "@yes clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %0, answer;}"
      : "=r"(first)
      : "r"(shared_address(answer))
      : "memory");
  return first;
}
