// Registers that are read before they are written. Decoding has found the candidates (decode/unwritten.cpp); this file
// checks them lane by lane.
#include "vgpu/src/machine/run/execute.h"

namespace tandem::vgpu::machine {

void check_written(Context& context, const Op& op) {
  const RegisterUse& use = context.grid.code->uses.at(context.fragment.pc);
  std::vector<uint32_t>& written = context.warp.written;
  const auto read = [&](int32_t number, uint32_t lanes) {
    const uint32_t missing = lanes & ~written[static_cast<size_t>(number)];
    if (missing == 0) return;
    report(context.grid, {context.block.cta, context.warp.index, missing, op.source}, Rule::unwritten_register,
           "register " + context.grid.code->may_be_unwritten[static_cast<size_t>(number)],
           "the instruction reads the register, but no instruction has written the register");
  };
  if (use.guard >= 0) read(use.guard, context.fragment.mask);
  uint32_t lanes = context.mask;
  if (use.carries) {
    uint32_t any = use.partly ? kAllLanes : 0;
    for (const int32_t number : use.reads) any |= written[static_cast<size_t>(number)];
    for (const int32_t number : use.writes) {
      uint32_t& of = written[static_cast<size_t>(number)];
      of = (of & ~lanes) | (any & lanes);
    }
    return;
  }
  for (const int32_t number : use.reads) read(number, lanes);
  if (!use.sums.empty()) {
    const uint32_t adds = *context.row(op.detail->in[static_cast<size_t>(op.detail->adds_if)]);
    for (const int32_t number : use.sums) read(number, lanes & adds);
  }
  for (const int32_t number : use.writes) written[static_cast<size_t>(number)] |= lanes;
}

}  // namespace tandem::vgpu::machine
