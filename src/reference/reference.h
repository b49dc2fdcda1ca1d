// The reference: float64 attention in one obvious loop nest, by which every engine is checked.
//
// Reads any dtype of the Problem, computes each entry in float64 and rounds once on the way out. It also serves float64
// tensors of the public interface, and page tables. O(seqlen_q * seqlen_k) time, O(seqlen_k) memory per thread of work.
#pragma once

#include <functional>

#include "problem/merge.h"
#include "problem/problem.h"

namespace tandem::reference {

// Runs body(0) ... body(tasks - 1), in any order, perhaps at once.
using ParallelFor = std::function<void(int64_t tasks, const std::function<void(int64_t)>& body)>;

void serial(int64_t tasks, const std::function<void(int64_t)>& body);

// problem.out and, where present, problem.lse. One task is one (sequence, query head).
void forward(const Problem& problem, const ParallelFor& parallel_for = serial);

// The gradients that are present. Uses problem.out and problem.lse only for their shapes: it recomputes both in
// float64. Results do not depend on parallel_for.
void backward(const Problem& problem, const ParallelFor& parallel_for = serial);

// problem.out and, where present, problem.lse, of parts of any types.
void merge(const MergeProblem& problem, const ParallelFor& parallel_for = serial);

}  // namespace tandem::reference
