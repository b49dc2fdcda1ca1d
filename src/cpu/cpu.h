// The CPU engine: exact attention on SIMD units and threads. float32, bfloat16 and float16; no page table.
#pragma once

#include <cstddef>
#include <string>

#include "cpu/threads.h"
#include "problem/make_blocks.h"
#include "problem/merge.h"
#include "problem/problem.h"

namespace tandem::cpu {

// Why this engine cannot serve a valid problem, or ok.
Status check(const Problem& problem);

// Scratch bytes for forward or backward (by problem.pass) on this many threads. Depends on shapes and flags only.
size_t workspace_size(const Problem& problem, int threads);

// workspace: workspace_size() bytes, any alignment. Results are the same bit for bit for any number of threads.
void forward(const Problem& problem, Threads& threads, void* workspace);
void backward(const Problem& problem, Threads& threads, void* workspace);

// Merges float32, bfloat16 and float16 parts. The result has the same bits for any number of threads.
void merge(const MergeProblem& problem, Threads& threads);

// workspace: a byte for each block of the problem.
void make_blocks(const MakeBlocksProblem& problem, Threads& threads, std::byte* workspace);

// "avx512_bf16 with bfloat16 dot products": the instruction set chosen for this machine.
std::string target_description();

}  // namespace tandem::cpu
