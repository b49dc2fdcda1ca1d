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

// At the barrier of this place in the CTA of this rank. Orders tensor memory (with tcgen05_fence_before) and what TMA has
// written; ordinary writes only after fence_cluster: an arrival that releases them costs a round trip to L2. "mapa",
// "mbarrier.arrive".
TANDEM_DEVICE void mbarrier_arrive_at(u64* barrier, u32 rank) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
// What this thread has written is seen in the whole cluster before what it does next. "fence".
TANDEM_DEVICE void fence_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }
