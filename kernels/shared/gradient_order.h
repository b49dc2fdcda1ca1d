// In which order a backward's main kernel leaves dq in workspace: that in which its threads hold it, which is the
// kernel's. A thread has pairs of neighbouring columns, and two pairs one behind the other in memory, 16 bytes; those
// of 128 threads follow each other.
#pragma once

// The place of a pair in its m_block.
struct DqPair {
  int row, column;
};
