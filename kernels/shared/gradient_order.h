// In which order a backward's main kernel leaves sums in workspace: that in which its threads hold them, which is the
// kernel's. A thread has pairs of neighbouring columns, and two pairs one behind the other in memory, 16 bytes; those
// of 128 threads follow each other.
#pragma once

// The place of a pair of dq in its m_block, or of one of dk or dv in its n_block.
struct GradientPair {
  int row, column;
};
