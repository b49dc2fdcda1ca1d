// Labels of a function. A branch sees the labels of its enclosing blocks, before and after it. Only the parser uses
// this header.
#pragma once

#include "vgpu/src/ptx/names.h"

namespace tandem::vgpu::ptx {

class Labels {
 public:
  // An operand whose target is not known yet: a part of it, or all (-1).
  struct Use {
    NameId label = -1;
    int32_t instruction = -1, operand = -1, part = -1;
  };

  void open() { scopes_.push_back({placed_.size(), uses_.size()}); }
  // Resolves the uses of labels in the innermost scope. Other uses are kept for the enclosing scope.
  void close(std::vector<Instruction>& instructions);

  // Places a label in the innermost scope. Returns false if the scope has a label of that name.
  bool place(NameId label, int32_t target);
  void use(const Use& use) { uses_.push_back(use); }
  const std::vector<Use>& unresolved() const { return uses_; }

 private:
  struct Label {
    int32_t target = -1;
    int32_t depth = -1;
  };
  struct Placed {  // restored when the scope closes
    NameId name = -1;
    Label before;
  };
  struct LabelScope {
    size_t first_placed = 0, first_use = 0;
  };

  std::vector<Label> labels_;  // by NameId
  std::vector<Placed> placed_;
  std::vector<Use> uses_;
  std::vector<LabelScope> scopes_;
};

}  // namespace tandem::vgpu::ptx
