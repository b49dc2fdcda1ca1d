// A score or mask modification of a call: its text, and the values of its names.
#pragma once

#include <memory>
#include <vector>

#include "problem/problem.h"
#include "score_mod/program.h"

namespace tandem {

// The gradient of one tensor of an expression. Tables in which gradients are added up are compact: a tensor's gradient
// begins at `first` in the table of all gradients.
struct CapturedGradient {
  BiasView to;  // if it is not present, the gradient is not computed
  int64_t first = 0;

  // The cell of these indices, each clamped to its dimension.
  int64_t cell(const int32_t* indices, int rank) const {
    int64_t cell = 0;
    for (int i = 0; i < rank; ++i)
      cell = cell * to.shape[i] + score_mod::clamp_index(indices[i], static_cast<int32_t>(to.shape[i]));
    return first + cell;
  }
};

struct BoundExpression {
  std::shared_ptr<const score_mod::Program> program;
  score_mod::Values values;   // empty in a problem that is only checked or planned
  std::vector<DType> dtypes;  // types by tensor; gradients have the same order
  std::vector<CapturedGradient> gradients;
  int64_t cells = 0;  // elements of the table of all gradients; 0: no gradients
};

// Calls put(gradient, i, j, k, l, cell) for every element of every gradient that is computed.
template <class Put>
void each_captured(const BoundExpression& mod, Put&& put) {
  for (const CapturedGradient& gradient : mod.gradients) {
    if (!gradient.to) continue;
    const int64_t* n = gradient.to.shape;
    int64_t cell = gradient.first;
    for (int64_t i = 0; i < n[0]; ++i)
      for (int64_t j = 0; j < n[1]; ++j)
        for (int64_t k = 0; k < n[2]; ++k)
          for (int64_t l = 0; l < n[3]; ++l) put(gradient.to, gradient.to.at(i, j, k, l), cell++);
  }
}

}  // namespace tandem
