#include "vgpu/src/ptx/link.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <string_view>

#include "base/text.h"

namespace tandem::vgpu::ptx {
namespace {

enum class Linkage : uint8_t { none, visible, weak, external };

// A declaration or definition at module scope, with its text.
struct Statement {
  enum Kind : uint8_t { header, debug, variable, function } kind = variable;
  Linkage linkage = Linkage::none;
  bool is_definition = true;
  std::string name, text;
};

bool begins_name(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%'; }
bool continues_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$'; }

class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  Status read(std::vector<Statement>* statements) {
    for (skip_blanks(); at_ < text_.size(); skip_blanks()) {
      Statement statement;
      const size_t begin = at_;
      TANDEM_TRY(read_statement(&statement));
      statement.text = text_.substr(begin, at_ - begin);
      if (!statement.text.empty()) statements->push_back(std::move(statement));
    }
    return {};
  }

 private:
  bool starts(std::string_view word) const { return text_.substr(at_).starts_with(word); }

  void skip_blanks() {
    while (at_ < text_.size()) {
      if (std::isspace(static_cast<unsigned char>(text_[at_])) || text_[at_] == '\0') {
        ++at_;
      } else if (starts("//")) {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (starts("/*")) {
        const size_t end = text_.find("*/", at_ + 2);
        at_ = end == std::string_view::npos ? text_.size() : end + 2;
      } else {
        return;
      }
    }
  }

  // Reads one token and the blanks that follow: a string, a word with its dot, or a character.
  std::string_view token() {
    const size_t begin = at_;
    if (text_[at_] == '"') {
      at_ = std::min(text_.find('"', at_ + 1), text_.size() - 1) + 1;
    } else {
      ++at_;
      if (begins_name(text_[begin]) || text_[begin] == '.' || std::isdigit(static_cast<unsigned char>(text_[begin])))
        while (at_ < text_.size() && continues_name(text_[at_])) ++at_;
    }
    const std::string_view token = text_.substr(begin, at_ - begin);
    skip_blanks();
    return token;
  }

  void skip_line() { at_ = std::min(text_.find('\n', at_), text_.size()); }

  bool skip_group(char open, char close) {
    int depth = 0;
    while (at_ < text_.size()) {
      const std::string_view t = token();
      if (t[0] == open) ++depth;
      if (t[0] == close && --depth == 0) return true;
    }
    return false;
  }

  Status read_statement(Statement* statement) {
    for (const char* word : {".version", ".target", ".address_size"}) {
      if (!starts(word)) continue;
      statement->kind = Statement::header;
      skip_line();
      return {};
    }
    if (starts(".file") || starts(".section") || starts("@@DWARF")) {
      statement->kind = Statement::debug;
      if (!starts(".section")) return skip_line(), Status();
      while (at_ < text_.size() && text_[at_] != '{') token();
      return skip_group('{', '}') ? Status() : unfinished();
    }
    return read_declaration(statement);
  }

  Status read_declaration(Statement* statement) {
    while (at_ < text_.size()) {
      const char next = text_[at_];
      if (next == '(' && statement->name.empty()) {  // results of a function
        if (!skip_group('(', ')')) return unfinished();
        continue;
      }
      if (next == '{') {
        if (!skip_group('{', '}')) return unfinished();
        if (statement->kind == Statement::function) return {};
        continue;
      }
      const std::string_view word = token();
      if (word == ";") {
        if (statement->kind == Statement::function) statement->is_definition = false;
        return {};
      }
      if (word == ".visible") statement->linkage = Linkage::visible;
      if (word == ".weak" || word == ".common") statement->linkage = Linkage::weak;
      if (word == ".extern") statement->linkage = Linkage::external, statement->is_definition = false;
      if (word == ".func" || word == ".entry") statement->kind = Statement::function;
      if (begins_name(word[0]) && statement->name.empty()) statement->name = word;
    }
    return unfinished();
  }

  static Status unfinished() { return Status::invalid("the PTX must not end within a declaration: complete the text"); }

  const std::string_view text_;
  size_t at_ = 0;
};

// Replaces whole names outside of strings.
std::string rename(std::string_view text, const std::map<std::string, std::string, std::less<>>& names) {
  std::string renamed;
  for (size_t at = 0; at < text.size();) {
    size_t end = at + 1;
    if (text[at] == '"') {
      end = std::min(text.find('"', end), text.size() - 1) + 1;
    } else if (begins_name(text[at])) {
      while (end < text.size() && continues_name(text[end])) ++end;
    }
    const std::string_view word = text.substr(at, end - at);
    const auto found = names.find(word);
    renamed += found == names.end() ? word : found->second;
    at = end;
    // .global and similar words are no names.
    if (word == ".")
      while (at < text.size() && continues_name(text[at])) renamed += text[at++];
  }
  return renamed;
}

// Each text numbers its files. The numbers of a later text follow the numbers of earlier texts.
std::string renumber_files(const std::string& text, int first) {
  std::string renumbered = text;
  for (const std::string_view word : {".file", ".loc", "inlined_at"}) {
    for (size_t at = renumbered.find(word); at != std::string::npos; at = renumbered.find(word, at + 1)) {
      const size_t begin = renumbered.find_first_not_of(" \t", at + word.size());
      size_t end = begin;
      while (end < renumbered.size() && std::isdigit(static_cast<unsigned char>(renumbered[end]))) ++end;
      if (begin == std::string::npos || end == begin) continue;
      renumbered.replace(begin, end - begin, std::to_string(std::stoi(renumbered.substr(begin, end - begin)) + first));
    }
  }
  return renumbered;
}

int count_files(const std::vector<Statement>& unit) {
  int count = 0;
  for (const Statement& s : unit)
    if (s.kind == Statement::debug && s.text.starts_with(".file"))
      count = std::max(count, std::atoi(s.text.c_str() + std::string_view(".file").size()));
  return count;
}

bool is_local(const Statement& s) {
  return s.kind >= Statement::variable && s.is_definition && s.linkage == Linkage::none && !s.name.empty();
}

using Units = std::vector<std::vector<Statement>>;

void rename_locals(Units* units) {
  std::map<std::string, int> users;
  for (const auto& unit : *units) {
    std::set<std::string> names;
    for (const Statement& s : unit) names.insert(s.name);
    for (const std::string& name : names) ++users[name];
  }
  for (size_t n = 0; n < units->size(); ++n) {
    std::map<std::string, std::string, std::less<>> names;
    for (const Statement& s : (*units)[n])
      if (is_local(s) && users[s.name] > 1) names[s.name] = str_cat(s.name, "$", n);
    if (names.empty()) continue;
    for (Statement& s : (*units)[n]) {
      s.text = rename(s.text, names);
      if (const auto found = names.find(s.name); found != names.end()) s.name = found->second;
    }
  }
}

// Finds the defined names, and the statements that define them.
Status find_definitions(const Units& units, std::map<std::string, const Statement*>* definitions) {
  for (const auto& unit : units) {
    for (const Statement& s : unit) {
      if (s.kind < Statement::variable || !s.is_definition || s.name.empty()) continue;
      const auto [found, is_new] = definitions->try_emplace(s.name, &s);
      if (is_new || s.linkage == Linkage::weak) continue;
      if (found->second->linkage != Linkage::weak)
        return Status::invalid(str_cat(
            "\"", s.name, "\" must be defined in one of the linked PTX texts, not in two: rename one definition"));
      found->second = &s;
    }
  }
  return {};
}

}  // namespace

Status link(const std::vector<std::string>& texts, std::string* linked) {
  Units units;
  int files = 0;
  for (const std::string& text : texts) {
    const std::string numbered = files > 0 ? renumber_files(text, files) : text;
    units.emplace_back();
    TANDEM_TRY(Scanner(numbered).read(&units.back()));
    files = std::max(files, count_files(units.back()));
    if (units.size() == 1) continue;
    for (Statement& s : units.back())
      for (size_t at; (at = s.text.find("$L__info_string")) != std::string::npos;)
        s.text.replace(at, 15, str_cat("$L__info", units.size(), "_string"));
  }
  rename_locals(&units);
  std::map<std::string, const Statement*> definitions;
  TANDEM_TRY(find_definitions(units, &definitions));

  std::string parts[4];  // header, variables, prototypes, functions
  std::set<std::string> declared;
  for (const auto& unit : units) {
    for (const Statement& s : unit) {
      const bool is_module = s.kind == Statement::header || s.kind == Statement::debug;
      if (s.kind == Statement::header && &unit != &units[0]) continue;
      const auto found = definitions.find(s.name);
      if (!is_module && s.is_definition && found != definitions.end() && found->second != &s) continue;
      if (!is_module && !s.is_definition) {
        if (s.kind == Statement::variable && found != definitions.end()) continue;
        if (!declared.insert(s.name).second) continue;
      }
      parts[is_module ? 0 : s.kind == Statement::variable ? 1 : s.is_definition ? 3 : 2] += s.text + "\n";
    }
  }
  *linked = parts[0] + parts[1] + parts[2] + parts[3];
  return {};
}

}  // namespace tandem::vgpu::ptx
