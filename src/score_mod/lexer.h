// The text of a modification, cut into tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tandem::score_mod {

struct Token {
  enum class Kind : uint8_t { end, name, integer, real, mark };
  Kind kind = Kind::end;
  size_t at = 0;  // of its first character in the text
  std::string_view text;
  double value = 0;  // of a number

  bool is(std::string_view words) const { return (kind == Kind::mark || kind == Kind::name) && text == words; }
};

// Thrown within a parse, and caught by it.
struct Refusal {
  Status status;
};

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) { next_ = scan(); }

  const Token& peek() const { return next_; }
  Token take();
  bool accept(std::string_view words);
  Token expect(std::string_view words);  // refuses anything else

  // Throws a Refusal: "column 14: <sentence>", or "line 2, column 3: ..." where the text has several lines.
  [[noreturn]] void refuse(size_t at, const std::string& sentence) const;
  [[noreturn]] void unexpected(const std::string& wanted) const;  // instead of the next token

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

std::string quote(std::string_view text);  // 'text', shortened, without what a terminal could not show

}  // namespace tandem::score_mod
