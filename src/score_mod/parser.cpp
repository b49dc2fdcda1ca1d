#include "score_mod/parser.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>

#include "base/text.h"
#include "score_mod/lexer.h"
#include "score_mod/typing.h"

namespace tandem::score_mod {
namespace {

struct BinaryOperator {
  std::string_view mark;
  int precedence;  // a higher value binds tighter
  Op op;
};

// Python's precedence: every binary operator binds tighter than comparisons.
constexpr int kBitOr = 1, kBitXor = 2, kBitAnd = 3, kShift = 4, kSum = 5, kProduct = 6;
constexpr BinaryOperator kBinaryOperators[] = {
    {"|", kBitOr, Op::bit_or},          {"^", kBitXor, Op::bit_xor},     {"&", kBitAnd, Op::bit_and},
    {"<<", kShift, Op::shift_left},     {">>", kShift, Op::shift_right}, {"+", kSum, Op::add},
    {"-", kSum, Op::subtract},          {"*", kProduct, Op::multiply},   {"/", kProduct, Op::divide},
    {"//", kProduct, Op::floor_divide}, {"%", kProduct, Op::modulo}};

struct Comparison {
  std::string_view mark;
  Op op;
  bool swapped;
};
constexpr Comparison kComparisons[] = {{"<", Op::less, false},   {"<=", Op::less_equal, false},
                                       {">", Op::less, true},    {">=", Op::less_equal, true},
                                       {"==", Op::equal, false}, {"!=", Op::not_equal, false}};

template <class Entry, size_t n>
const Entry* find(const Entry (&entries)[n], const Token& token) {
  const auto* found = std::find_if(entries, entries + n, [&](const Entry& entry) { return token.is(entry.mark); });
  return found == entries + n ? nullptr : found;
}

constexpr std::string_view kWords[] = {"and",   "or",   "not",   "if",  "else", "true",
                                       "false", "True", "False", "inf", "nan"};

std::optional<Input> find_input(std::string_view name) {
  for (int i = 0; i < kInputs; ++i) {
    if (name == name_of(static_cast<Input>(i))) return static_cast<Input>(i);
  }
  return {};
}

bool is_word(std::string_view name) {
  return std::find(std::begin(kWords), std::end(kWords), name) != std::end(kWords);
}

const Name* find(const std::vector<Name>& names, std::string_view name) {
  const auto found = std::find_if(names.begin(), names.end(), [name](const Name& n) { return n.name == name; });
  return found == names.end() ? nullptr : &*found;
}

class Parser {
 public:
  Parser(std::string_view text, Mod& mod) : lexer_(text), mod_(mod), typing_(lexer_, mod.graph) {}

  NodeId run() {
    while (begins_assignment()) assign();
    if (lexer_.peek().kind == Token::Kind::end) lexer_.unexpected("an expression for the result");
    const Term value = expression();
    lexer_.accept(";");
    if (lexer_.peek().kind != Token::Kind::end) lexer_.unexpected("an operator or the end");
    return result(value);
  }

 private:
  // Counts the nesting of expressions.
  class Depth {
   public:
    explicit Depth(Parser& parser) : parser_(parser) {
      if (++parser_.depth_ <= kMaxDepth) return;
      parser_.lexer_.refuse(parser_.lexer_.peek().at, str_cat("this expression must be nested in at most ", kMaxDepth,
                                                              " expressions: assign a part to a name, as in x = ...;"));
    }
    Depth(const Depth&) = delete;
    ~Depth() { --parser_.depth_; }

   private:
    Parser& parser_;
  };

  NodeId result(const Term& value) {
    const Type type = typing_.type(value);
    if (mod_.signature.result == Signature::Result::mask) {
      if (type == Type::boolean) return value.id;
      lexer_.refuse(value.at,
                    str_cat("a mask_mod must return a bool, not ", with_article(type), ": compare the value"));
    }
    if (type != Type::boolean) return mod_.graph.convert(value.id, Type::real);
    lexer_.refuse(value.at, "a score_mod must return a float, not a bool: write select(..., score, -inf)");
  }

  bool begins_assignment() const {
    Lexer ahead = lexer_;
    return ahead.take().kind == Token::Kind::name && ahead.peek().is("=");
  }

  void assign() {
    const Token name = lexer_.take();
    const bool is_score = name.text == "score" && mod_.signature.result == Signature::Result::score;
    if (is_word(name.text) || is_function(name.text) || (find_input(name.text) && !is_score) ||
        find(mod_.signature.scalars, name.text) || find(mod_.signature.tensors, name.text)) {
      lexer_.refuse(name.at, str_cat(quote(name.text), " must be defined once: assign to another name"));
    }
    lexer_.take();
    Term value = expression();
    if (!lexer_.accept(";")) lexer_.unexpected("an operator or ';'");
    if (is_score && typing_.type(value) != Type::boolean) value.id = mod_.graph.convert(value.id, Type::real);
    locals_.insert_or_assign(name.text, value.id);
  }

  // Parses: a if condition else b.
  Term expression() {
    const Depth depth(*this);
    const Term a = disjunction();
    if (!lexer_.peek().is("if")) return a;
    const Token mark = lexer_.take();
    const Term condition = disjunction();
    lexer_.expect("else");
    const Term b = expression();
    Term chosen = made(typing_.select(mark, condition, a, b));
    chosen.at = a.at;
    return chosen;
  }

  Term disjunction() {
    Term a = conjunction();
    while (lexer_.peek().is("or") || lexer_.peek().is("||")) {
      const Token mark = lexer_.take();
      a = made(typing_.logic(mark, Op::bit_or, a, conjunction()));
    }
    return a;
  }

  Term conjunction() {
    Term a = inversion();
    while (lexer_.peek().is("and") || lexer_.peek().is("&&")) {
      const Token mark = lexer_.take();
      a = made(typing_.logic(mark, Op::bit_and, a, inversion()));
    }
    return a;
  }

  Term inversion() {
    if (!lexer_.peek().is("not")) return comparison();
    const Depth depth(*this);
    const Token mark = lexer_.take();
    return made(typing_.negation(mark, inversion()));
  }

  // Parses 0 <= a < n: each adjacent pair is compared, as in Python.
  Term comparison() {
    Term left = binary(kBitOr), all;
    while (const Comparison* comparison = find(kComparisons, lexer_.peek())) {
      const Token mark = lexer_.take();
      const Term right = binary(kBitOr);
      const Term &a = comparison->swapped ? right : left, &b = comparison->swapped ? left : right;
      Term one = made(typing_.compare(mark, comparison->op, a, b));
      one.at = left.at;
      all = all.id == kNoNode ? one : made(typing_.logic(mark, Op::bit_and, all, one));
      left = right;
    }
    return all.id == kNoNode ? left : all;
  }

  Term binary(int precedence) {
    if (precedence > kProduct) return sign();
    Term a = binary(precedence + 1);
    for (;;) {
      const BinaryOperator* found = find(kBinaryOperators, lexer_.peek());
      if (!found || found->precedence != precedence) return a;
      const Token mark = lexer_.take();
      a = made(typing_.binary(mark, found->op, a, binary(precedence + 1)));
    }
  }

  Term sign() {
    const Token mark = lexer_.peek();
    if (mark.is("!")) {  // binds as tightly as in C
      const Depth depth(*this);
      lexer_.take();
      return made(typing_.negation(mark, sign()));
    }
    if (!mark.is("-") && !mark.is("+") && !mark.is("~")) return operand();
    const Depth depth(*this);
    lexer_.take();
    return made(typing_.sign(mark, sign()));
  }

  Term operand() {
    const Token token = lexer_.peek();
    Term value;
    if (lexer_.accept("(")) {
      value = expression();
      value.at = token.at;
      lexer_.expect(")");
    } else if (token.kind == Token::Kind::integer || token.kind == Token::Kind::real) {
      lexer_.take();
      const Type type = token.kind == Token::Kind::integer ? Type::integer : Type::real;
      value = made({mod_.graph.constant(type, token.value), token.at});
    } else if (token.kind == Token::Kind::name) {
      lexer_.take();
      value = made({named(token), token.at});
    } else {
      lexer_.unexpected("a number, a name or '('");
    }
    const Token& next = lexer_.peek();
    if (next.is("**")) lexer_.refuse(next.at, "'**' is not an operator: write x * x, or exp2(y * log2(x))");
    if (next.is("[")) lexer_.refuse(next.at, "only a tensor has elements: use one index per dimension");
    return value;
  }

  NodeId named(const Token& token) {
    Graph& graph = mod_.graph;
    const std::string_view name = token.text;
    const Signature& signature = mod_.signature;
    if (const auto local = locals_.find(name); local != locals_.end()) return local->second;
    if (is_function(name)) return call(token);
    if (name == "true" || name == "True") return graph.boolean(true);
    if (name == "false" || name == "False") return graph.boolean(false);
    if (name == "inf") return graph.real(std::numeric_limits<double>::infinity());
    if (name == "nan") return graph.real(std::numeric_limits<double>::quiet_NaN());
    if (const auto input = find_input(name)) {
      if (*input == Input::score && signature.result == Signature::Result::mask) {
        lexer_.refuse(token.at,
                      "score must not be used in a mask_mod: remove score, because masks are evaluated before scores");
      }
      return graph.input(*input);
    }
    if (const Name* scalar = find(signature.scalars, name)) {
      return graph.scalar(static_cast<int>(scalar - signature.scalars.data()), scalar->type);
    }
    if (const Name* tensor = find(signature.tensors, name)) {
      return gather(token, *tensor, static_cast<int>(tensor - signature.tensors.data()));
    }
    if (is_word(name)) lexer_.refuse(token.at, str_cat(quote(name), " must not be used here: remove this word"));
    lexer_.refuse(token.at, str_cat(quote(name), " is not a known name: use ", known_names()));
  }

  std::string known_names() const {
    std::string names;
    const bool mask = mod_.signature.result == Signature::Result::mask;
    for (int i = mask ? 1 : 0; i < kInputs; ++i) names += str_cat(i > mask ? ", " : "", name_of(static_cast<Input>(i)));
    for (const Name& scalar : mod_.signature.scalars) names += ", " + scalar.name;
    for (const Name& tensor : mod_.signature.tensors) names += ", " + tensor.name;
    return names + ", or a function";
  }

  NodeId call(const Token& name) {
    if (!lexer_.accept("(")) lexer_.unexpected(str_cat("'(', because ", quote(name.text), " is a function"));
    const std::vector<Term> arguments = list(")");
    return typing_.call(name, arguments).id;
  }

  // Parses t[i, j] or t[i][j].
  NodeId gather(const Token& name, const Name& tensor, int number) {
    std::vector<Term> indices;
    while (lexer_.accept("[")) {
      const std::vector<Term> more = list("]");
      indices.insert(indices.end(), more.begin(), more.end());
    }
    const auto rank = static_cast<size_t>(tensor.rank);
    if (indices.size() != rank) {
      lexer_.refuse(
          name.at,
          str_cat(quote(name.text), " has ", rank, rank == 1 ? " dimension, and " : " dimensions, and ", indices.size(),
                  indices.size() == 1 ? " index is given" : " indices are given", ": write one index per dimension"));
    }
    NodeId at[kMaxRank];
    for (size_t i = 0; i < rank; ++i) {
      if (typing_.type(indices[i]) != Type::integer) {
        lexer_.refuse(indices[i].at, str_cat("an index must be an int, not ", with_article(typing_.type(indices[i])),
                                             ": convert the value with int(...)"));
      }
      at[i] = indices[i].id;
    }
    return mod_.graph.gather(number, tensor.type, {at, rank});
  }

  // Parses expressions up to a closing mark, which is consumed too. A trailing comma is allowed, as in Python.
  std::vector<Term> list(std::string_view closing) {
    std::vector<Term> terms;
    while (!lexer_.peek().is(closing)) {
      if (terms.size() == kMaxRank) lexer_.unexpected(quote(closing));
      terms.push_back(expression());
      if (!lexer_.accept(",") && !lexer_.peek().is(closing)) lexer_.unexpected(str_cat("',' or ", quote(closing)));
    }
    lexer_.take();
    return terms;
  }

  Term made(const Term& term) const {
    if (mod_.graph.size() > kMaxNodes) {
      lexer_.refuse(term.at, str_cat("an expression must have at most ", kMaxNodes,
                                     " operations, names and numbers: shorten the expression"));
    }
    return term;
  }

  Lexer lexer_;
  Mod& mod_;
  Typing typing_;
  std::map<std::string_view, NodeId> locals_;
  int depth_ = 0;
};

Status check_name(const Name& name) {
  const std::string& text = name.name;
  const bool legal = !text.empty() && text.size() <= kMaxName && is_name_start(text[0]) &&
                     std::all_of(text.begin(), text.end(), is_name_part);
  if (!legal) {
    return Status::invalid(str_cat("the name ", quote(text),
                                   " must be letters, digits and '_', no digit first, and at ", "most ", kMaxName,
                                   " of them: choose another"));
  }
  if (is_word(text) || is_function(text) || find_input(text)) {
    return Status::invalid(str_cat("the name ", quote(text), " must not be a word of the language: choose another"));
  }
  if (name.rank < 0 || name.rank > kMaxRank) {
    return Status::invalid(
        str_cat(quote(text), " has ", name.rank, " dimensions and must have 0 to ", kMaxRank, ": reshape the tensor"));
  }
  return {};
}

Status check_names(const Signature& signature) {
  if (signature.scalars.size() + signature.tensors.size() > kMaxNames) {
    return Status::invalid(str_cat("an expression must have at most ", kMaxNames, " names of scalars and tensors, not ",
                                   signature.scalars.size() + signature.tensors.size(), ": remove names"));
  }
  std::vector<std::string_view> names;
  for (const auto* list : {&signature.scalars, &signature.tensors}) {
    for (const Name& name : *list) {
      TANDEM_TRY(check_name(name));
      names.push_back(name.name);
    }
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return {};
  return Status::invalid(str_cat("the name ", quote(*twice), " must be unique: rename one of the two"));
}

}  // namespace

Status parse(std::string_view text, const Signature& signature, Mod* mod) {
  TANDEM_TRY(check_names(signature));
  if (text.size() > kMaxText) {
    return Status::invalid(
        str_cat("an expression must have at most ", kMaxText, " bytes, not ", text.size(), ": shorten the expression"));
  }
  Mod read{.signature = signature, .graph = {}};
  try {
    read.result = Parser(text, read).run();
  } catch (const Refusal& refusal) {
    return refusal.status;
  }
  *mod = std::move(read);
  return {};
}

}  // namespace tandem::score_mod
