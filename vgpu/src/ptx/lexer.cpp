#include "vgpu/src/ptx/lexer.h"

#include <array>

namespace tandem::vgpu::ptx {
namespace {

// kWord: the character may follow the first character of a word.
constexpr uint8_t kWord = 1, kWordStart = 2, kDigit = 4, kAlphanumeric = 8, kSpace = 16;

constexpr std::array<uint8_t, 256> make_classes() {
  std::array<uint8_t, 256> classes{};
  for (int c = 'a'; c <= 'z'; ++c) classes[c] = classes[c - 'a' + 'A'] = kWord | kWordStart | kAlphanumeric;
  for (int c = '0'; c <= '9'; ++c) classes[c] = kWord | kDigit | kAlphanumeric;
  for (const unsigned char c : {'_', '$'}) classes[c] = kWord | kWordStart;
  classes['%'] = kWordStart;
  for (const unsigned char c : {' ', '\t', '\r', '\f', '\v'}) classes[c] = kSpace;
  return classes;
}
constexpr std::array<uint8_t, 256> kClasses = make_classes();

bool is(char c, uint8_t classes) { return kClasses[static_cast<unsigned char>(c)] & classes; }

}  // namespace

void refuse(int32_t line, const std::string& sentence) {
  throw Refusal{Status::invalid("PTX line " + std::to_string(line) + ": " + sentence)};
}

void unsupported(int32_t line, const std::string& sentence) {
  throw Refusal{Status::unsupported("PTX line " + std::to_string(line) + ": " + sentence)};
}

std::string quote(std::string_view text) {
  constexpr size_t kLongest = 120;
  std::string quoted = "'";
  for (const char c : text.substr(0, kLongest)) quoted += c >= ' ' && c <= '~' ? c : '?';
  return quoted + (text.size() > kLongest ? "...'" : "'");
}

std::string with_dot(std::string_view word) { return std::string(".").append(word); }

Token Lexer::take() {
  const Token taken = next_;
  next_ = scan();
  return taken;
}

bool Lexer::accept(char mark) {
  if (!next_.is(mark)) return false;
  next_ = scan();
  return true;
}

bool Lexer::accept(std::string_view dotted) {
  if (!next_.is(Token::Kind::dotted, dotted)) return false;
  next_ = scan();
  return true;
}

void Lexer::expect(char mark) {
  if (!accept(mark)) unexpected(quote({&mark, 1}));
}

Token Lexer::expect(Token::Kind kind, const char* what) {
  if (next_.kind != kind) unexpected(what);
  return take();
}

void Lexer::unexpected(const std::string& wanted) const {
  if (next_.kind == Token::Kind::end) refuse(next_.line, "expected " + wanted + ", found the end of the text");
  const bool dotted = next_.kind == Token::Kind::dotted;
  refuse(next_.line,
         "expected " + wanted + ", found " + quote(dotted ? with_dot(next_.text) : std::string(next_.text)));
}

void Lexer::skip_block() {
  const int32_t opened = next_.line;
  while (!next_.is('}')) {
    if (next_.kind == Token::Kind::end) refuse(opened, "this block must end with '}': add the brace");
    if (next_.is('{')) refuse(next_.line, "a section must not contain '{': remove the brace");
    next_ = scan();
  }
  next_ = scan();
}

// True at a // comment, and at lines that name the origin of text: "# 1 "file"", "@@DWARF .byte ...".
bool Lexer::at_line_comment() const {
  const std::string_view rest{at_, static_cast<size_t>(end_ - at_)};
  return rest.starts_with("//") || rest.starts_with("@@DWARF") || rest.starts_with("# ") || rest.starts_with("#line ");
}

void Lexer::skip_comment() {
  const int32_t opened = line_;
  for (at_ += 2; end_ - at_ >= 2; ++at_) {
    if (at_[0] == '*' && at_[1] == '/') {
      at_ += 2;
      return;
    }
    if (*at_ == '\n') ++line_;
  }
  refuse(opened, "this comment must end with '*/': add the mark");
}

void Lexer::skip_space() {
  while (at_ < end_) {
    if (is(*at_, kSpace)) {
      ++at_;
    } else if (*at_ == '\n') {
      ++line_, ++at_;
    } else if ((*at_ == '/' || *at_ == '#' || *at_ == '@') && at_line_comment()) {
      while (at_ < end_ && *at_ != '\n') ++at_;
    } else if (*at_ == '/' && end_ - at_ >= 2 && at_[1] == '*') {
      skip_comment();
    } else if (*at_ == '\\' && end_ - at_ >= 2 && (at_[1] == '\n' || at_[1] == '\r')) {
      ++at_;
    } else {
      return;
    }
  }
}

Token Lexer::scan() {
  skip_space();
  if (at_ == end_) return {Token::Kind::end, {}, line_};
  const char* start = at_;
  const auto token = [&](Token::Kind kind) {
    const size_t size = static_cast<size_t>(at_ - start);
    return Token{kind, {start, size}, line_};
  };
  if (is(*at_, kWordStart) && (*at_ != '%' || (end_ - at_ >= 2 && is(at_[1], kWord)))) {
    for (++at_; at_ < end_ && is(*at_, kWord);) ++at_;
    return token(Token::Kind::word);
  }
  if (is(*at_, kDigit)) {
    skip_number();
    return token(Token::Kind::number);
  }
  if (*at_ == '.' && end_ - at_ >= 2 && is(at_[1], kWord)) {
    start = ++at_;
    skip_dotted();
    return token(Token::Kind::dotted);
  }
  return *at_ == '"' ? scan_string() : scan_mark();
}

void Lexer::skip_number() {
  const char* start = at_;
  // After 0x, 0b, 0f and 0d, 'e' is a digit, and no sign follows it.
  const bool has_prefix = *start == '0' && end_ - start >= 2 && is(start[1], kWordStart) && (start[1] | 0x20) != 'e';
  for (; at_ < end_; ++at_) {
    const bool sign = (*at_ == '+' || *at_ == '-') && !has_prefix && (at_[-1] | 0x20) == 'e';
    if (!is(*at_, kAlphanumeric) && *at_ != '.' && !sign) return;
  }
}

void Lexer::skip_dotted() {
  while (at_ < end_) {
    if (is(*at_, kWord)) {
      ++at_;
    } else if (end_ - at_ >= 3 && at_[0] == ':' && at_[1] == ':' && is(at_[2], kWord)) {
      at_ += 2;
    } else {
      return;
    }
  }
}

Token Lexer::scan_string() {
  const char* start = ++at_;
  while (at_ < end_ && *at_ != '"' && *at_ != '\n') at_ += *at_ == '\\' && end_ - at_ >= 2 && at_[1] != '\n' ? 2 : 1;
  if (at_ == end_ || *at_ == '\n') refuse(line_, "this string must end with '\"': add the mark");
  return {Token::Kind::string, {start, static_cast<size_t>(at_++ - start)}, line_};
}

Token Lexer::scan_mark() {
  constexpr std::string_view pairs[] = {"<<", ">>", "<=", ">=", "==", "!=", "&&", "||"};
  constexpr std::string_view marks = "{}[]()<>;,:+-*/%!~&|^?=@#";
  const std::string_view rest{at_, static_cast<size_t>(end_ - at_)};
  size_t size = 0;
  for (const std::string_view pair : pairs) {
    if (rest.starts_with(pair)) size = 2;
  }
  if (size == 0 && marks.find(rest[0]) != marks.npos) size = 1;
  if (size == 0) refuse(line_, quote(rest.substr(0, 1)) + " must be a character of PTX: remove the character");
  at_ += size;
  return {Token::Kind::mark, rest.substr(0, size), line_};
}

}  // namespace tandem::vgpu::ptx
