// The text of a finding for users.
#include <cctype>
#include <cstdlib>

#include "base/text.h"
#include "vgpu/src/check/checker.h"
#include "vgpu/src/ptx/inlining.h"

namespace tandem::vgpu {
namespace {

std::string who(const Accessor& party) {
  std::string text;
  const auto add = [&](const char* name, int32_t x) {
    if (x < 0) return;
    text += str_cat(text.empty() ? "" : ", ", name, " ", x);
  };
  add("block", party.cta);
  add("warp", party.warp);
  add("lane", party.lane);
  return text;
}

// Returns the name of a C++ kernel without its template arguments and parameters: "ns::gemm<...>".
std::string short_name(const std::string& symbol) {
  if (!symbol.starts_with("_Z")) return symbol;
  std::string name;
  size_t at = 2;
  const auto skip = [&](char x) { at += at < symbol.size() && symbol[at] == x; };
  for (skip('N'), skip('L'); at < symbol.size() && std::isdigit(static_cast<unsigned char>(symbol[at]));) {
    char* end = nullptr;
    const size_t length = std::strtoul(symbol.c_str() + at, &end, 10);
    at = static_cast<size_t>(end - symbol.c_str());
    if (length == 0 || length > symbol.size() - at) return symbol;
    name += (name.empty() ? "" : "::") + symbol.substr(at, length);
    at += length;
  }
  if (name.empty()) return symbol;
  return name + (at < symbol.size() && symbol[at] == 'I' ? "<...>" : "");
}

// "70 times at this line, by 4 warps, at 64 addresses".
std::string often_text(const Finding& finding) {
  std::string text = str_cat(finding.times, " times at this line");
  if (finding.warps > 1) text += str_cat(", by ", finding.warps, " warps");
  if (finding.places > 1) text += str_cat(", at ", finding.places, " addresses");
  return text;
}

// Returns "block 0, warp 1, lane 0 writes" and, below it, the place.
std::string lines_of(const Program& program, const Accessor& party) {
  std::string text = who(party);
  if (!party.what.empty()) text += (text.empty() ? "" : ": ") + party.what;
  text += "\n";
  if (party.instruction < 0) return text;
  const ptx::Instruction& source = program.source(party.instruction);
  return str_cat(text, "      ", source.full_name(), "\n      ", place_of(program, party.instruction), "\n");
}

}  // namespace

std::string place_of(const Program& program, int32_t instruction) {
  return instruction < 0 ? "" : ptx::place_text(program.module(), program.source(instruction).location);
}

std::string report(const Program& program, const Finding& finding) {
  std::string text = str_cat(grade_of(finding.rule) == Grade::spec_only ? "by the letter: " : "", name_of(finding.rule),
                             " in ", short_name(program.function().name));
  if (!finding.subject.empty()) text += str_cat(": ", finding.subject);
  text += str_cat("\n  ", finding.message, "\n  by  ", lines_of(program, finding.party));
  if (finding.other.instruction >= 0 || finding.other.cta >= 0)
    text += str_cat("  and ", lines_of(program, finding.other));
  for (size_t i = 0; i < finding.others.size(); ++i)
    text += str_cat(i == 0 ? "  with others too, at " : "; ", place_of(program, finding.others[i]),
                    i + 1 == finding.others.size() ? "\n" : "");
  if (finding.times > 1) text += str_cat("  ", often_text(finding), "\n");
  return str_cat(text, "  ", advice_of(finding.rule), "\n");
}

}  // namespace tandem::vgpu
