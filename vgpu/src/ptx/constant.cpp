#include "vgpu/src/ptx/constant.h"

#include <bit>
#include <charconv>

namespace tandem::vgpu::ptx {
namespace {

using Kind = Constant::Kind;

constexpr int kDeepest = 64;     // brackets, signs and ?: within each other
constexpr int kSum = 9;          // precedence of + and -
constexpr int kProduct = 10;     // precedence of * / %
constexpr int kConditional = 0;  // precedence of ?:

int precedence_of(const Token& token) {
  if (token.kind != Token::Kind::mark) return -1;
  struct Level {
    std::string_view mark;
    int precedence;
  };
  constexpr Level levels[] = {{"||", 1}, {"&&", 2},   {"|", 3},    {"^", 4},        {"&", 5},        {"==", 6},
                              {"!=", 6}, {"<", 7},    {"<=", 7},   {">", 7},        {">=", 7},       {"<<", 8},
                              {">>", 8}, {"+", kSum}, {"-", kSum}, {"*", kProduct}, {"/", kProduct}, {"%", kProduct}};
  for (const Level& level : levels) {
    if (token.text == level.mark) return level.precedence;
  }
  return -1;
}

Constant integer(uint64_t bits, bool is_unsigned = false) {
  return {is_unsigned ? Kind::unsigned_integer : Kind::signed_integer, bits};
}

template <class T>
bool digits(std::string_view text, int base, T* value) {
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, *value, base);
  return error == std::errc() && stopped == end;
}

// Reads 0f or 0d and all digits of the bits.
bool hex_real(std::string_view text, Constant* constant) {
  if (text.size() < 2 || text[0] != '0') return false;
  const char letter = static_cast<char>(text[1] | 0x20);
  if (letter != 'f' && letter != 'd') return false;
  constant->kind = letter == 'f' ? Kind::f32 : Kind::f64;
  return text.size() == (letter == 'f' ? 10 : 18) && digits(text.substr(2), 16, &constant->bits);
}

bool decimal_real(std::string_view text, Constant* constant) {
  if (text.find_first_not_of("0123456789.eE+-") != text.npos || text.find_first_of(".eE") == text.npos) return false;
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  *constant = {Kind::f64, std::bit_cast<uint64_t>(value)};
  return error == std::errc() && stopped == end;
}

bool whole(std::string_view text, Constant* constant) {
  const bool has_suffix = text.back() == 'U' || text.back() == 'u';
  if (has_suffix) text.remove_suffix(1);
  int base = 10;
  if (text.size() > 1 && text[0] == '0') {
    const char letter = static_cast<char>(text[1] | 0x20);
    base = letter == 'x' ? 16 : letter == 'b' ? 2 : 8;
    text.remove_prefix(base == 8 ? 1 : 2);
  }
  if (!digits(text, base, &constant->bits)) return false;
  // As in C, a value beyond the signed type is unsigned.
  constant->kind = has_suffix || constant->bits >> 63 ? Kind::unsigned_integer : Kind::signed_integer;
  return true;
}

class Expression {
 public:
  explicit Expression(Lexer& lexer) : lexer_(lexer) {}

  // Reads operators that bind at least as tightly as this precedence.
  Constant read(int precedence) {
    const Nesting nesting(*this);
    Constant left = read_factor();
    for (;;) {
      const int next = precedence_of(lexer_.peek());
      if (next < 0 || next < precedence) break;
      const Token mark = lexer_.take();
      left = apply(mark, left, read(next + 1));
    }
    if (precedence != kConditional || !lexer_.accept('?')) return left;
    need_integer(left);
    const Constant yes = read(kConditional);
    lexer_.expect(':');
    const Constant no = read(kConditional);
    return left.bits != 0 ? yes : no;
  }

 private:
  struct Nesting {
    explicit Nesting(Expression& e) : depth(e.depth_) {
      if (++depth > kDeepest) {
        refuse(e.lexer_.peek().line, "this constant expression must be nested less deeply: simplify it");
      }
    }
    ~Nesting() { --depth; }
    int& depth;
  };

  Constant read_factor() {
    const Nesting nesting(*this);
    const Token& next = lexer_.peek();
    if (next.is('-') || next.is('+') || next.is('!') || next.is('~')) {
      const char sign = lexer_.take().text[0];
      return apply_sign(sign, read_factor());
    }
    if (lexer_.accept('(')) return read_bracket();
    if (next.is(Token::Kind::word, "WARP_SZ")) {
      lexer_.take();
      return integer(32);
    }
    return read_number();
  }

  // "(4+4)", "(.u64) 5"
  Constant read_bracket() {
    const bool to_signed = lexer_.accept(std::string_view("s64"));
    const bool to_unsigned = !to_signed && lexer_.accept(std::string_view("u64"));
    if (!to_signed && !to_unsigned) {
      const Constant inner = read(kConditional);
      lexer_.expect(')');
      return inner;
    }
    lexer_.expect(')');
    const Constant value = read_factor();
    need_integer(value);
    return integer(value.bits, to_unsigned);
  }

  Constant read_number() {
    const Token number = lexer_.expect(Token::Kind::number, "a number");
    Constant constant;
    if (hex_real(number.text, &constant) || decimal_real(number.text, &constant) || whole(number.text, &constant)) {
      return constant;
    }
    refuse(number.line, quote(number.text) + " must be a number of at most 64 bits: correct the digits");
  }

  Constant apply_sign(char sign, Constant value) {
    if (value.is_real() && (sign == '-' || sign == '+')) {
      if (sign == '-') value.bits ^= uint64_t{1} << (value.kind == Kind::f32 ? 31 : 63);
      return value;
    }
    need_integer(value);
    switch (sign) {
      case '-': value.bits = 0 - value.bits; break;
      case '~': value.bits = ~value.bits; break;
      case '!': return integer(value.bits == 0);
      default: break;
    }
    // -9223372036854775808 is the smallest signed number.
    if (sign == '-' && value.bits == uint64_t{1} << 63) value.kind = Kind::signed_integer;
    return value;
  }

  Constant apply(const Token& mark, const Constant& a, const Constant& b) {
    need_integer(a), need_integer(b);
    const bool is_unsigned = a.kind == Kind::unsigned_integer || b.kind == Kind::unsigned_integer;
    const auto x = static_cast<int64_t>(a.bits), y = static_cast<int64_t>(b.bits);
    const auto less = [&] { return is_unsigned ? a.bits < b.bits : x < y; };
    const auto greater = [&] { return is_unsigned ? a.bits > b.bits : x > y; };
    const std::string_view m = mark.text;
    if (m == "+") return integer(a.bits + b.bits, is_unsigned);
    if (m == "-") return integer(a.bits - b.bits, is_unsigned);
    if (m == "*") return integer(a.bits * b.bits, is_unsigned);
    if (m == "/" || m == "%") return integer(divide(mark, a.bits, b.bits, is_unsigned), is_unsigned);
    if (m == "&") return integer(a.bits & b.bits, is_unsigned);
    if (m == "|") return integer(a.bits | b.bits, is_unsigned);
    if (m == "^") return integer(a.bits ^ b.bits, is_unsigned);
    if (m == "&&") return integer(a.bits != 0 && b.bits != 0);
    if (m == "||") return integer(a.bits != 0 || b.bits != 0);
    if (m == "==") return integer(a.bits == b.bits);
    if (m == "!=") return integer(a.bits != b.bits);
    if (m == "<") return integer(less());
    if (m == ">") return integer(greater());
    if (m == "<=") return integer(!greater());
    if (m == ">=") return integer(!less());
    return shift(mark, a, b.bits);
  }

  static uint64_t divide(const Token& mark, uint64_t a, uint64_t b, bool is_unsigned) {
    if (b == 0) refuse(mark.line, "a constant expression must not divide by zero: correct the divisor");
    const bool quotient = mark.is('/');
    if (is_unsigned) return quotient ? a / b : a % b;
    if (b == ~uint64_t{0}) return quotient ? 0 - a : 0;  // the one signed division that could overflow
    const auto x = static_cast<int64_t>(a), y = static_cast<int64_t>(b);
    return static_cast<uint64_t>(quotient ? x / y : x % y);
  }

  static Constant shift(const Token& mark, Constant a, uint64_t by) {
    if (by > 63) {
      refuse(mark.line, "the shift (" + std::to_string(by) + ") of a constant must be at most 63: correct the shift");
    }
    if (mark.text == "<<") {
      a.bits <<= by;
    } else if (a.kind == Kind::unsigned_integer) {
      a.bits >>= by;
    } else {
      a.bits = static_cast<uint64_t>(static_cast<int64_t>(a.bits) >> by);
    }
    return a;
  }

  void need_integer(const Constant& value) const {
    if (value.is_real()) {
      refuse(lexer_.peek().line, "a constant expression must have integers only: write the real number alone");
    }
  }

  Lexer& lexer_;
  int depth_ = 0;
};

}  // namespace

bool at_constant(const Lexer& lexer) {
  const Token& next = lexer.peek();
  return next.kind == Token::Kind::number || next.is('-') || next.is('+') || next.is('~') || next.is('(') ||
         next.is(Token::Kind::word, "WARP_SZ");
}

Constant read_constant(Lexer& lexer) { return Expression(lexer).read(kConditional); }

uint64_t read_offset(Lexer& lexer) {
  uint64_t offset = 0;
  while (lexer.peek().is('+') || lexer.peek().is('-')) {
    const Token sign = lexer.take();
    const Constant term = Expression(lexer).read(kProduct);
    if (term.is_real()) {
      refuse(sign.line, "an offset of an address must be a whole number of bytes: remove the fraction");
    }
    offset = sign.is('+') ? offset + term.bits : offset - term.bits;
  }
  return offset;
}

int64_t read_count(Lexer& lexer, const char* what, int64_t least, int64_t most) {
  const int32_t line = lexer.peek().line;
  const Constant value = Expression(lexer).read(kSum);
  const auto count = static_cast<int64_t>(value.bits);
  const bool too_large = value.kind == Kind::unsigned_integer && count < 0;
  if (value.is_real() || too_large || count < least || count > most) {
    const std::string given = value.is_real() ? "a fraction"
                              : too_large     ? std::to_string(value.bits)
                                              : std::to_string(count);
    refuse(line, std::string(what) + " (" + given + ") must be " + std::to_string(least) + " to " +
                     std::to_string(most) + ": correct the number");
  }
  return count;
}

}  // namespace tandem::vgpu::ptx
