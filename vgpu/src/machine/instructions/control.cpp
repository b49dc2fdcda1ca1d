// Branches, the end of threads, and hints. PTX ISA, "Control Flow Instructions".
#include "vgpu/src/machine/decode/builder.h"
#include "vgpu/src/machine/decode/calls.h"
#include "vgpu/src/machine/run/execute.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

Step exit_op(Context& context, const Op& op) {
  const bool all = context.mask == context.fragment.mask;  // read now: waiting lanes may reuse the fragment
  exit_lanes(context, op, context.mask);
  return all ? Step::gone : Step::next;
}

Step trap_op(Context& context, const Op& op) {
  context.finds(Rule::trap, op, "", "the kernel executed a trap", true);
  return Step::end;
}

Step yield_op(Context&, const Op&) { return Step::yield; }

// brx.idx: each lane jumps to the target that its register selects.
Step brx_op(Context& context, const Op& op) {
  const Detail& detail = *op.detail;
  const uint32_t* index = context.row(detail.in[0]);
  uint32_t left = context.mask;
  Fragment& fragment = context.fragment;
  while (left != 0) {
    const uint32_t choice = index[first_lane(left)];
    if (choice >= detail.targets.size()) {
      context.finds(Rule::trap, op, "",
                    "index " + std::to_string(choice) + " must be below the number of targets (" +
                        std::to_string(detail.targets.size()) + "): check the index",
                    true);
      return Step::end;
    }
    uint32_t same = 0;
    TANDEM_EACH_LANE(lane, left) same |= index[lane] == choice ? 1u << lane : 0u;
    left &= ~same;
    const int32_t target = detail.targets[choice];
    if (same == fragment.mask) {
      fragment.pc = target;
      return Step::jump;
    }
    const int32_t pc = fragment.pc;
    diverge(context.warp, fragment, same, target, op.a);
    fragment.pc = pc;
  }
  ++fragment.pc;  // the guard was false for the remaining lanes
  return Step::jump;
}

Status bra(Builder& b, const Instruction& i) {
  Modifiers words(i);
  words.take("uni");
  TANDEM_TRY(b.unknown(i, words));
  if (i.operands.size() != 1 || i.operands[0].kind != Operand::Kind::label)
    return b.refuse(i, "the target must be a label: correct the operand");
  b.frame()->branches.emplace_back(b.position(), i.operands[0].target);
  b.emit(Action(Shape::branch), -1);
  return {};
}

Status brx(Builder& b, const Instruction& i) {
  Modifiers words(i);
  words.take("idx");
  words.take("uni");
  TANDEM_TRY(b.unknown(i, words));
  if (i.operands.size() != 2 || i.operands[1].kind != Operand::Kind::vector)
    return b.refuse(i, "must have a list of targets: add the operand");
  auto detail = std::make_unique<Detail>();
  detail->in = {b.source(i.operands[0], Type::b32)};
  detail->ends = true;
  if (b.failed()) return b.fail(i);
  std::vector<int32_t> targets;
  for (const Operand& label : i.operands[1].parts) targets.push_back(label.target);
  b.frame()->tables.emplace_back(detail.get(), std::move(targets));
  b.emit(brx_op, std::move(detail));
  return {};
}

Status exit(Builder& b, const Instruction&) {
  emit_exit(b);
  return {};
}

Status trap(Builder& b, const Instruction&) {
  auto detail = std::make_unique<Detail>();
  detail->ends = detail->traps = true;
  b.emit(trap_op, std::move(detail));
  return {};
}

Status nanosleep(Builder& b, const Instruction& i) {
  Modifiers words(i);
  words.take("u32");
  TANDEM_TRY(b.unknown(i, words));
  b.emit(yield_op, nullptr);
  return {};
}

// Hints that change no result.
Status nothing(Builder&, const Instruction&) { return {}; }

Status griddepcontrol(Builder& b, const Instruction& i) {
  Modifiers words(i);
  if (words.take_of({"launch_dependents", "wait"}).empty()) {
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  }
  return b.unknown(i, words);  // grids run one after the other
}

constexpr Family kFamilies[] = {
    {"bra", bra},
    {"brx", brx},
    {"exit", exit},
    {"ret", exit},
    {"trap", trap},
    {"brkpt", trap},
    {"nanosleep", nanosleep},
    {"pmevent", nothing},
    {"griddepcontrol", griddepcontrol},
};

}  // namespace

void emit_exit(Builder& b) {
  auto detail = std::make_unique<Detail>();
  detail->ends = true;
  b.emit(exit_op, std::move(detail));
}

std::span<const Family> control_families() { return kFamilies; }

}  // namespace tandem::vgpu::machine
