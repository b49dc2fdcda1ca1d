// A finding for people.
#include "problem/text.h"
#include "vgpu/check/checker.h"
#include "vgpu/ptx/inlining.h"

namespace tandem::vgpu {
namespace {

std::string who(const Party& party) {
  std::string text;
  const auto add = [&](const char* name, int32_t x) {
    if (x < 0) return;
    text += say(text.empty() ? "" : ", ", name, " ", x);
  };
  add("block", party.cta);
  add("warp", party.warp);
  add("lane", party.lane);
  return text;
}

// "block 0, warp 1, lane 0 writes" and, below it, where.
std::string lines_of(const Program& program, const Party& party) {
  std::string text = who(party);
  if (!party.what.empty()) text += (text.empty() ? "" : ": ") + party.what;
  text += "\n";
  if (party.instruction < 0) return text;
  const ptx::Instruction& source = program.source(party.instruction);
  return say(text, "      ", source.full_name(), "\n      ", ptx::place_text(program.module(), source.location), "\n");
}

}  // namespace

std::string report(const Program& program, const Finding& finding) {
  std::string text =
      say(is_warning(finding.rule) ? "warning: " : "", name_of(finding.rule), " in ", program.function().name);
  if (!finding.subject.empty()) text += say(": ", finding.subject);
  text += say("\n  ", finding.message, "\n  by  ", lines_of(program, finding.party));
  if (finding.other.instruction >= 0 || finding.other.cta >= 0) text += say("  and ", lines_of(program, finding.other));
  return say(text, "  ", advice_of(finding.rule), "\n");
}

}  // namespace tandem::vgpu
