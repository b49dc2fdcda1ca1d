// The sequences of a backward: their queries, keys and m_blocks.
#pragma once
#include "config/backward.h"
#include "device/coords.cuh"

// The forward's tile coordinates of a sequence, and its keys.
struct SequenceCoords : TileCoords {
  int k_rows;         // keys in memory; keys from k_len on are unused
  int first_m_block;  // among all m_blocks of a head in workspace
};

template <auto T>
TANDEM_DEVICE SequenceCoords sequence_coords(const BackwardParams& p, int sequence) {
  const int first_m_block = sequence * p.sequence_m_blocks;
  if constexpr (!T.options.varlen)
    return {{0, 0, sequence, sequence, 0, 0, p.seqlen_q, p.seqlen_q, p.seqlen_k}, p.seqlen_k, first_m_block};
  SequenceCoords s{varlen_coords(p, sequence), p.seqlen_k, first_m_block};
  if (p.cu_seqlens_k)
    s.k_rows = clamp(index_at(p.cu_seqlens_k, p.cu_seqlens_k_stride, sequence + 1), s.k_begin, p.total_k) - s.k_begin;
  if (p.cu_seqlens_q)
    s.first_m_block = s.q_begin / T.tile_m + sequence;  // the last m_block of a sequence may be partial
  return s;
}

// The sequence of a head's m_block in workspace.
template <auto T>
TANDEM_DEVICE int sequence_at(const BackwardParams& p, int m_block) {
  if (!T.options.varlen || !p.cu_seqlens_q) return m_block / p.sequence_m_blocks;
  int low = 0, high = p.batch - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    const int begin = clamp(index_at(p.cu_seqlens_q, p.cu_seqlens_q_stride, middle), 0, p.total_q);
    if (begin / T.tile_m + middle <= m_block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}
