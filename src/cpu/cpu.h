// The CPU engine: exact attention on SIMD units and threads. float32, bfloat16 and float16; pages in the
// forward.
#pragma once

#include <cstddef>
#include <string>

#include "cpu/threads.h"
#include "problem/append_kv.h"
#include "problem/make_blocks.h"
#include "problem/merge.h"
#include "problem/problem.h"

namespace tandem::cpu {

// Returns ok, or the reason why this engine cannot serve a valid problem.
Status check(const Problem& problem);

// Returns the scratch bytes for forward or backward (by problem.pass) on this number of threads. The bytes depend only
// on shapes and flags.
size_t workspace_size(const Problem& problem, int threads);

// workspace: workspace_size() bytes, any alignment. Results have the same bits for any number of threads.
void forward(const Problem& problem, Threads& threads, void* workspace);
void backward(const Problem& problem, Threads& threads, void* workspace);

// Merges float32, bfloat16 and float16 parts. The result has the same bits for any number of threads.
void merge(const MergeProblem& problem, Threads& threads);

// Writes the listed rows. The result has the same bits for any number of threads.
void append_kv(const AppendKvProblem& problem, const AppendRows& rows, Threads& threads);

// workspace: a byte for each block of the problem.
void make_blocks(const MakeBlocksProblem& problem, Threads& threads, std::byte* workspace);

// The instruction set for this machine, such as "avx512_bf16 with bfloat16 dot products".
std::string target_description();

}  // namespace tandem::cpu
