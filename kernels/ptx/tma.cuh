// The tensor memory accelerator: bulk copies of boxes of a tensor (PTX ISA "cp.async.bulk.tensor"). tensor_map is the
// address of a CUtensorMap that the host has encoded.
#pragma once
#include "ptx/base.cuh"

// Loads a box to shared memory and signals its bytes on the barrier. Elements outside the tensor are zeros. One thread
// calls this function.
TANDEM_DEVICE void tma_load(void* to, const void* tensor_map, u64* barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(tensor_map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
TANDEM_DEVICE void tma_load(void* to, const void* tensor_map, u64* barrier, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(tensor_map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// Loads the box to the same offset in each CTA of the cluster whose rank's bit is set, and signals each CTA's barrier.
TANDEM_DEVICE void tma_load_multicast(void* to, const void* tensor_map, u64* barrier, u32 ctas, int c0, int c1, int c2,
                                      int c3) {
  asm volatile(
      "{.reg .b16 ctas; cvt.u16.u32 ctas, %3;\n"
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, "
      "%5, %6, %7}], [%2], ctas;}" ::"r"(shared_address(to)),
      "l"(tensor_map), "r"(shared_address(barrier)), "r"(ctas), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// Loads a box in one CTA of a pair, and signals its bytes on the barrier at the same offset in the first CTA. PTX ISA
// "cp.async.bulk.tensor", .cta_group::2.
TANDEM_DEVICE void tma_load_of_pair(void* to, const void* tensor_map, u64* barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %2, 0;\n"
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2 [%0], [%1, {%3, %4, "
      "%5, %6}], [there];}" ::"r"(shared_address(to)),
      "l"(tensor_map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
TANDEM_DEVICE void tma_load_of_pair(void* to, const void* tensor_map, u64* barrier, int c0, int c1, int c2, int c3,
                                    int c4) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %2, 0;\n"
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2 [%0], [%1, {%3, %4, "
      "%5, %6, %7}], [there];}" ::"r"(shared_address(to)),
      "l"(tensor_map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// Stores a box; elements outside the tensor are not written. One thread calls this function, after the writers'
// fence_proxy_async and a barrier.
TANDEM_DEVICE void tma_store(const void* tensor_map, const void* from, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(tensor_map),
      "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
TANDEM_DEVICE void tma_store(const void* tensor_map, const void* from, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(tensor_map),
               "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
// Loads contiguous bytes (a multiple of 16) without a tensor map. One thread calls this function. PTX ISA
// "cp.async.bulk".
TANDEM_DEVICE void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
TANDEM_DEVICE void bulk_store(void* to, const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
// Adds float32 numbers to global memory. PTX ISA "cp.reduce.async.bulk".
TANDEM_DEVICE void bulk_add(float* to, const float* from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
TANDEM_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the last `pending` store groups of this thread have read their source.
template <int pending = 0>
TANDEM_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
template <int pending = 0>
TANDEM_DEVICE void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}
// PTX ISA "prefetch.tensormap".
TANDEM_DEVICE void prefetch_tensor_map(const void* tensor_map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
}

// Orders ordinary writes to shared memory before reads by TMA and the tensor core. Every writing thread calls this
// function before a barrier.
TANDEM_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
