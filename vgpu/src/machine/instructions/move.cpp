// mov, and conversions of addresses.
#include <map>

#include "vgpu/src/machine/address.h"
#include "vgpu/src/machine/instructions/float.h"
#include "vgpu/src/machine/run/execute.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

// mov.b64 {a, b}, c and mov.b64 c, {a, b}.
Status unpack(Builder& b, const Instruction& i, Type type) {
  const std::vector<Operand>& parts = i.operands[0].parts;
  const int bits = ptx::bits_of(type), part = bits / static_cast<int>(parts.size());
  const Type part_type = part == 8 ? Type::b8 : part == 16 ? Type::b16 : part == 32 ? Type::b32 : Type::b64;
  const int32_t a = b.source(i.operands[1], type);
  if (b.failed()) return b.fail(i);
  std::vector<int32_t> taken(parts.size(), -1);  // read first: the source may share a register
  for (size_t n = 0; n < parts.size(); ++n) {
    if (parts[n].kind == Operand::Kind::sink) continue;
    int32_t wide = -1;
    const int32_t d = b.narrow_destination(parts[n], part_type, &wide);
    if (b.failed()) return b.fail(i);
    if (part == 32 && bits == 128) {
      const int32_t half = b.new_register(8);
      b.emit_lanes("part.64.128." + std::to_string(n / 2), half, {a});
      b.emit_lanes("part.32.64." + std::to_string(n % 2), d, {half});
    } else if (!b.emit_lanes("part." + std::to_string(part) + "." + std::to_string(bits) + "." + std::to_string(n), d,
                             {a})) {
      return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
    }
    b.widen(wide, d, part_type);
  }
  return {};
}

Status pack(Builder& b, const Instruction& i, Type type) {
  const std::vector<Operand>& parts = i.operands[1].parts;
  const int bits = ptx::bits_of(type), part = bits / static_cast<int>(parts.size());
  const Type part_type = part == 8 ? Type::b8 : part == 16 ? Type::b16 : part == 32 ? Type::b32 : Type::b64;
  const int32_t d = b.destination(i.operands[0], type);
  std::vector<int32_t> s;
  for (const Operand& operand : parts) s.push_back(b.source(operand, part_type));
  if (b.failed()) return b.fail(i);
  const std::string name = "join." + std::to_string(part) + "." + std::to_string(bits);
  bool found = false;
  if (part == 32 && bits == 128) {
    const int32_t low = b.new_register(8), high = b.new_register(8);
    b.emit_lanes("join.32.64", low, {s[0], s[1]});
    b.emit_lanes("join.32.64", high, {s[2], s[3]});
    found = b.emit_lanes("join.64.128", d, {low, high});
  } else if (s.size() == 2 && part == 8) {
    found = b.emit_lanes("join.8.32", d, {s[0], s[1], b.constant(4, 0), b.constant(4, 0)});
  } else if (s.size() == 2) {
    found = b.emit_lanes(name, d, {s[0], s[1]});
  } else if (s.size() == 4) {
    found = b.emit_lanes(name, d, {s[0], s[1], s[2], s[3]});
  }
  return found ? Status() : b.refuse(i, "must have a form that the virtual GPU executes: use another form");
}

// Clocks return the number of ops that the warp has executed.
template <int Width>
Step clock_op(Context& context, const Op& op) {
  const uint64_t now = context.warp.executed + static_cast<uint64_t>(++context.warp.clock_reads);
  if (Width == 8) {
    TANDEM_EACH_LANE(lane, context.mask) context.row<uint64_t>(op.detail->out[0])[lane] = now;
  } else {
    TANDEM_EACH_LANE(lane, context.mask) context.row(op.detail->out[0])[lane] = static_cast<uint32_t>(now);
  }
  return Step::next;
}

Status read_clock(Builder& b, const Instruction& i, Type type) {
  const int32_t d = b.destination(i.operands[0], type);
  if (b.failed()) return b.fail(i);
  const std::string& name = i.operands[1].text;
  if (name.ends_with("_hi")) {
    b.copy(d, b.constant(4, 0));
    return {};
  }
  auto detail = std::make_unique<Detail>();
  detail->out = {d};
  b.emit(width_of(type) == 8 ? clock_op<8> : clock_op<4>, std::move(detail));
  return {};
}

Status mov(Builder& b, const Instruction& i) {
  Modifiers words(i);
  const Type type = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  if (type == Type::none || i.operands.size() != 2)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  if (i.operands[0].kind == Operand::Kind::vector) return unpack(b, i, type);
  if (i.operands[1].kind == Operand::Kind::vector) return pack(b, i, type);
  if (i.operands[1].kind == Operand::Kind::special) {
    const std::string& name = i.operands[1].text;
    if (name.starts_with("%clock") || name.starts_with("%globaltimer")) return read_clock(b, i, type);
  }
  const int32_t d = b.destination(i.operands[0], type), a = b.source(i.operands[1], type);
  if (b.failed()) return b.fail(i);
  b.copy(d, a);
  return {};
}

// A generic address of shared memory, local memory or a parameter is its window and its 32-bit address. A global
// address is generic already. A constant's address may have 32 bits; the module's memory then supplies the upper half.
Status cvta(Builder& b, const Instruction& i) {
  Modifiers words(i);
  const bool to = words.take("to");
  const std::string space =
      words.take_of({"shared", "shared::cta", "shared::cluster", "local", "global", "const", "param", "param::entry"});
  const Type type = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  if (space.empty() || width_of(type) != 8)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  const int32_t d = b.destination(i.operands[0], type);
  int64_t offset = 0;
  const int32_t base = b.address(i.operands[1], &offset, 8);
  if (b.failed()) return b.fail(i);
  int32_t a = base;
  if (offset != 0) {
    a = b.new_register(8);
    b.emit_lanes("add.u64", a, {base, b.constant(8, static_cast<uint64_t>(offset))});
  }
  if (space == "const" && !to) {
    const auto begin = reinterpret_cast<uintptr_t>(b.code().memory->bytes.get());
    const int32_t low = b.new_register(8), offset_in_memory = b.new_register(8);
    b.emit_lanes("sub.u64", low, {a, b.constant(8, begin)});
    b.emit_lanes("and.b64", offset_in_memory, {low, b.constant(8, UINT32_MAX)});
    b.emit_lanes("add.u64", d, {offset_in_memory, b.constant(8, begin)});
    return {};
  }
  const uint64_t window = space.starts_with("shared")  ? kSharedWindow
                          : space == "local"           ? kLocalWindow
                          : space.starts_with("param") ? kParamWindow
                                                       : 0;
  if (window == 0)
    b.copy(d, a);
  else if (to)
    b.emit_lanes("and.b64", d, {a, b.constant(8, ~kWindowMask)});
  else
    b.emit_lanes("or.b64", d, {a, b.constant(8, window)});
  return {};
}

Status isspacep(Builder& b, const Instruction& i) {
  Modifiers words(i);
  const std::string space = words.take_first();
  TANDEM_TRY(b.unknown(i, words));
  const int32_t d = b.destination(i.operands[0], Type::pred), a = b.source(i.operands[1], Type::b64);
  if (b.failed()) return b.fail(i);
  const int32_t window = b.new_register(8);
  b.emit_lanes("and.b64", window, {a, b.constant(8, kWindowMask)});
  const std::map<std::string, uint64_t> windows = {{"shared::cluster", kSharedWindow},
                                                   {"local", kLocalWindow},
                                                   {"param", kParamWindow},
                                                   {"param::entry", kParamWindow}};
  if (const auto found = windows.find(space); found != windows.end()) {
    b.emit_lanes("setp.eq.u64", d, {window, b.constant(8, found->second)});
  } else if (space == "shared" || space == "shared::cta") {
    const int32_t rank = b.new_register(8), own = b.new_register(8), mine = b.new_register(8);
    b.emit_lanes("and.b64", rank, {a, b.constant(8, ~uint64_t{kSharedOffset})});
    b.emit_lanes("cvt.u64.u32", own, {b.special(Special::cluster_ctarank, 4)});
    b.emit_lanes("shl.u64", own, {own, b.constant(4, kRankShift)});
    b.emit_lanes("or.b64", mine, {own, b.constant(8, kSharedWindow)});
    b.emit_lanes("setp.eq.u64", d, {rank, mine});
  } else if (space == "global") {
    const int32_t high = b.new_register(0), zero = b.new_register(0);
    b.emit_lanes("setp.lt.u64", high, {a, b.constant(8, kSharedWindow)});
    b.emit_lanes("setp.gt.u64", zero, {a, b.constant(8, kParamWindow | ~kWindowMask)});
    b.emit_lanes("or.pred", d, {high, zero});
  } else if (space == "const") {
    b.copy(d, b.constant(0, 0));
  } else {
    return b.refuse(i, "the state space must be .global, .shared, .local, .const or .param: name one");
  }
  return {};
}

// mapa and getctarank: the rank of the block is part of a shared address.
Status mapa(Builder& b, const Instruction& i) {
  Modifiers words(i);
  const bool shared = words.take("shared::cluster");
  const Type type = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  const int width = width_of(type);
  const int32_t d = b.destination(i.operands[0], type);
  int64_t offset = 0;
  const int32_t a = b.address(i.operands[1], &offset, width), rank = b.source(i.operands[2], Type::b32);
  if (b.failed()) return b.fail(i);
  const std::string bits = std::to_string(8 * width);
  const uint64_t keep = width == 4 ? kSharedOffset : shared ? uint64_t{kSharedOffset} : kWindowMask | kSharedOffset;
  const int32_t own = b.new_register(width), sum = b.new_register(width), wide = b.new_register(width),
                shifted = b.new_register(width);
  b.emit_lanes("add.u" + bits, sum, {a, b.constant(width, static_cast<uint64_t>(offset))});
  b.emit_lanes("and.b" + bits, own, {sum, b.constant(width, keep)});
  b.emit_lanes(width == 8 ? "cvt.u64.u32" : "copy.4", wide, {rank});
  b.emit_lanes("shl.u" + bits, shifted, {wide, b.constant(4, kRankShift)});
  b.emit_lanes("or.b" + bits, d, {own, shifted});
  return {};
}

Status getctarank(Builder& b, const Instruction& i) {
  Modifiers words(i);
  words.take("shared::cluster");
  const Type type = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  const int32_t d = b.destination(i.operands[0], Type::b32);
  int64_t offset = 0;
  const int32_t a = b.address(i.operands[1], &offset, 0);
  (void)type;
  if (b.failed()) return b.fail(i);
  int32_t low = a;
  if (b.width(a) == 8) {
    low = b.new_register(4);
    b.emit_lanes("part.32.64.0", low, {a});
  }
  b.emit_lanes("shr.u32", d, {low, b.constant(4, kRankShift)});
  return {};
}

constexpr Family kFamilies[] = {
    {"mov", mov},           {"cvt", decode_cvt}, {"cvta", cvta},
    {"isspacep", isspacep}, {"mapa", mapa},      {"getctarank", getctarank},
};

}  // namespace

std::span<const Family> move_families() { return kFamilies; }

}  // namespace tandem::vgpu::machine
