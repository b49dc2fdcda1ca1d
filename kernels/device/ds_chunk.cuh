// A dS chunk of a backward: the tiles whose dS is in global memory at once. The main kernel stores dS, then the dq
// kernel computes dq from it. Both kernels are launched once per chunk.
#pragma once
#include "config/backward_addresses.h"
#include "device/m_block_lists.cuh"
#include "device/sequence.cuh"

template <auto T>
TANDEM_DEVICE constexpr bool ds_gmem() {
  return uses_ds_gmem(constant<T>);
}

template <auto T>
TANDEM_DEVICE int first_n_block(const BackwardParams& p, const SequenceCoords& s, int m_block) {
  return first_n_block(constant<T>, p, s, m_block);
}

// The address of the dS of an m_block and n_block.
template <auto T>
TANDEM_DEVICE u16* ds_at(const BackwardParams& p, const SequenceCoords& s, const DsChunk& chunk, int head, int m_block,
                         int n_block) {
  return static_cast<u16*>(p.ds) + ds_at(constant<T>, p, s, chunk, {head, m_block, n_block});
}
