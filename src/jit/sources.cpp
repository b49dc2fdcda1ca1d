#include "jit/sources.h"

#include <algorithm>

namespace tandem::jit {
namespace {

const Text* find(Sources sources, std::string_view name) {
  const auto found = std::ranges::find(sources, name, &Text::name);
  return found == sources.end() ? nullptr : &*found;
}

void skip_blanks(std::string_view& line) { line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size())); }

// Returns the name in a line  #include "name", or an empty name.
std::string_view included_name(std::string_view line) {
  skip_blanks(line);
  if (!line.starts_with('#')) return {};
  line.remove_prefix(1);
  skip_blanks(line);
  constexpr std::string_view word = "include";
  if (!line.starts_with(word)) return {};
  line.remove_prefix(word.size());
  skip_blanks(line);
  if (!line.starts_with('"')) return {};
  line.remove_prefix(1);
  const size_t end = line.find('"');
  return end == std::string_view::npos ? std::string_view{} : line.substr(0, end);
}

void collect(std::string_view text, Sources sources, std::vector<Text>* found) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view name = included_name(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (name.empty() || find(*found, name) != nullptr) continue;
    const Text* header = find(sources, name);
    if (header == nullptr) continue;
    found->push_back(*header);
    collect(header->text, sources, found);
  }
}

}  // namespace

std::optional<std::string_view> source(std::string_view name) {
  const Text* text = find(kernels(), name);
  return text != nullptr ? std::optional(text->text) : std::nullopt;
}

std::vector<Text> included_by(std::string_view text, Sources sources) {
  std::vector<Text> found;
  collect(text, sources, &found);
  return found;
}

}  // namespace tandem::jit
