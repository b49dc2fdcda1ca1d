// The sequences of a backward: their queries, keys and m_blocks.
#pragma once
#include "config/backward_tiles.h"
#include "device/coords.cuh"

template <auto T>
TANDEM_DEVICE SequenceCoords sequence_coords(const BackwardParams& p, int sequence) {
  return sequence_coords(constant<T>, p, sequence);
}

template <auto T>
TANDEM_DEVICE int sequence_at(const BackwardParams& p, int m_block) {
  return sequence_at(constant<T>, p, m_block);
}
