// The order of the gradient sums that the main kernel stores in workspace: its threads' fragment order. A thread has
// pairs of neighbouring columns. Two pairs are contiguous (16 bytes), and the 128 threads follow each other.
#pragma once

// The row and column of a pair in its m_block (dq) or n_block (dk, dv).
struct GradientPair {
  int row, column;
};
