// Splits PTX text into tokens, each with its line. Only the parser uses this header.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tandem::vgpu::ptx {

// The exception of the parser. parse() catches it.
struct Refusal {
  Status status;
};
[[noreturn]] void refuse(int32_t line, const std::string& sentence);  // this is no PTX
[[noreturn]] void unsupported(int32_t line,
                              const std::string& sentence);  // valid PTX that this parser does not support
std::string quote(std::string_view text);                    // for messages: 'text', short and printable
std::string with_dot(std::string_view word);

struct Token {
  enum class Kind : uint8_t {
    end,
    word,    // %r12, mov, $L__BB0_2, _
    dotted,  // .global, .shared::cta, .32x32b: text without the dot
    number,  // 12, 0x1F, 0f3F800000, 1.5e3
    string,  // the text between the quotes
    mark,    // { [ ; + <<, ...
  };
  Kind kind = Kind::end;
  std::string_view text;
  int32_t line = 1;

  bool is(Kind k, std::string_view t) const { return kind == k && text == t; }
  bool is(char mark) const { return kind == Kind::mark && text.size() == 1 && text[0] == mark; }
};

class Lexer {
 public:
  explicit Lexer(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) { next_ = scan(); }

  const Token& peek() const { return next_; }
  Token take();

  // Consumes the next token if it is this mark.
  bool accept(char mark);
  bool accept(std::string_view dotted);
  // Requires the next token. `what` names the token in a refusal: "expected a name".
  void expect(char mark);
  Token expect(Token::Kind kind, const char* what);
  [[noreturn]] void unexpected(const std::string& wanted) const;

  void skip_block();  // to the matching '}': for sections

 private:
  void skip_space();
  void skip_comment();
  bool at_line_comment() const;
  Token scan();
  void skip_number();
  void skip_dotted();
  Token scan_string();
  Token scan_mark();

  const char* at_;
  const char* end_;
  int32_t line_ = 1;
  Token next_;
};

}  // namespace tandem::vgpu::ptx
