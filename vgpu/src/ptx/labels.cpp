#include "vgpu/src/ptx/labels.h"

namespace tandem::vgpu::ptx {

bool Labels::place(NameId label, int32_t target) {
  const auto depth = static_cast<int32_t>(scopes_.size());
  if (labels_.size() <= static_cast<size_t>(label)) labels_.resize(static_cast<size_t>(label) + 1);
  if (labels_[label].depth == depth) return false;
  placed_.push_back({label, labels_[label]});
  labels_[label] = {target, depth};
  return true;
}

void Labels::close(std::vector<Instruction>& instructions) {
  const auto depth = static_cast<int32_t>(scopes_.size());
  const LabelScope scope = scopes_.back();
  size_t kept = scope.first_use;
  for (size_t i = scope.first_use; i < uses_.size(); ++i) {
    const Use use = uses_[i];
    const Label label = static_cast<size_t>(use.label) < labels_.size() ? labels_[use.label] : Label{};
    if (label.depth != depth) {
      uses_[kept++] = use;
      continue;
    }
    Operand& operand = instructions[use.instruction].operands[use.operand];
    (use.part < 0 ? operand : operand.parts[use.part]).target = label.target;
  }
  uses_.resize(kept);
  for (; placed_.size() > scope.first_placed; placed_.pop_back()) labels_[placed_.back().name] = placed_.back().before;
  scopes_.pop_back();
}

}  // namespace tandem::vgpu::ptx
