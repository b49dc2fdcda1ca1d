// Passes findings to the observer. A fatal finding ends the run.
#include "vgpu/src/machine/run/execute.h"

namespace tandem::vgpu::machine {

void Grid::stop(std::string sentence) {
  const std::lock_guard lock(mutex);
  if (status.ok()) status = Status{TANDEM_INTERNAL_ERROR, std::move(sentence)};
  stopped.store(true);
}

bool report(Grid& grid, const Actor& actor, Rule rule, std::string subject, std::string message, bool fatal) {
  Finding finding;
  finding.rule = rule;
  finding.party = {actor.cta, actor.warp, actor.lanes == 0 ? -1 : first_lane(actor.lanes), actor.instruction, ""};
  finding.subject = std::move(subject);
  finding.message = std::move(message);
  std::string sentence = grid.code->function->name + ": " + std::string(name_of(rule));
  if (actor.instruction >= 0) sentence += " at " + grid.code->place(actor.instruction);
  sentence += ", block " + std::to_string(actor.cta);
  if (actor.warp >= 0) sentence += ", warp " + std::to_string(actor.warp);
  if (!finding.subject.empty()) sentence += ", " + finding.subject;
  sentence += ": " + finding.message;
  if (grid.observer != nullptr) grid.observer->finds(std::move(finding));
  if (fatal) grid.stop(std::move(sentence));
  return !fatal;
}

bool Context::finds(Rule rule, const Op& op, std::string subject, std::string message, bool fatal) const {
  return report(grid, {block.cta, warp.index, mask, op.source}, rule, std::move(subject), std::move(message), fatal);
}

}  // namespace tandem::vgpu::machine
