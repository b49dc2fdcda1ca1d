// ldmatrix, stmatrix, movmatrix, mma.sync. PTX ISA, "Warp-level matrix instructions".
#include "vgpu/src/machine/instructions/wgmma.h"
#include "vgpu/src/machine/run/execute.h"
#include "vgpu/src/machine/run/resolve.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

// Whole warps execute these instructions, because the registers of the lanes belong to one matrix.
struct MatrixDetail : Detail {  // in: address, stored registers; out: loaded registers
  units::MatrixAccess access;
  AccessForm form;
  bool wide_address = false;
  int64_t offset = 0;
};

// Resolves the rows' absolute offsets in the window. Returns false if the run is over.
bool row_addresses(Context& context, const Op& op, const MatrixDetail& detail, uint32_t* addresses) {
  const uint32_t all = context.mask;
  const int count = units::row_addresses(detail.access);
  context.mask &= count == kLanes ? kAllLanes : (1u << count) - 1;
  Places places;
  const bool ok = resolve(context, op, detail.form, {detail.in[0], detail.wide_address, detail.offset}, &places);
  TANDEM_EACH_LANE(lane, context.mask) addresses[lane] = static_cast<uint32_t>(places.address[lane]);
  const bool shared = ok && places.shared == context.mask;
  context.mask = all;
  if (ok && !shared)
    context.finds(Rule::wrong_space, op, "", "the address must be in shared memory: correct the address", true);
  return ok && shared;
}

Step load_op(Context& context, const Op& op) {
  const auto& detail = op.as<MatrixDetail>();
  uint32_t addresses[kLanes] = {};
  if (!is_whole(context, op, Exited::matter) || !row_addresses(context, op, detail, addresses)) return Step::end;
  uint32_t* rows[8] = {};
  for (size_t n = 0; n < detail.out.size(); ++n) rows[n] = context.row(detail.out[n]);
  units::load_matrix(detail.access, context.block.shared.data(), addresses, rows);
  return Step::next;
}

Step store_op(Context& context, const Op& op) {
  const auto& detail = op.as<MatrixDetail>();
  uint32_t addresses[kLanes] = {};
  if (!is_whole(context, op, Exited::matter) || !row_addresses(context, op, detail, addresses)) return Step::end;
  const uint32_t* rows[8] = {};
  for (size_t n = 1; n < detail.in.size(); ++n) rows[n - 1] = context.row(detail.in[n]);
  units::store_matrix(detail.access, context.block.shared.data(), addresses, rows);
  ++context.cluster.events;
  return Step::next;
}

bool take_access(Modifiers& words, units::MatrixAccess* access) {
  using Shape = units::MatrixAccess::Shape;
  const std::string shape = words.take_of({"m8n8", "m16n16", "m8n16", "m16n8"});
  const std::string count = words.take_of({"x1", "x2", "x4"});
  access->count = count.empty() ? 0 : count[1] - '0';
  access->transpose = words.take("trans");
  const std::string format = words.take_of({"b16", "b8"});
  const std::string packed = words.take_of({"b8x16.b6x16_p32", "b8x16.b4x16_p64", "b8x16"});
  const std::string source = packed == "b8x16" ? words.take_of({"b6x16_p32", "b4x16_p64"}) : "";
  if (shape == "m8n8" && format == "b16")
    access->shape = Shape::m8n8_b16;
  else if (shape == "m16n16" && format == "b8")
    access->shape = Shape::m16n16_b8;
  else if (shape == "m16n8" && format == "b8")
    access->shape = Shape::m16n8_b8;
  else if (shape == "m8n16" && source == "b6x16_p32")
    access->shape = Shape::m8n16_b8x16_b6x16_p32;
  else if (shape == "m8n16" && source == "b4x16_p64")
    access->shape = Shape::m8n16_b8x16_b4x16_p64;
  else if (shape == "m16n16" && source == "b6x16_p32")
    access->shape = Shape::m16n16_b8x16_b6x16_p32;
  else if (shape == "m16n16" && source == "b4x16_p64")
    access->shape = Shape::m16n16_b8x16_b4x16_p64;
  else
    return false;
  return access->count != 0;
}

Status matrix_access(Builder& b, const Instruction& i) {
  const bool load = i.opcode == "ldmatrix";
  Modifiers words(i);
  auto detail = std::make_unique<MatrixDetail>();
  words.take("sync");
  words.take("aligned");
  words.take_of({"shared", "shared::cta"});
  if (!take_access(words, &detail->access))
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  TANDEM_TRY(b.unknown(i, words));
  const Status status = load ? units::check_load(detail->access) : units::check_store(detail->access);
  if (!status.ok()) return b.refuse(i, status.message);
  if (i.operands.size() != 2) return b.refuse(i, "must have the operands that PTX defines: correct the operands");
  const int32_t address = b.address(i.operands[load ? 1 : 0], &detail->offset);
  if (b.failed()) return b.fail(i);
  detail->wide_address = b.width(address) == 8;
  detail->in.push_back(address);
  const Operand& list = i.operands[load ? 0 : 1];
  const std::vector<Operand> registers = list.kind == Operand::Kind::vector ? list.parts : std::vector<Operand>{list};
  if (registers.size() != static_cast<size_t>(units::registers(detail->access)))
    return b.refuse(i, "the number of registers must fit the shape: correct the list");
  for (const Operand& r : registers) {
    if (load)
      detail->out.push_back(b.destination(r, Type::b32));
    else
      detail->in.push_back(b.source(r, Type::b32));
  }
  if (b.failed()) return b.fail(i);
  detail->form.space = i.has("shared") || i.has("shared::cta") ? ptx::Space::shared : ptx::Space::generic;
  detail->form.reads = load;
  detail->form.writes = !load;
  detail->form.bytes = static_cast<uint32_t>(units::row_bytes(detail->access));
  detail->form.alignment = detail->form.bytes;
  const Exec exec = load ? load_op : store_op;
  b.emit(exec, std::move(detail));
  return {};
}

Step transpose_op(Context& context, const Op& op) {
  if (!is_whole(context, op, Exited::matter)) return Step::end;
  units::transpose_matrix(context.row(op.detail->in[0]), context.row(op.detail->out[0]));
  return Step::next;
}

Status movmatrix(Builder& b, const Instruction& i) {
  Modifiers words(i);
  for (const char* word : {"sync", "aligned", "m8n8", "trans", "b16"}) words.take(word);
  TANDEM_TRY(b.unknown(i, words));
  auto detail = std::make_unique<Detail>();
  detail->out = {b.destination(i.operands[0], Type::b32)};
  detail->in = {b.source(i.operands[1], Type::b32)};
  if (b.failed()) return b.fail(i);
  b.emit(transpose_op, std::move(detail));
  return {};
}

constexpr Family kFamilies[] = {
    {"ldmatrix", matrix_access}, {"stmatrix", matrix_access}, {"movmatrix", movmatrix},
    {"wgmma", decode_wgmma},     {"mma", decode_mma},
};

}  // namespace

std::span<const Family> matrix_families() { return kFamilies; }

}  // namespace tandem::vgpu::machine
