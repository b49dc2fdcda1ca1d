#include "vgpu/src/ptx/inlining.h"

#include <cxxabi.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "base/text.h"

namespace tandem::vgpu::ptx {
namespace {

// Consumes words and numbers from the front of a line.
class Line {
 public:
  explicit Line(std::string_view text) : text_(text) {}

  bool accept(std::string_view word) {
    skip();
    if (!text_.starts_with(word)) return false;
    text_.remove_prefix(word.size());
    return true;
  }
  std::optional<int32_t> number() {
    skip();
    int32_t value = 0;
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), value);
    if (error != std::errc()) return std::nullopt;
    text_.remove_prefix(static_cast<size_t>(end - text_.data()));
    return value;
  }
  std::string_view word() {
    skip();
    const size_t end = std::min(text_.find_first_of(" \t,+:"), text_.size());
    const std::string_view word = text_.substr(0, end);
    text_.remove_prefix(end);
    return word;
  }

 private:
  void skip() { text_.remove_prefix(std::min(text_.find_first_not_of(" \t,"), text_.size())); }

  std::string_view text_;
};

template <class Use>
void each_line(std::string_view text, Use&& use) {
  int32_t number = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    use(++number, text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

// The strings of section .debug_str: the position of each label, and the bytes.
struct Strings {
  std::map<std::string_view, size_t> labels;
  std::string bytes;

  explicit Strings(std::string_view text) {
    const size_t section = text.find(".debug_str");
    if (section == std::string_view::npos) return;
    each_line(text.substr(section), [&](int32_t, std::string_view content) {
      Line line(content);
      if (line.accept(".b8")) {
        while (const std::optional<int32_t> byte = line.number()) bytes += static_cast<char>(*byte);
      } else if (const size_t colon = content.find(':'); colon != std::string_view::npos) {
        labels[line.word()] = bytes.size();
      }
    });
  }
  std::string at(std::string_view label, size_t offset) const {
    const auto found = labels.find(label);
    if (found == labels.end() || found->second + offset >= bytes.size()) return "";
    return bytes.c_str() + found->second + offset;
  }
};

std::string demangled(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status),
                                                    std::free);
  return text ? text.get() : name;
}

// "void Softmax::step<64>(float (&) [64], float) const" -> "Softmax::step". A lambda is named after the function that
// contains it: "compute::lambda".
std::string without_arguments(std::string_view full) {
  constexpr std::string_view kConst = " const";
  std::string name;
  int depth = 0;
  for (size_t i = 0; i < full.size(); ++i) {
    const char c = full[i];
    if (depth == 0 && full.substr(i).starts_with("{lambda")) {
      name += "lambda";
      break;
    }
    if (c == '<' || c == '(') ++depth;
    if (depth == 0) name += c;
    if (depth == 0 && c == ' ') name.clear();  // the type of the result
    if (c == '>' || c == ')') --depth;
    if (depth == 0 && c == ')' && full.substr(i + 1).starts_with(kConst)) i += kConst.size();
  }
  return name.substr(0, name.find_last_not_of(' ') + 1);
}

class Reader {
 public:
  Reader(std::string_view text, Module* module) : strings_(text), module_(*module) {
    each_line(text, [&](int32_t, std::string_view content) {
      if (Line line(content); line.accept(".file")) {
        const auto index = static_cast<int32_t>(files_.size());
        files_.emplace(line.number().value_or(-1), index);
      }
    });
    each_line(text, [&](int32_t number, std::string_view content) {
      if (Line line(content); line.accept(".loc")) read(number, line);
    });
  }

  // Returns the position after the .loc of the preceding line.
  int32_t inlining_before(int32_t ptx_line) const {
    const auto after = std::ranges::upper_bound(places_, ptx_line, {}, &std::pair<int32_t, int32_t>::first);
    return after == places_.begin() ? -1 : std::prev(after)->second;
  }

 private:
  using Position = std::array<int32_t, 3>;  // file, line, column

  static std::optional<Position> position(Line& line) {
    Position at{};
    for (int32_t& part : at) {
      const std::optional<int32_t> number = line.number();
      if (!number) return std::nullopt;
      part = *number;
    }
    return at;
  }

  void read(int32_t number, Line& line) {
    const std::optional<Position> at = position(line);
    if (!at) return;
    std::string function;
    if (line.accept("function_name")) {
      const std::string_view label = line.word();
      const int32_t offset = line.accept("+") ? line.number().value_or(0) : 0;
      function = strings_.at(label, static_cast<size_t>(std::max(offset, 0)));
    }
    int32_t inlining = -1;
    if (line.accept("inlined_at")) {
      if (const std::optional<Position> call = position(line)) inlining = add(function, *call);
    }
    last_[*at] = inlining;
    places_.emplace_back(number, inlining);
  }

  // Adds a call from code whose .loc came earlier.
  int32_t add(const std::string& function, const Position& call) {
    const auto outer = last_.find(call);
    const auto key = std::tuple(function, call, outer == last_.end() ? -1 : outer->second);
    const auto [entry, is_new] = numbers_.try_emplace(key, static_cast<int32_t>(module_.inlinings.size()));
    if (is_new) {
      module_.inlinings.push_back(
          {without_arguments(demangled(function)), file_index(call[0]), call[1], std::get<2>(key)});
    }
    return entry->second;
  }

  int32_t file_index(int32_t number) const {
    const auto found = files_.find(number);
    return found != files_.end() && static_cast<size_t>(found->second) < module_.files.size() ? found->second : -1;
  }

  const Strings strings_;
  Module& module_;
  std::map<int32_t, int32_t> files_;  // number of .file -> index of Module::files
  std::map<Position, int32_t> last_;  // the latest inlining of each position
  std::map<std::tuple<std::string, Position, int32_t>, int32_t> numbers_;
  std::vector<std::pair<int32_t, int32_t>> places_;  // line of the PTX, inlining from there on
};

}  // namespace

void read_inlining(std::string_view text, Module* module) {
  if (text.find("inlined_at") == std::string_view::npos) return;
  const Reader reader(text, module);
  for (Function& function : module->functions) {
    for (Instruction& instruction : function.instructions)
      instruction.location.inlining = reader.inlining_before(instruction.location.ptx_line);
  }
}

std::string place_text(const Module& module, int32_t file, int32_t line, int32_t ptx_line) {
  if (file < 0) return str_cat("PTX line ", ptx_line);
  return str_cat(module.files[static_cast<size_t>(file)], ":", line);
}

std::string place_text(const Module& module, const Location& location) {
  std::string text = place_text(module, location.file, location.line, location.ptx_line);
  for (int32_t i = location.inlining; i >= 0;) {
    const Inlining& inlining = module.inlinings[static_cast<size_t>(i)];
    if (!inlining.function.empty()) text += " in " + inlining.function;
    text += ", from " + place_text(module, inlining.file, inlining.line, location.ptx_line);
    i = inlining.outer;
  }
  return text;
}

std::vector<std::string> functions_around(const Module& module, const Location& location) {
  std::vector<std::string> functions;
  for (int32_t i = location.inlining; i >= 0; i = module.inlinings[static_cast<size_t>(i)].outer)
    functions.push_back(module.inlinings[static_cast<size_t>(i)].function);
  std::ranges::reverse(functions);
  return functions;
}

}  // namespace tandem::vgpu::ptx
