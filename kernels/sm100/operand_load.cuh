// Loads of the operands of products. With T.leader_counts() the barriers of a CTA pair's first CTA, which issues the
// products, count the bytes of both CTAs.
#pragma once
#include "device/cta_pair.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

// Arrives at an operand's barrier. bytes: of one CTA.
template <auto T>
TANDEM_DEVICE void expect_operand(u64* barrier, u32 bytes) {
  if (!T.leader_counts()) return mbarrier_expect_tx(barrier, bytes);
  if (cta_rank<T>() == 0) mbarrier_expect_tx(barrier, T.ctas() * bytes);
}
template <auto T, class... Coords>
TANDEM_DEVICE void load_operand(void* to, const void* map, u64* barrier, Coords... at) {
  if constexpr (T.leader_counts()) {
    tma_load_of_pair(to, map, barrier, at...);
  } else {
    tma_load(to, map, barrier, at...);
  }
}
