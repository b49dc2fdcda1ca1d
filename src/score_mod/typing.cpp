#include "score_mod/typing.h"

#include <algorithm>

#include "base/text.h"

namespace tandem::score_mod {
namespace {

struct Function {
  std::string_view name;
  size_t arguments;
  Op op;
};

constexpr Function kFunctions[] = {
    {"abs", 1, Op::abs},         {"sign", 1, Op::sign},   {"floor", 1, Op::floor},   {"ceil", 1, Op::ceil},
    {"trunc", 1, Op::trunc},     {"round", 1, Op::round}, {"exp", 1, Op::exp},       {"exp2", 1, Op::exp2},
    {"log", 1, Op::log},         {"log2", 1, Op::log2},   {"expm1", 1, Op::expm1},   {"log1p", 1, Op::log1p},
    {"sin", 1, Op::sin},         {"cos", 1, Op::cos},     {"erf", 1, Op::erf},       {"tanh", 1, Op::tanh},
    {"sigmoid", 1, Op::sigmoid}, {"sqrt", 1, Op::sqrt},   {"float", 1, Op::to_real}, {"int", 1, Op::to_int},
    {"bool", 1, Op::not_equal},  {"min", 2, Op::min},     {"max", 2, Op::max},       {"clamp", 3, Op::clamp},
    {"select", 3, Op::select},   {"where", 3, Op::select}};

const Function* find_function(std::string_view name) {
  const auto* found = std::find_if(std::begin(kFunctions), std::end(kFunctions),
                                   [name](const Function& function) { return function.name == name; });
  return found == std::end(kFunctions) ? nullptr : found;
}

bool rounds(Op op) { return op == Op::floor || op == Op::ceil || op == Op::trunc || op == Op::round; }

}  // namespace

std::string_view with_article(Type type) {
  return type == Type::boolean ? "a bool" : type == Type::integer ? "an int" : "a float";
}

bool is_function(std::string_view name) { return find_function(name) != nullptr; }

void Typing::require_condition(const Token& mark, const Term& a) const {
  if (type(a) == Type::boolean) return;
  lexer_.refuse(a.at, str_cat(quote(mark.text), " takes a bool, not ", with_article(type(a)),
                              ": compare the value, as in x != 0"));
}

void Typing::require_number(const Token& mark, const Term& a) const {
  if (type(a) != Type::boolean) return;
  lexer_.refuse(a.at, str_cat(quote(mark.text), " takes numbers, not a bool: convert the value with int(...)"));
}

Term Typing::sign(const Token& mark, const Term& a) const {
  if (mark.text == "~") {
    if (type(a) == Type::real) {
      lexer_.refuse(mark.at, "'~' takes an int or a bool, not a float: convert the value with int(...)");
    }
    return make(mark.at, Op::flip, a.id);
  }
  require_number(mark, a);
  return mark.text == "+" ? Term{a.id, mark.at} : make(mark.at, Op::negate, a.id);
}

Term Typing::binary(const Token& mark, Op op, const Term& a, const Term& b) const {
  const Type common = common_type(a, b);
  const bool bits = op == Op::bit_and || op == Op::bit_or || op == Op::bit_xor;
  const bool shift = op == Op::shift_left || op == Op::shift_right;
  if ((bits || shift) && common == Type::real) {
    lexer_.refuse(mark.at, str_cat(quote(mark.text), " takes ints", bits ? " or bools" : "",
                                   ", not a float: convert the value with int(...)"));
  }
  if (!bits && common == Type::boolean) {
    lexer_.refuse(mark.at, str_cat(quote(mark.text), " takes numbers, not two bools: use 'and' or 'or', or int(...)"));
  }
  const Type to = op == Op::divide ? Type::real : common;
  return make(a.at, op, convert(a, to), convert(b, to));
}

Term Typing::compare(const Token& mark, Op op, const Term& a, const Term& b) const {
  const Type common = common_type(a, b);
  if (common == Type::boolean && op != Op::equal && op != Op::not_equal) {
    lexer_.refuse(mark.at, str_cat(quote(mark.text), " takes numbers, not two bools: use '==' or '!='"));
  }
  return make(a.at, op, convert(a, common), convert(b, common));
}

Term Typing::logic(const Token& mark, Op op, const Term& a, const Term& b) const {
  require_condition(mark, a);
  require_condition(mark, b);
  return make(a.at, op, a.id, b.id);
}

Term Typing::negation(const Token& mark, const Term& a) const {
  require_condition(mark, a);
  return make(mark.at, Op::flip, a.id);
}

Term Typing::select(const Token& mark, const Term& condition, const Term& a, const Term& b) const {
  require_condition(mark, condition);
  const Type common = common_type(a, b);
  return make(mark.at, Op::select, condition.id, convert(a, common), convert(b, common));
}

Term Typing::call_one(const Token& name, Op op, const Term& a) const {
  if (op == Op::to_real || op == Op::to_int || op == Op::not_equal) {
    return {convert(a, op == Op::to_real ? Type::real : op == Op::to_int ? Type::integer : Type::boolean), name.at};
  }
  require_number(name, a);
  if (op == Op::abs || op == Op::sign) return make(name.at, op, a.id);
  if (rounds(op) && type(a) == Type::integer) return {a.id, name.at};
  return make(name.at, op, convert(a, Type::real));
}

Term Typing::call(const Token& name, std::span<const Term> arguments) const {
  const Function& function = *find_function(name.text);
  if (arguments.size() != function.arguments) {
    lexer_.refuse(name.at,
                  str_cat(quote(name.text), " takes ", function.arguments, " argument",
                          function.arguments == 1 ? "" : "s", ", not ", arguments.size(), ": correct the arguments"));
  }
  if (function.op == Op::select) return select(name, arguments[0], arguments[1], arguments[2]);
  if (function.arguments == 1) return call_one(name, function.op, arguments[0]);
  for (const Term& argument : arguments) require_number(name, argument);
  const Term &a = arguments[0], &b = arguments[1];
  const Type common = common_type(a, b);
  if (function.op != Op::clamp) return make(name.at, function.op, convert(a, common), convert(b, common));
  const Term& c = arguments[2];
  const Type all = std::max(common, type(c));
  if (all == Type::real) return make(name.at, Op::clamp, convert(a, all), convert(b, all), convert(c, all));
  return make(name.at, Op::min, graph_.make(Op::max, a.id, b.id), c.id);  // ints have no derivative
}

}  // namespace tandem::score_mod
