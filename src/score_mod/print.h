// Prints a graph as CUDA C++: one line per operation, a call of a function in kernels/device/mod_functions.cuh.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "score_mod/parser.h"

namespace tandem::score_mod {

// Nodes that are members of `row` and of `key`, with the names of their values.
struct Held {
  std::vector<NodeId> rows, keys;
};

// Prints the nodes that results need, as the body of a function of `score`, `at` (a ModPlace) and `names` (a ModNames).
// A node's variable is `v` and its number.
std::string print_values(const Mod& mod, std::span<const NodeId> results, const Held& held = {});

// Prints the whole body, which returns result.
std::string print(const Mod& mod, NodeId result, const Held& held = {});

// Returns the costly nodes that all scores of a row (of a key) share and need: at most `most` nodes.
std::vector<NodeId> held_by_rows(const Mod& mod, NodeId result, size_t most);
std::vector<NodeId> held_by_keys(const Mod& mod, NodeId result, size_t most);

// Returns true if each score needs few operations in addition to the row's values, and no loads. The registers of a few
// scores suffice.
bool is_light(const Mod& mod, NodeId result);
// Counts the operations per score in addition to the values of rows and keys. A costly operation counts as
// kCostlyOperations.
constexpr int kCostlyOperations = 100;
int operations_of_mask(const Mod& mod, const Held& held);

// Prints a line that prefetches the element of a gather. The values of its indices must be printed before it.
std::string print_touch(const Mod& mod, NodeId gather);

// Prints the nodes with ranges for a block: `at` is a RangePlace, and the functions are in
// kernels/device/mod_range.cuh.
std::string print_range_values(const Mod& mod, std::span<const NodeId> results);
std::string print_ranges(const Mod& mod, NodeId result);

}  // namespace tandem::score_mod
