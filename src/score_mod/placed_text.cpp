#include "score_mod/placed_text.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/text.h"
#include "score_mod/lexer.h"
#include "tandem/tandem.h"

namespace tandem::score_mod {
namespace {

// A name, and its value in the longer sequence.
struct Meaning {
  const char* name;
  std::string value;
};

std::array<Meaning, 6> meanings(const std::string& places) {
  const auto member = [&](size_t offset) {
    return str_cat(places, "[batch, ", static_cast<int64_t>(offset / sizeof(int32_t)), "]");
  };
  const std::string stride = " * " + member(offsetof(tandem_place, stride));
  return {{{"batch", member(offsetof(tandem_place, document))},
           {"head", "head + " + member(offsetof(tandem_place, first_head))},
           {"q", member(offsetof(tandem_place, first_query)) + " + q" + stride},
           {"k", member(offsetof(tandem_place, first_key)) + " + k" + stride},
           {"seqlen_q", member(offsetof(tandem_place, seqlen_q))},
           {"seqlen_k", member(offsetof(tandem_place, seqlen_k))}}};
}

// The names of a text. Empty if the text has other characters than the language.
std::vector<Token> names_of(std::string_view text) {
  std::vector<Token> names;
  try {
    for (Lexer lexer(text); lexer.peek().kind != Token::Kind::end;) {
      const Token token = lexer.take();
      if (token.kind == Token::Kind::name) names.push_back(token);
    }
  } catch (const Refusal&) {
    return {};
  }
  return names;
}

}  // namespace

PlacedText placed_text(std::string_view text) {
  const std::vector<Token> names = names_of(text);
  std::string prefix = "at_";
  while (text.find(prefix) != std::string_view::npos) prefix += '_';
  const std::string places = prefix + "places";
  std::string definitions, rest;
  size_t end = 0;
  bool reads = false;
  const std::array<Meaning, 6> known = meanings(places);
  std::array<bool, 6> used{};
  for (const Token& token : names) {
    for (size_t n = 0; n < known.size(); ++n) {
      if (token.text != known[n].name) continue;
      used[n] = reads = true;
      rest.append(text.substr(end, token.at - end)).append(prefix).append(known[n].name);
      end = token.at + token.text.size();
    }
  }
  rest.append(text.substr(end));
  for (size_t n = 0; n < known.size(); ++n) {
    if (used[n]) definitions.append(prefix).append(known[n].name).append(" = ").append(known[n].value).append("; ");
  }
  return {definitions + rest, reads ? places : ""};
}

}  // namespace tandem::score_mod
