// CTAs of a cluster, which reach each other's shared memory.
#pragma once
#include "ptx/base.cuh"

// All threads of all its CTAs. What was written before is seen after. PTX ISA "barrier.cluster".
TANDEM_DEVICE void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// At the barrier of this place in the CTA of this rank. Orders tensor memory (with tcgen05_fence_before) and what TMA
// has written; ordinary writes only after fence_cluster: an arrival that releases them costs a round trip to L2.
// "mapa", "mbarrier.arrive".
TANDEM_DEVICE void mbarrier_arrive_at(u64* barrier, u32 rank) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
// What this thread has written is seen in the whole cluster before what it does next. "fence".
TANDEM_DEVICE void fence_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }

// Cluster launch control: this cluster takes over the blocks of one that has not begun. One thread of one CTA asks; the
// answer, 16 bytes, and its count on a barrier come to this place in all CTAs (ctas > 1; else in this one). Not again
// after an answer was no. "clusterlaunchcontrol.try_cancel".
template <int ctas>
TANDEM_DEVICE void ask_for_blocks(void* answer, u64* barrier) {
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
// The first of those blocks, by x; -1: no. "clusterlaunchcontrol.query_cancel".
TANDEM_DEVICE int blocks_in(const void* answer) {
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
