// A modification: the text of the language that docs/score_mod.md describes, read into a graph.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "score_mod/graph.h"
#include "score_mod/tensor_view.h"

namespace tandem::score_mod {

// What a text may say by name besides score, batch, head, ...: scalars, whose value comes with each call, and tensors.
// rank 0 of a tensor: one value, which is named without [].
struct Name {
  std::string name;
  Type type = Type::real;
  int rank = 0;
  Element element = Element::f32;  // of a tensor: for what is printed
};

struct Signature {
  enum class Result : uint8_t { score, mask };  // gives a float, or a bool in which score has no meaning
  Result result = Result::score;
  std::vector<Name> scalars, tensors;
};

struct Mod {
  Signature signature;
  Graph graph;
  NodeId result = kNoNode;
};

// What bounds the work that a text can ask for.
inline constexpr size_t kMaxText = 16384;  // bytes
inline constexpr size_t kMaxName = 64;
inline constexpr int kMaxNodes = 2048;  // of a graph before it is differentiated
inline constexpr int kMaxDepth = 64;    // of parentheses, calls, indices, signs and conditions in each other
inline constexpr size_t kMaxNames = 32;

// Refuses a text with the column and one sentence; names that cannot be names with the name.
Status parse(std::string_view text, const Signature& signature, Mod* mod);

}  // namespace tandem::score_mod
