// The meaning of expressions, and the position of an error in a malformed expression.
#include <cmath>

#include "unit/score_mod/texts.h"

namespace tandem::score_mod::test {
namespace {

void expect(const std::string& text, double wanted) {
  const double value = value_of(text);
  EXPECT_TRUE(value == wanted || (std::isnan(value) && std::isnan(wanted))) << text << " is " << value;
}

bool mask(const std::string& text) {
  static const Bound bound;
  return evaluate(parsed(text, Signature::Result::mask), 0, kSomewhere, bound.values) != 0;
}

std::string refusal(const std::string& text, Signature::Result result = Signature::Result::score) {
  Mod mod;
  const Status status = parse(text, signature(result), &mod);
  EXPECT_EQ(status.code, TANDEM_INVALID_ARGUMENT) << text;
  return status.message;
}

TEST(Parser, precedence_is_pythons) {
  expect("1 + 2 * 3", 7);
  expect("(1 + 2) * 3", 9);
  expect("2 - 3 - 4", -5);
  expect("1 | 6 ^ 3 & 2", 5);
  expect("1 << 2 + 1", 8);
  expect("-2 // 3 * 3", -3);
  expect("-7 % 3 + 1", 3);
  expect("1 if 0 <= k < 6 else 2", 1);
  expect("1 if k < q == true else 2", value_of("1 if k < q and q == 1 else 2"));
  expect("1 if not k == q else 2", 1);
  expect("1 if false else 2 if false else 3", 3);
  expect("select(k == 5 or 1 // 0 == 3 and false, 1, 2)", 1);
  expect("1 if k & 4 == 4 else 0", 1);  // & binds before ==
  expect("-q + +k - ~0", -1);
  expect("1 if !on && on || true else 0", 1);
}

TEST(Parser, names_and_types) {
  expect("score", 0.5);
  expect("batch + 10 * head + 100 * q + 1000 * k", 5721);
  expect("seqlen_q * seqlen_k", 99);
  expect("7 / 2", 3.5);
  expect("7 // 2", 3);
  expect("7.5 // 2", 3);
  expect("(k < q) * 2 + (k > q) * 3.5", 2);
  expect("float(7) / int(2.9)", 3.5);
  expect("1.0 if bool(-3) else 0", 1);
  expect("1e3 + .5 + 2. + 0x10", 1018.5);
  expect("0xffffffff", -1);
  expect("-inf", -INFINITY);
  expect("nan", NAN);
  expect("d = q - k; e = d * d;\n # what comes is its value\n e + d;", 6);
  expect("score = score * 2; score = score + 1; score", 2);
  expect("doc[1, 2] - doc[1][2] + table[2, 4] - table[2][4,]", 0);
  expect("temperature - temperature", 0);
  EXPECT_TRUE(mask("k <= q && doc[batch, 0] == doc[batch, 0]"));
  EXPECT_FALSE(mask("not (k <= q)"));
  EXPECT_TRUE(mask("where(k <= q, true, seen[k])"));
}

TEST(Parser, ints_wrap_around_and_never_trap) {
  expect("2147483647 + 1", -2147483648.0);
  expect("0x80000000 // -1", -2147483648.0);
  expect("0x80000000 % -1", 0);
  expect("abs(0x80000000)", -2147483648.0);
  expect("-0x80000000", -2147483648.0);
  expect("q // (k - 5)", 0);
  expect("q % (k - 5)", 7);
  expect("1 << 32", 0);
  expect("1 << -1", 0);
  expect("1 << 31", -2147483648.0);
  expect("-5 >> 40", -1);
  expect("5 >> -1", 0);
  expect("int(1e30)", 2147483647);
  expect("int(-inf)", -2147483648.0);
  expect("int(nan)", 0);
  expect("65536 * 65536", 0);
}

TEST(Parser, floats_are_ieee_and_torchs) {
  expect("1 / 0", INFINITY);
  expect("0 / 0", NAN);
  expect("-7.0 % 3", 2);
  expect("7.0 % -3", -2);
  expect("-7.0 // 2", -4);
  expect("1.0 // 0", INFINITY);
  expect("min(nan, 1)", NAN);
  expect("max(1, nan)", NAN);
  expect("clamp(nan, 0, 1)", NAN);
  expect("clamp(3, 0.0, 2)", 2);
  expect("clamp(-3, 0, 2)", 0);
  expect("round(2.5) + round(3.5)", 6);
  expect("floor(-0.5) + ceil(0.5) + trunc(-1.5)", -1);
  expect("sign(-2.5) + sign(0.0) + sign(nan) + sign(-3)", -2);
  expect("sqrt(-1)", NAN);
  expect("log(0)", -INFINITY);
  expect("sin(0) + cos(0) + erf(0) + expm1(0) + log1p(0)", 1);
  expect("sigmoid(0) + tanh(0) + exp2(3) + log2(8) + sqrt(4) + exp(0)", 14.5);
}

TEST(Parser, gathers_stay_in_their_tensors) {
  expect("table[-7, 100] - table[0, 4]", 0);
  expect("slope[0x80000000] - slope[0]", 0);
  expect("slope[0x7fffffff] - slope[3]", 0);
}

TEST(Parser, refusals_name_the_column) {
  EXPECT_EQ(refusal("score - slpoe[head]"),
            "column 9: 'slpoe' is not a known name: use score, batch, head, q, k, seqlen_q, seqlen_k, c, n, on, "
            "slope, table, doc, seen, temperature, or a function");
  EXPECT_EQ(refusal(""), "column 1: expected an expression for the result, found the end of the expression");
  EXPECT_EQ(refusal("score +"), "column 8: expected a number, a name or '(', found the end of the expression");
  EXPECT_EQ(refusal("x = 1;\n x + ? 1"), "line 2, column 6: '?' is not an operator: write a if condition else b");
  EXPECT_EQ(refusal("score 1"), "column 7: expected an operator or the end, found '1'");
  EXPECT_EQ(refusal("score ** 2"), "column 7: '**' is not an operator: write x * x, or exp2(y * log2(x))");
  EXPECT_EQ(refusal("slope[head"), "column 11: expected ',' or ']', found the end of the expression");
  EXPECT_EQ(refusal("slope[head, 1]"),
            "column 1: 'slope' has 1 dimension, and 2 indices are given: write one index per dimension");
  EXPECT_EQ(refusal("slope[1.5]"), "column 7: an index must be an int, not a float: convert the value with int(...)");
  EXPECT_EQ(refusal("score[1]"), "column 6: only a tensor has elements: use one index per dimension");
  EXPECT_EQ(refusal("min(1)"), "column 1: 'min' takes 2 arguments, not 1: correct the arguments");
  EXPECT_EQ(refusal("exp 1"), "column 5: expected '(', because 'exp' is a function, found '1'");
  EXPECT_EQ(refusal("1 if score else 2"), "column 6: 'if' takes a bool, not a float: compare the value, as in x != 0");
  EXPECT_EQ(refusal("score & 1"), "column 7: '&' takes ints or bools, not a float: convert the value with int(...)");
  EXPECT_EQ(refusal("(k < q) + (k > q)"), "column 9: '+' takes numbers, not two bools: use 'and' or 'or', or int(...)");
  EXPECT_EQ(refusal("k < q"), "column 1: a score_mod must return a float, not a bool: write select(..., score, -inf)");
  EXPECT_EQ(refusal("k - q", Signature::Result::mask),
            "column 1: a mask_mod must return a bool, not an int: compare the value");
  EXPECT_EQ(refusal("score > 0", Signature::Result::mask),
            "column 1: score must not be used in a mask_mod: remove score, because masks are evaluated before scores");
  EXPECT_EQ(refusal("q = 1; q"), "column 1: 'q' must be defined once: assign to another name");
  EXPECT_EQ(
      refusal("2147483648"),
      "column 1: '2147483648' must fit an int of 32 bits: write a float with a point, or the bits in hexadecimal");
  EXPECT_EQ(refusal("1e60"), "column 1: '1e60' must be in the range of float32, 1.4e-45 to 3.4e38: write inf or 0");
  EXPECT_EQ(refusal("1e-999"), "column 1: '1e-999' must be in the range of float32, 1.4e-45 to 3.4e38: write inf or 0");
  EXPECT_EQ(refusal("0x"), "column 1: '0x' must be a hexadecimal number of at most 32 bits: correct the digits");
  EXPECT_EQ(refusal("3x"),
            "column 2: '3' is a number, and 'x' must not follow it: put a space or an operator between them");
  EXPECT_EQ(refusal("score \xff"), "column 7: '?' must not be used here: remove this character");
}

TEST(Parser, is_bounded) {
  const auto repeated = [](const std::string& part, int n) {
    std::string text;
    for (int i = 0; i < n; ++i) text += part;
    return text;
  };
  for (const char* part : {"(", "-", "not ", "abs(", "slope[", "1 if on else ", "!"}) {
    EXPECT_NE(refusal(repeated(part, 5000 / static_cast<int>(std::string(part).size()))).find("nested in at most 64"),
              std::string::npos)
        << part;
  }
  EXPECT_EQ(refusal(std::string(16385, ' ')),
            "an expression must have at most 16384 bytes, not 16385: shorten the expression");
  std::string many = "x = score;";
  for (int i = 0; i < 1100; ++i) many += "x=x*x+q;";
  EXPECT_NE(refusal(many + "x").find("at most 2048 operations, names and numbers: shorten"), std::string::npos);
  expect(repeated("(", 60) + "1" + repeated(")", 60), 1);
}

TEST(Parser, names_must_be_names) {
  Mod mod;
  const auto with = [&](std::vector<Name> scalars, std::vector<Name> tensors = {}) {
    return parse("score",
                 {.result = Signature::Result::score, .scalars = std::move(scalars), .tensors = std::move(tensors)},
                 &mod)
        .message;
  };
  EXPECT_EQ(with({{"a", Type::real}}), "");
  EXPECT_EQ(with({{"if", Type::real}}), "the name 'if' must not be a word of the language: choose another");
  EXPECT_EQ(with({{"score", Type::real}}), "the name 'score' must not be a word of the language: choose another");
  EXPECT_EQ(with({{"a", Type::real}}, {{"a", Type::real, 1}}), "the name 'a' must be unique: rename one of the two");
  EXPECT_EQ(with({{"1a", Type::real}}),
            "the name '1a' must be letters, digits and '_', no digit first, and at most 64 of them: choose another");
  EXPECT_EQ(with({}, {{"a", Type::real, 5}}), "'a' has 5 dimensions and must have 0 to 4: reshape the tensor");
}

TEST(Values, must_be_those_of_the_text) {
  Bound bound;
  EXPECT_TRUE(check_values(signature(), bound.values).ok());
  bound.values.tensors[0].size[0] = 0;
  EXPECT_EQ(check_values(signature(), bound.values).message,
            "'slope' has no elements (dimension 0 is 0) and must have one: pass a tensor with elements");
  bound.values.tensors[0].rank = 2;
  EXPECT_EQ(check_values(signature(), bound.values).message,
            "'slope' must be float of 1 dimensions, not float of 2: convert or reshape the tensor");
  bound.values.scalars[1] = 0.5;
  EXPECT_EQ(check_values(signature(), bound.values).message,
            "'n' (0.5) must be an integer of 32 bits: pass a smaller or rounded number");
}

}  // namespace
}  // namespace tandem::score_mod::test
