// Splits an expression into tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tandem::score_mod {

struct Token {
  enum class Kind : uint8_t { end, name, integer, real, mark };
  Kind kind = Kind::end;
  size_t at = 0;  // offset of its first character
  std::string_view text;
  double value = 0;  // value of a number

  bool is(std::string_view words) const { return (kind == Kind::mark || kind == Kind::name) && text == words; }
};

// Thrown and caught within one parse.
struct Refusal {
  Status status;
};

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) { next_ = scan(); }

  const Token& peek() const { return next_; }
  Token take();
  bool accept(std::string_view words);
  Token expect(std::string_view words);  // refuses any other token

  // Throws a Refusal: "column 14: <message>", or "line 2, column 3: ..." if the expression has several lines.
  [[noreturn]] void refuse(size_t at, const std::string& sentence) const;
  [[noreturn]] void unexpected(const std::string& wanted) const;  // names the token that it found instead

 private:
  Token scan();
  Token scan_number();
  Token scan_hexadecimal();
  Token scan_mark();
  void skip_space();
  char at(size_t i) const { return i < text_.size() ? text_[i] : '\0'; }

  std::string_view text_;
  size_t at_ = 0;
  Token next_;
};

bool is_name_start(char c);
bool is_name_part(char c);

std::string quote(std::string_view text);  // 'text', shortened, without unprintable characters

}  // namespace tandem::score_mod
