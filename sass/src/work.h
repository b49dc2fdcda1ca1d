// The purpose of the instructions of a loop, and the role that follows from it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "sass/src/sass.h"

namespace tandem::machine_code {

enum class Role {
  load,        // starts copies into shared memory
  mma,         // products of the tensor core without exponentials
  softmax,     // exponentials without products
  computing,   // both products and exponentials
  correction,  // reads tensor memory and writes it back
  staging,     // copies results of a step to shared memory
  reduction,   // adds results to global memory
  epilogue,    // stores results once per tile of rows
  relay,       // only passes signals on; not counted
};
std::string_view name_of(Role role);

struct Work {
  int products = 0;       // products of the tensor core
  int sums = 0;           // products that begin a sum
  int of_scores = 0;      // products that add to sums begun here
  int value_columns = 0;  // columns of the other products; 0: unknown
  int depth = 0;          // elements that a product sums
  int exponentials = 0;   // per thread: by the unit, or by a polynomial
  int packs = 0;          // packs of two numbers into one register
  int loads = 0, stores = 0, reductions = 0;
  int columns_read = 0, columns_written = 0;  // tensor memory columns of a warp
  int votes = 0, waits = 0, arrivals = 0;
  int semaphores = 0;         // acquiring loads and releasing additions
  bool synchronised = false;  // waits for other warps or for copies
  bool of_gradients = false;  // the kernel is known to be a backward pass

  // Scores that a thread turns into exponentials. Rescaling and softcap need exponentials too, and a backward pass
  // packs two matrices. Therefore the smaller count is the number of scores.
  int scores() const;
  bool backward() const { return scores() > 0 && (of_gradients || packs >= scores()); }
  std::optional<Role> role() const;  // empty: the loop has no work of a role
};

// path: indices of instructions.
Work work_of(const std::vector<Instruction>& code, const std::vector<int32_t>& path);

}  // namespace tandem::machine_code
