// tcgen05.mma. PTX ISA, chapter of this name.
#include "vgpu/src/machine/instructions/tcgen05.h"
#include "vgpu/src/machine/run/execute.h"
#include "vgpu/src/units/tcgen05.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

struct MmaDetail : Detail {  // in: by the numbers below; -1: absent
  units::TmmaForm form;
  int32_t d = -1, a = -1, b = -1, instruction = -1, accumulate = -1, scale_a = -1, scale_b = -1, zero_columns = -1,
          mask = -1;
  int32_t d_offset = 0, a_offset = 0, scale_a_offset = 0, scale_b_offset = 0;
  int32_t mask_count = 0;
  uint32_t scale_d = 0;
};

units::TmmaOperands operands_of(const Context& context, const MmaDetail& detail, uint32_t lane) {
  const auto word = [&](int32_t n) { return n < 0 ? 0u : context.row(detail.in[static_cast<size_t>(n)])[lane]; };
  const auto wide = [&](int32_t n) {
    return n < 0 ? uint64_t{0} : context.row<uint64_t>(detail.in[static_cast<size_t>(n)])[lane];
  };
  units::TmmaOperands o;
  o.d = word(detail.d) + static_cast<uint32_t>(detail.d_offset);
  o.a = detail.form.a_in_tmem ? word(detail.a) + static_cast<uint32_t>(detail.a_offset) : wide(detail.a);
  o.b = wide(detail.b);
  o.instruction = word(detail.instruction);
  for (int32_t n = 0; n < detail.mask_count; ++n) o.disabled_lanes[n] = word(detail.mask + n);
  o.accumulate = (*context.row(detail.in[static_cast<size_t>(detail.accumulate)]) >> lane & 1) != 0;
  o.scale_d = detail.scale_d;
  o.scale_a = word(detail.scale_a) + static_cast<uint32_t>(detail.scale_a_offset);
  o.scale_b = word(detail.scale_b) + static_cast<uint32_t>(detail.scale_b_offset);
  o.zero_columns = wide(detail.zero_columns);
  return o;
}

bool issue_mma(Context& context, const Op& op, const MmaDetail& detail, uint32_t lane) {
  TensorWork work;
  if (!group_of(context, op, detail.form.group, &work.blocks)) return false;
  auto mma = std::make_shared<units::Tmma>();
  const Status status =
      units::decode(detail.form, operands_of(context, detail, lane), context.grid.window_bytes, mma.get());
  if (!status.ok()) {
    context.finds(Rule::invalid_descriptor, op, "", status.message, true);
    return false;
  }
  for (size_t n = 0; n < work.blocks.size(); ++n) {
    std::vector<units::Range> shared;
    std::vector<units::CellRange> reads, writes;
    units::list_ranges(*mma, static_cast<int>(n), &shared, &reads, &writes);
    const Block& block = *work.blocks[n];
    if (!check_cells(context, op, block, reads) || !check_cells(context, op, block, writes)) return false;
    add_shared(block, shared, &work.reads);
    add_cells(block, reads, &work.reads);
    add_cells(block, writes, &work.writes);
  }
  auto& ops = tensor_ops(work.blocks);
  for (auto before = ops.rbegin(); before != ops.rend(); ++before) {
    work.after.push_back(before->op);
    if (before->kind == AsyncKind::tcgen05_mma) break;  // the operation follows all earlier operations
  }
  work.move = [mma, blocks = work.blocks] {
    const std::byte* windows[2] = {};
    units::TensorMemory* memories[2] = {};
    for (size_t n = 0; n < blocks.size(); ++n) {
      windows[n] = blocks[n]->shared.data();
      memories[n] = blocks[n]->tensor_memory.get();
    }
    units::execute(*mma, windows, memories);
  };
  const AsyncRef made = issue_work(context, op, lane, std::move(work));
  ops.push_back({AsyncKind::tcgen05_mma, made});
  return true;
}

Step mma_op(Context& context, const Op& op) {
  const auto& detail = op.as<MmaDetail>();
  TANDEM_EACH_LANE(lane, context.mask)
  if (!issue_mma(context, op, detail, lane)) return Step::end;
  context.cluster.async.advance(&context.cluster.random);
  return Step::next;
}

bool take_kind(const std::string& word, units::TmmaForm* form) {
  using Kind = units::TmmaKind;
  const std::pair<const char*, Kind> kinds[] = {{"kind::f16", Kind::f16},           {"kind::tf32", Kind::tf32},
                                                {"kind::f8f6f4", Kind::f8f6f4},     {"kind::i8", Kind::i8},
                                                {"kind::mxf8f6f4", Kind::mxf8f6f4}, {"kind::mxf4", Kind::mxf4},
                                                {"kind::mxf4nvf4", Kind::mxf4nvf4}};
  for (const auto& [name, kind] : kinds) {
    if (word != name) continue;
    form->kind = kind;
    return true;
  }
  return false;
}

int32_t scale_vector(const std::string& word) {
  if (word == "scale_vec::1X") return 1;
  if (word == "scale_vec::2X") return 2;
  if (word == "scale_vec::4X") return 4;
  return word == "block32" ? 32 : word == "block16" ? 16 : 0;
}

// Operands after the instruction descriptor: {scales}, {mask}, predicate, {scale of D or columns of zeros}.
Status take_rest(Builder& b, const Instruction& i, bool scaled, MmaDetail* detail) {
  size_t n = 4;
  const auto add = [&](int32_t reg) {
    detail->in.push_back(reg);
    return static_cast<int32_t>(detail->in.size()) - 1;
  };
  const auto scale = [&](int32_t* at, int32_t* offset_at) {
    int64_t offset = 0;
    *at = add(b.address(i.operands[n++], &offset, 4));
    *offset_at = static_cast<int32_t>(offset);
  };
  if (i.operands.size() < (scaled ? 7u : 5u))
    return b.refuse(i, "must have the operands that PTX defines: correct the operands");
  if (scaled) {
    scale(&detail->scale_a, &detail->scale_a_offset);
    scale(&detail->scale_b, &detail->scale_b_offset);
  }
  if (i.operands[n].kind == Operand::Kind::vector) {
    detail->mask = static_cast<int32_t>(detail->in.size());
    detail->mask_count = static_cast<int32_t>(i.operands[n].parts.size());
    if (detail->mask_count != 4 * detail->form.group)
      return b.refuse(i, str_cat("the mask of lanes must have ", 4 * detail->form.group, " parts: correct the list"));
    for (const Operand& part : i.operands[n].parts) add(b.source(part, Type::b32));
    ++n;
  }
  if (n >= i.operands.size()) return b.refuse(i, "must have a predicate: add the operand");
  detail->accumulate = add(b.predicate(i.operands[n++]));
  if (n < i.operands.size() && i.operands[n].kind == Operand::Kind::integer && !detail->form.ws) {
    detail->scale_d = static_cast<uint32_t>(i.operands[n++].bits);
  } else if (n < i.operands.size() && detail->form.ws) {
    detail->zero_columns = add(b.source(i.operands[n++], Type::b64));
  }
  return n == i.operands.size() ? Status()
                                : b.refuse(i, "must have the operands that PTX defines: correct the operands");
}

}  // namespace

Status decode_tmem_mma(Builder& b, const Instruction& i, Modifiers& words) {
  auto detail = std::make_unique<MmaDetail>();
  units::TmmaForm& form = detail->form;
  if (words.take("sp")) return b.refuse(i, "must not be sparse: use the dense form");
  form.ws = words.take("ws");
  form.group = take_group(words);
  form.shift_a = words.take("ashift");
  const std::string kind = words.take_prefix("kind::");
  const bool scaled = words.take("block_scale");
  form.scale_vector =
      scale_vector(words.take_of({"scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32"}));
  while (!words.take_prefix("collector::").empty()) {
  }
  TANDEM_TRY(b.unknown(i, words));
  if (form.group == 0 || !take_kind(kind, &form) || i.operands.size() < 5)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  if (form.kind == units::TmmaKind::i8 && !b.model().tcgen05_i8)
    return b.refuse(i, "must not multiply integers on " + b.model().name + ": use another kind");
  form.a_in_tmem = i.operands[1].kind == Operand::Kind::address;
  const Status status = units::check(form);
  if (!status.ok()) return b.refuse(i, status.message);
  const auto add = [&](int32_t reg) {
    detail->in.push_back(reg);
    return static_cast<int32_t>(detail->in.size()) - 1;
  };
  int64_t offset = 0;
  detail->d = add(b.address(i.operands[0], &offset, 4));
  detail->d_offset = static_cast<int32_t>(offset);
  if (form.a_in_tmem) {
    detail->a = add(b.address(i.operands[1], &offset, 4));
    detail->a_offset = static_cast<int32_t>(offset);
  } else {
    detail->a = add(b.source(i.operands[1], Type::b64));
  }
  detail->b = add(b.source(i.operands[2], Type::b64));
  detail->instruction = add(b.source(i.operands[3], Type::b32));
  if (b.failed()) return b.fail(i);
  TANDEM_TRY(take_rest(b, i, scaled, detail.get()));
  if (b.failed()) return b.fail(i);
  b.emit(mma_op, std::move(detail));
  return {};
}

}  // namespace tandem::vgpu::machine
