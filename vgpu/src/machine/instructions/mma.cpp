// mma.sync. PTX ISA, "Matrix multiply-accumulate operation using mma instruction".
#include "vgpu/src/machine/instructions/wgmma.h"
#include "vgpu/src/machine/run/execute.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

struct MmaDetail : Detail {  // in: registers of A, B, C; out: of D
  units::MmaForm form;
  size_t a_count = 0, b_count = 0;
};

Step mma_op(Context& context, const Op& op) {
  const auto& detail = op.as<MmaDetail>();
  if (!is_whole(context, op, Exited::matter)) return Step::end;
  std::vector<const uint32_t*> in;
  std::vector<uint32_t*> out;
  for (const int32_t at : detail.in) in.push_back(context.row(at));
  for (const int32_t at : detail.out) out.push_back(context.row(at));
  units::mma(detail.form, in.data(), in.data() + detail.a_count, in.data() + detail.a_count + detail.b_count,
             out.data());
  return Step::next;
}

units::Format format_of(Type type) {
  switch (type) {
    case Type::f16: return units::Format::f16;
    case Type::bf16: return units::Format::bf16;
    case Type::e4m3: return units::Format::e4m3;
    case Type::e5m2: return units::Format::e5m2;
    case Type::s8: return units::Format::s8;
    case Type::u8: return units::Format::u8;
    default: return units::Format::tf32;
  }
}

units::Sum sum_of(Type type) {
  return type == Type::f16   ? units::Sum::f16
         : type == Type::s32 ? units::Sum::s32
         : type == Type::f64 ? units::Sum::f64
                             : units::Sum::f32;
}

std::vector<Operand> list_of(const Operand& operand) {
  return operand.kind == Operand::Kind::vector ? operand.parts : std::vector<Operand>{operand};
}

}  // namespace

Status decode_mma(Builder& b, const Instruction& i) {
  Modifiers words(i);
  auto detail = std::make_unique<MmaDetail>();
  units::MmaForm& form = detail->form;
  words.take("sync");
  words.take("aligned");
  const std::string shape = words.take_prefix("m");
  if (std::sscanf(shape.c_str(), "m%dn%dk%d", &form.m, &form.n, &form.k) != 3)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  const bool row_col = words.take("row") && words.take("col");
  form.saturate = words.take("satfinite");
  const Type d = words.take_type(), a = words.take_type(), bt = words.take_type(), c = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  if (!row_col || c == Type::none || i.operands.size() != 4) {
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  }
  form.a = format_of(a);
  form.b = format_of(bt);
  form.d = sum_of(d);
  form.c = sum_of(c);
  const Status status = units::check(form);
  if (!status.ok()) return b.refuse(i, status.message);
  const Type type = d == Type::f64 ? Type::b64 : Type::b32;  // type of a register
  size_t counts[4] = {};
  for (size_t n = 1; n < 4; ++n) {
    for (const Operand& r : list_of(i.operands[n])) detail->in.push_back(b.source(r, type));
    counts[n] = list_of(i.operands[n]).size();
  }
  for (const Operand& r : list_of(i.operands[0])) detail->out.push_back(b.destination(r, type));
  detail->a_count = counts[1];
  detail->b_count = counts[2];
  if (b.failed()) return b.fail(i);
  const auto fits = [](size_t given, int wanted) { return given == static_cast<size_t>(wanted); };
  if (!fits(counts[1], units::a_registers(form)) || !fits(counts[2], units::b_registers(form)) ||
      !fits(counts[3], units::c_registers(form)) || !fits(detail->out.size(), units::d_registers(form)))
    return b.refuse(i, "the number of registers must fit the shape: correct the list");
  b.emit(mma_op, std::move(detail));
  return {};
}

}  // namespace tandem::vgpu::machine
