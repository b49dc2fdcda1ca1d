#include "score_mod/lexer.h"

#include <algorithm>
#include <cfloat>
#include <charconv>
#include <system_error>

#include "base/text.h"

namespace tandem::score_mod {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

constexpr std::string_view kMarks[] = {"<=", ">=", "==", "!=", "&&", "||", "//", "<<", ">>", "**",
                                       "+",  "-",  "*",  "/",  "%",  "<",  ">",  "&",  "|",  "^",
                                       "~",  "!",  "(",  ")",  "[",  "]",  ",",  ";",  "="};

}  // namespace

bool is_name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_name_part(char c) { return is_name_start(c) || is_digit(c); }

std::string quote(std::string_view text) {
  constexpr size_t kLongest = 40;
  std::string quoted = "'";
  for (const char c : text.substr(0, kLongest)) quoted += c >= ' ' && c <= '~' ? c : '?';
  return quoted + (text.size() > kLongest ? "...'" : "'");
}

void Lexer::refuse(size_t at, const std::string& sentence) const {
  const std::string_view before = text_.substr(0, at);
  const size_t line_begin = before.rfind('\n') + 1;  // 0 in the first line
  std::string place = str_cat("column ", at - line_begin + 1);
  if (text_.find('\n') != std::string_view::npos) {
    place = str_cat("line ", std::count(before.begin(), before.end(), '\n') + 1, ", ", place);
  }
  throw Refusal{Status::invalid(place + ": " + sentence)};
}

void Lexer::unexpected(const std::string& wanted) const {
  refuse(next_.at, next_.kind == Token::Kind::end ? str_cat("expected ", wanted, ", found the end of the expression")
                                                  : str_cat("expected ", wanted, ", found ", quote(next_.text)));
}

Token Lexer::take() {
  const Token taken = next_;
  next_ = scan();
  return taken;
}

bool Lexer::accept(std::string_view words) {
  if (!next_.is(words)) return false;
  next_ = scan();
  return true;
}

Token Lexer::expect(std::string_view words) {
  if (!next_.is(words)) unexpected(quote(words));
  return take();
}

void Lexer::skip_space() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c == '#') {
      while (at_ < text_.size() && text_[at_] != '\n') ++at_;
    } else if (c == ' ' || c == '\t' || c == '\r' || c == '\n') {
      ++at_;
    } else {
      return;
    }
  }
}

Token Lexer::scan() {
  skip_space();
  if (at_ == text_.size()) return {.at = at_, .text = {}};
  const char c = at(at_);
  if (is_digit(c) || (c == '.' && is_digit(at(at_ + 1)))) return scan_number();
  if (!is_name_start(c)) return scan_mark();
  const size_t begin = at_;
  while (is_name_part(at(at_))) ++at_;
  return {.kind = Token::Kind::name, .at = begin, .text = text_.substr(begin, at_ - begin)};
}

Token Lexer::scan_number() {
  if (at(at_) == '0' && (at(at_ + 1) == 'x' || at(at_ + 1) == 'X')) return scan_hexadecimal();
  Token token{.kind = Token::Kind::integer, .at = at_, .text = {}};
  while (is_digit(at(at_))) ++at_;
  if (at(at_) == '.') {
    token.kind = Token::Kind::real;
    for (++at_; is_digit(at(at_));) ++at_;
  }
  const size_t sign = at(at_ + 1) == '+' || at(at_ + 1) == '-';
  if ((at(at_) == 'e' || at(at_) == 'E') && is_digit(at(at_ + 1 + sign))) {
    token.kind = Token::Kind::real;
    for (at_ += 1 + sign; is_digit(at(at_));) ++at_;
  }
  token.text = text_.substr(token.at, at_ - token.at);
  if (is_name_part(at(at_)) || at(at_) == '.') {
    refuse(at_, str_cat(quote(token.text), " is a number, and ", quote({&text_[at_], 1}),
                        " must not follow it: put a space or an operator between them"));
  }
  const auto [end, error] = std::from_chars(token.text.data(), token.text.data() + token.text.size(), token.value);
  if (token.kind == Token::Kind::integer && token.value > INT32_MAX) {
    refuse(token.at, str_cat(quote(token.text),
                             " must fit an int of 32 bits: write a float with a point, or the bits in hexadecimal"));
  }
  const auto rounded = static_cast<float>(std::min(token.value, 2.0 * FLT_MAX));
  const bool is_zero =
      token.text.substr(0, token.text.find_first_of("eE")).find_first_of("123456789") == std::string::npos;
  if ((error != std::errc() || rounded > FLT_MAX || rounded == 0) && !is_zero) {
    refuse(token.at, str_cat(quote(token.text), " must be in the range of float32, 1.4e-45 to 3.4e38: write inf or 0"));
  }
  return token;
}

// Scans up to 32 bits, reinterpreted as int: 0xffffffff is -1.
Token Lexer::scan_hexadecimal() {
  const size_t begin = at_;
  for (at_ += 2; is_name_part(at(at_));) ++at_;
  const std::string_view text = text_.substr(begin, at_ - begin);
  uint32_t bits = 0;
  const auto [end, error] = std::from_chars(text.data() + 2, text.data() + text.size(), bits, 16);
  if (error != std::errc() || end != text.data() + text.size()) {
    refuse(begin, str_cat(quote(text), " must be a hexadecimal number of at most 32 bits: correct the digits"));
  }
  return {.kind = Token::Kind::integer, .at = begin, .text = text, .value = double(static_cast<int32_t>(bits))};
}

Token Lexer::scan_mark() {
  for (const std::string_view mark : kMarks) {
    if (!text_.substr(at_).starts_with(mark)) continue;
    at_ += mark.size();
    return {.kind = Token::Kind::mark, .at = at_ - mark.size(), .text = mark};
  }
  const char c = text_[at_];
  if (c == '?') refuse(at_, "'?' is not an operator: write a if condition else b");
  refuse(at_, str_cat(quote({&text_[at_], 1}), " must not be used here: remove this character"));
}

}  // namespace tandem::score_mod
