// What the instructions of a loop are there for, and the role that follows from it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "sass/src/sass.h"

namespace tandem::machine_code {

enum class Role {
  load,        // starts copies into shared memory
  mma,         // products of the tensor core, no exponentials
  softmax,     // exponentials, no products
  computing,   // both
  correction,  // tensor memory is read and written back
  reduction,   // results are added up in global memory
  epilogue,    // results are stored: once for a tile of rows
  relay,       // passes signals on; such loops are no part of an account
};
std::string_view name_of(Role role);

struct Work {
  int products = 0;       // of the tensor core
  int sums = 0;           // of these, those that begin a sum
  int of_scores = 0;      // of these, those that add to sums that are begun here (tensor memory: from shared memory)
  int value_columns = 0;  // of the others; 0: they do not say
  int depth = 0;          // elements that a product sums up
  int exponentials = 0;   // of a thread: by the unit, or by a polynomial that begins by rounding down
  int packs = 0;          // two numbers become one register of narrower ones
  int loads = 0, stores = 0, reductions = 0;
  int columns_read = 0, columns_written = 0;  // of tensor memory, by a warp
  int votes = 0, waits = 0;
  bool synchronised = false;  // it waits for other warps or for copies
  bool of_gradients = false;  // of a kernel that is known to be a backward pass

  // Scores that a thread turns into exponentials. Rescaling and softcap take exponentials too, and a backward pass
  // packs two matrices: the scores are the lesser of both.
  int scores() const;
  bool backward() const { return scores() > 0 && (of_gradients || packs >= scores()); }
  std::optional<Role> role() const;  // none: it does nothing that a role would
};

// path: numbers of instructions.
Work work_of(const std::vector<Instruction>& code, const std::vector<int32_t>& path);

}  // namespace tandem::machine_code
