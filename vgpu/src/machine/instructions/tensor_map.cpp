// tensormap.replace and tensormap.cp_fenceproxy. PTX ISA, chapters of these names.
#include "vgpu/src/units/tensor_map.h"

#include <cstring>

#include "vgpu/src/machine/instructions/bulk.h"
#include "vgpu/src/machine/instructions/memory.h"
#include "vgpu/src/machine/run/execute.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

constexpr uint32_t kMapBytes = 128;

struct ReplaceDetail : Detail {  // in: address, value; index of the dimension in `index`
  AccessForm form;
  bool wide_address = false, wide_value = false;
  int64_t offset = 0;
  units::MapField field = units::MapField::rank;
  int32_t index = 0;
};

Step replace_op(Context& context, const Op& op) {
  const auto& detail = op.as<ReplaceDetail>();
  Places places;
  if (!resolve(context, op, detail.form, {detail.in[0], detail.wide_address, detail.offset}, &places)) return Step::end;
  TANDEM_EACH_LANE(lane, context.mask & ~places.nothing) {
    const uint64_t value =
        detail.wide_value ? context.row<uint64_t>(detail.in[1])[lane] : context.row(detail.in[1])[lane];
    const Status status = units::replace(places.at[lane], detail.field, detail.index, value);
    if (!status.ok() && !context.finds(Rule::invalid_tensor_map, op, "", status.message)) return Step::end;
  }
  ++context.cluster.events;
  return Step::next;
}

bool take_field(Modifiers& words, units::MapField* field) {
  const char* const names[] = {"global_address", "rank",           "box_dim",          "global_dim",
                               "global_stride",  "element_stride", "elemtype",         "interleave_layout",
                               "swizzle_mode",   "fill_mode",      "swizzle_atomicity"};
  for (int n = 0; n < 11; ++n) {
    if (!words.take(names[n])) continue;
    *field = static_cast<units::MapField>(n);
    return true;
  }
  return false;
}

Status replace(Builder& b, const Instruction& i, Modifiers& words) {
  auto detail = std::make_unique<ReplaceDetail>();
  words.take("tile");
  if (!take_field(words, &detail->field)) return b.refuse(i, "must name a field that PTX defines: correct the field");
  take_space(words, &detail->form);
  words.take("b1024");
  const Type type = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  if (type == Type::none || i.operands.size() < 2 || i.operands.size() > 3)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  if (i.operands.size() == 3) {
    if (i.operands[1].kind != Operand::Kind::integer) {
      return b.refuse(i, "the dimension must be a constant: write a number");
    }
    detail->index = static_cast<int32_t>(i.operands[1].bits);
  }
  detail->in.push_back(b.address(i.operands[0], &detail->offset));
  detail->in.push_back(b.source(i.operands.back(), type));
  if (b.failed()) return b.fail(i);
  detail->wide_address = b.width(detail->in[0]) == 8;
  detail->wide_value = width_of(type) == 8;
  detail->form.reads = detail->form.writes = true;
  detail->form.bytes = kMapBytes;
  detail->form.alignment = 64;
  b.emit(replace_op, std::move(detail));
  return {};
}

// tensormap.cp_fenceproxy: a warp copies a map from shared to global memory. in: to, from.
struct CopyDetail : Detail {
  AccessForm to, from;
  bool wide_to = false, wide_from = false;
  int64_t to_offset = 0, from_offset = 0;
};

Step copy_op(Context& context, const Op& op) {
  const auto& detail = op.as<CopyDetail>();
  if (!is_whole(context, op)) return Step::end;
  const uint32_t all = context.mask;
  context.mask = 1u << first_lane(all);  // the accesses of one thread
  const auto lane = static_cast<uint32_t>(first_lane(all));
  Places to, from;
  const bool ok = resolve(context, op, detail.from, {detail.in[1], detail.wide_from, detail.from_offset}, &from) &&
                  resolve(context, op, detail.to, {detail.in[0], detail.wide_to, detail.to_offset}, &to);
  if (ok && ((to.nothing | from.nothing) >> lane & 1) == 0) std::memcpy(to.at[lane], from.at[lane], kMapBytes);
  context.mask = all;
  ++context.cluster.events;
  return ok ? Step::next : Step::end;
}

Status copy(Builder& b, const Instruction& i, Modifiers& words) {
  auto detail = std::make_unique<CopyDetail>();
  for (const char* word :
       {"global", "shared::cta", "tensormap::generic", "release", "cta", "cluster", "gpu", "sys", "sync", "aligned"})
    words.take(word);
  TANDEM_TRY(b.unknown(i, words));
  if (i.operands.size() != 3 || i.operands[2].bits != kMapBytes) {
    return b.refuse(i, "the size must be 128 bytes: write 128");
  }
  detail->in.push_back(b.address(i.operands[0], &detail->to_offset));
  detail->in.push_back(b.address(i.operands[1], &detail->from_offset));
  if (b.failed()) return b.fail(i);
  detail->wide_to = b.width(detail->in[0]) == 8;
  detail->wide_from = b.width(detail->in[1]) == 8;
  detail->to.space = ptx::Space::global;
  detail->from.space = ptx::Space::shared;
  detail->to.writes = detail->from.reads = true;
  detail->to.bytes = detail->from.bytes = kMapBytes;
  detail->to.alignment = detail->from.alignment = 64;
  b.emit(copy_op, std::move(detail));
  return {};
}

}  // namespace

Status decode_tensor_map(Builder& b, const Instruction& i) {
  Modifiers words(i);
  if (words.take("replace")) return replace(b, i, words);
  if (words.take("cp_fenceproxy")) return copy(b, i, words);
  return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
}

}  // namespace tandem::vgpu::machine
