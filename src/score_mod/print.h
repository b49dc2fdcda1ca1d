// A graph as CUDA C++: one line for each operation, a call of kernels/device/mod_functions.cuh.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "score_mod/parser.h"

namespace tandem::score_mod {

// Nodes that are members of `row`, and of `key`, by the names that they have as values.
struct Held {
  std::vector<NodeId> rows, keys;
};

// What results need, as the body of a function of `score`, `at` (a ModPlace) and `names` (a ModNames) has it: a node is
// `v` and its number.
std::string print_values(const Mod& mod, std::span<const NodeId> results, const Held& held = {});

// The whole body, which ends by returning result.
std::string print(const Mod& mod, NodeId result, const Held& held = {});

// What is the same for all scores of a row (of a key), costs something, and is needed for its scores: `most` nodes of
// each at most.
std::vector<NodeId> held_by_rows(const Mod& mod, NodeId result, size_t most);
std::vector<NodeId> held_by_keys(const Mod& mod, NodeId result, size_t most);

// Few operations for each score beside what rows hold, and no loads: registers of a few scores do.
bool is_light(const Mod& mod, NodeId result);
// For each score beside what rows and keys hold, those of one instruction or two; a costly one counts as many.
constexpr int kCostlyOperations = 100;
int operations_of_mask(const Mod& mod, const Held& held);

// A line that fetches what a gather reads. Its indices' values are printed before it.
std::string print_touch(const Mod& mod, NodeId gather);

// The same of ranges for a block: of `at`, a RangePlace, and `names`, by the calls of kernels/device/mod_range.cuh.
std::string print_range_values(const Mod& mod, std::span<const NodeId> results);
std::string print_ranges(const Mod& mod, NodeId result);

}  // namespace tandem::score_mod
