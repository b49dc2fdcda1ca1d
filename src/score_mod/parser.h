// Parses an expression of the language in docs/score_mod.md into a graph.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "score_mod/graph.h"
#include "score_mod/tensor_view.h"

namespace tandem::score_mod {

// A name that an expression may use in addition to score, batch, head, ...: a scalar, whose value each call passes, or
// a tensor. A tensor of rank 0 has one value and is used without [].
struct Name {
  std::string name;
  Type type = Type::real;
  int rank = 0;
  Element element = Element::f32;  // tensors only: type in printed code
};

struct Signature {
  enum class Result : uint8_t { score, mask };  // a float; or a bool, without access to score
  Result result = Result::score;
  std::vector<Name> scalars, tensors;
};

struct Mod {
  Signature signature;
  Graph graph;
  NodeId result = kNoNode;
};

// Limits of the work that an expression can cause.
inline constexpr size_t kMaxText = 16384;  // bytes
inline constexpr size_t kMaxName = 64;
inline constexpr int kMaxNodes = 2048;  // nodes of a graph before differentiation
inline constexpr int kMaxDepth = 64;    // nesting of parentheses, calls, indices, signs, conditions
inline constexpr size_t kMaxNames = 32;

// Refuses an invalid expression with the column and a message, and an invalid name with the name.
Status parse(std::string_view text, const Signature& signature, Mod* mod);

}  // namespace tandem::score_mod
