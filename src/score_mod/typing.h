// Types of operators and functions. Converts terms of an expression to nodes, with conversions from bool to int to
// float if operands differ. An invalid term is refused with its place.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "score_mod/graph.h"
#include "score_mod/lexer.h"

namespace tandem::score_mod {

// A part of the expression that has a value, and its place.
struct Term {
  NodeId id = kNoNode;
  size_t at = 0;
};

class Typing {
 public:
  Typing(const Lexer& lexer, Graph& graph) : lexer_(lexer), graph_(graph) {}

  Type type(const Term& term) const { return graph_[term.id].type; }

  // mark: the operator and its place.
  Term sign(const Token& mark, const Term& a) const;  // + - ~
  Term binary(const Token& mark, Op op, const Term& a, const Term& b) const;
  Term compare(const Token& mark, Op op, const Term& a, const Term& b) const;
  Term logic(const Token& mark, Op op, const Term& a, const Term& b) const;  // and, or
  Term negation(const Token& mark, const Term& a) const;                     // not
  Term select(const Token& mark, const Term& condition, const Term& a, const Term& b) const;
  Term call(const Token& name, std::span<const Term> arguments) const;

 private:
  Term make(size_t at, Op op, NodeId a, NodeId b = kNoNode, NodeId c = kNoNode) const {
    return {graph_.make(op, a, b, c), at};
  }
  Type common_type(const Term& a, const Term& b) const { return std::max(type(a), type(b)); }
  NodeId convert(const Term& a, Type to) const { return graph_.convert(a.id, to); }
  Term call_one(const Token& name, Op op, const Term& a) const;
  void require_condition(const Token& mark, const Term& a) const;
  void require_number(const Token& mark, const Term& a) const;

  const Lexer& lexer_;
  Graph& graph_;
};

std::string_view with_article(Type type);  // "a bool", "an int", "a float"
bool is_function(std::string_view name);

}  // namespace tandem::score_mod
