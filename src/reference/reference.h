// The reference: float64 attention in one simple loop nest. Tests compare every engine with it.
//
// Reads any dtype of the Problem, computes each entry in float64 and rounds once on the way out. The reference also
// serves float64 tensors of the public interface, and page tables. Work takes O(seqlen_q * seqlen_k) time and
// O(seqlen_k) memory per thread.
#pragma once

#include <functional>

#include "problem/merge.h"
#include "problem/problem.h"

namespace tandem::reference {

// Runs body(0) ... body(tasks - 1), in any order, possibly at once.
using ParallelFor = std::function<void(int64_t tasks, const std::function<void(int64_t)>& body)>;

void serial(int64_t tasks, const std::function<void(int64_t)>& body);

// Writes problem.out and, if present, problem.lse. One task is one (sequence, query head).
void forward(const Problem& problem, const ParallelFor& parallel_for = serial);

// Computes the gradients that are present. Uses problem.out and problem.lse only for their shapes: it recomputes both
// in float64. Results do not depend on parallel_for.
void backward(const Problem& problem, const ParallelFor& parallel_for = serial);

// Merges parts of any types into problem.out and, if present, problem.lse.
void merge(const MergeProblem& problem, const ParallelFor& parallel_for = serial);

}  // namespace tandem::reference
