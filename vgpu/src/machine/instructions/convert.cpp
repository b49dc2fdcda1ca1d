// cvt. PTX ISA, "cvt".
#include "vgpu/src/machine/instructions/float.h"
#include "vgpu/src/machine/lanes/lanes.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Type;
using units::Fit;
using units::Format;
using units::Rounding;

bool is_narrow(Type t) {  // f16, bf16 and narrower formats convert through float32
  switch (t) {
    case Type::f16:
    case Type::bf16:
    case Type::tf32:
    case Type::f16x2:
    case Type::bf16x2:
    case Type::e4m3x2:
    case Type::e5m2x2:
    case Type::e2m3x2:
    case Type::e3m2x2:
    case Type::e2m1x2:
    case Type::ue8m0x2: return true;
    default: return false;
  }
}
bool is_pair(Type t) { return is_narrow(t) && t != Type::f16 && t != Type::bf16 && t != Type::tf32; }
bool is_real(Type t) { return t == Type::f32 || t == Type::f64 || is_narrow(t); }

Format format_of(Type t) {
  switch (t) {
    case Type::f16:
    case Type::f16x2: return Format::f16;
    case Type::bf16:
    case Type::bf16x2: return Format::bf16;
    case Type::e4m3x2: return Format::e4m3;
    case Type::e5m2x2: return Format::e5m2;
    case Type::e2m3x2: return Format::e2m3;
    case Type::e3m2x2: return Format::e3m2;
    case Type::e2m1x2: return Format::e2m1;
    case Type::ue8m0x2: return Format::ue8m0;
    default: return Format::tf32;
  }
}

struct PairDetail : Detail {
  Format format = Format::f16;
  Fit fit;
};
void encode_pair(const Op& op, const std::byte* r, void* d) {
  const auto& p = op.as<PairDetail>();
  units::rows().encode_pair(p.format, p.fit, reinterpret_cast<const float*>(r + op.a),
                            reinterpret_cast<const float*>(r + op.b), static_cast<uint32_t*>(d));
}
template <bool High>
void decode_pair(const Op& op, const std::byte* r, void* d) {
  float other[kLanes];
  const auto& p = op.as<PairDetail>();
  const auto* a = reinterpret_cast<const uint32_t*>(r + op.a);
  auto* to = static_cast<float*>(d);
  units::rows().decode_pair(p.format, a, High ? to : other, High ? other : to);
}
void put_pair(Builder& b, RowsOf function, Format format, Fit fit, int32_t d, std::initializer_list<int32_t> s) {
  auto detail = std::make_unique<PairDetail>();
  detail->format = format;
  detail->fit = fit;
  b.emit(function, d, s).detail = detail.get();
  b.code().details.push_back(std::move(detail));
}

// cvt.rs: the random bits of each half; float16 uses 13 of 16.
void encode_stochastic(const Op& op, const std::byte* r, void* d) {
  const auto& p = op.as<PairDetail>();
  const auto* high = reinterpret_cast<const float*>(r + op.a);
  const auto* low = reinterpret_cast<const float*>(r + op.b);
  const auto* random = reinterpret_cast<const uint32_t*>(r + op.c);
  const int bits = p.format == Format::f16 ? 13 : 16;
  const uint32_t mask = (1u << bits) - 1;
  auto* to = static_cast<uint32_t*>(d);
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t upper = units::encode_stochastic(high[i], p.format, random[i] >> 16 & mask, bits, p.fit);
    to[i] = upper << 16 | units::encode_stochastic(low[i], p.format, random[i] & mask, bits, p.fit);
  }
}

struct Conversion {
  Type to = Type::none, from = Type::none;
  std::string rounding;  // as in the text
  Fit fit;
  bool ftz = false, sat = false;
};

// cvt.rn.bf16x2.f32 d, a, b; cvt.rn.f16x2.e4m3x2 d, a; cvt.rn.satfinite.e4m3x2.f16x2 d, a.
Status convert_pair(Builder& b, const Instruction& i, const Conversion& c) {
  int32_t wide = -1;
  const Type stored = ptx::bits_of(c.to) < 16 ? Type::b8 : ptx::bits_of(c.to) == 16 ? Type::b16 : Type::b32;
  const int32_t d = b.narrow_destination(i.operands[0], stored, &wide);
  int32_t high = -1, low = -1;
  if (c.from == Type::f32) {
    if (i.operands.size() != 3) return b.refuse(i, "must have the operands that PTX defines: correct the operands");
    high = b.source(i.operands[1], Type::f32);
    low = b.source(i.operands[2], Type::f32);
    if (b.failed()) return b.fail(i);
  } else {
    const int32_t a = b.source(i.operands[1], ptx::bits_of(c.from) == 32   ? Type::b32
                                              : ptx::bits_of(c.from) == 16 ? Type::b16
                                                                           : Type::b8);
    if (b.failed()) return b.fail(i);
    high = b.new_register(4);
    low = b.new_register(4);
    put_pair(b, decode_pair<true>, format_of(c.from), {}, high, {a});
    put_pair(b, decode_pair<false>, format_of(c.from), {}, low, {a});
  }
  put_pair(b, encode_pair, format_of(c.to), c.fit, d, {high, low});
  b.widen(wide, d, stored);
  return {};
}

Status convert_stochastic(Builder& b, const Instruction& i, const Conversion& c) {
  if ((c.to != Type::f16x2 && c.to != Type::bf16x2) || c.from != Type::f32 || i.operands.size() != 4)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  const int32_t d = b.destination(i.operands[0], Type::b32), high = b.source(i.operands[1], Type::f32);
  const int32_t low = b.source(i.operands[2], Type::f32), random = b.source(i.operands[3], Type::b32);
  if (b.failed()) return b.fail(i);
  put_pair(b, encode_stochastic, format_of(c.to), c.fit, d, {high, low, random});
  return {};
}

// cvt.pack.sat: two saturated integers in the low bits. With 8 bits, c is placed above them.
Status convert_packed(Builder& b, const Instruction& i, Modifiers& words) {
  words.take("sat");
  const Type to = words.take_type();
  words.take("s32");
  const bool bytes = words.take("b32");
  TANDEM_TRY(b.unknown(i, words));
  const int bits = to == Type::none ? 0 : ptx::bits_of(to);
  if (bits != (bytes ? 8 : 16) || i.operands.size() != (bytes ? 4u : 3u))
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  const int32_t d = b.destination(i.operands[0], Type::b32), x = b.source(i.operands[1], Type::s32);
  const int32_t y = b.source(i.operands[2], Type::s32), c = bytes ? b.source(i.operands[3], Type::b32) : -1;
  if (b.failed()) return b.fail(i);
  const int32_t high = b.new_register(4), low = b.new_register(4), above = b.new_register(4);
  b.emit_lanes("cvt.sat." + integer_name(to) + ".s32", high, {x});
  b.emit_lanes("cvt.sat." + integer_name(to) + ".s32", low, {y});
  if (!bytes) {
    b.emit_lanes("join.16.32", d, {low, high});
    return {};
  }
  b.emit_lanes("shr.u32", above, {c, b.constant(4, 8)});
  b.emit_lanes("join.8.32", d, {low, high, c, above});
  return {};
}

// Converts between float32, float64 and the 16-bit formats (and tf32).
Status convert_real(Builder& b, const Instruction& i, const Conversion& c) {
  const bool integral = c.rounding.size() == 3 && c.rounding.ends_with('i');
  const int32_t d = b.destination(i.operands[0], c.to == Type::tf32 ? Type::b32 : c.to);
  int32_t a = b.source(i.operands[1], c.from);
  const int32_t wide = a;
  if (b.failed()) return b.fail(i);
  const std::string ftz = c.ftz ? ".ftz" : "";
  if (c.from == Type::f64 && c.to == Type::f64) {
    if (integral)
      b.emit_lanes("cvt." + c.rounding + ".f64.f64", d, {a});
    else
      b.emit_lanes(c.sat ? "saturate.f64" : "copy.8", d, {a});
    return {};
  }
  if (is_narrow(c.from)) a = to_f32(b, a, c.from);
  if (c.from == Type::f16 && c.to == Type::f32) {
    const int32_t plain = b.new_register(4);
    b.emit_lanes("canonical.f32", plain, {a});
    a = plain;
  }
  if (c.to == Type::f64) {
    b.emit_lanes("cvt" + ftz + ".f64.f32", d, {a});
    return {};
  }
  if (c.from == Type::f64) {
    const int32_t single = b.new_register(4);
    if (c.to != Type::f32)
      b.emit_lanes("odd.f32.f64", single, {a});
    else if (c.ftz)
      emit_rounded(b, c.fit.rounding, lane_function("cvt." + c.rounding + ".ftz.f32.f64"), single, {a});
    else
      emit_rounded(b, c.fit.rounding, lane_function("cvt.f32.f64"), single, {a});
    a = single;
  }
  if (integral) {
    const int32_t whole = b.new_register(4);
    b.emit_lanes("cvt." + c.rounding + ftz + ".f32.f32", whole, {a});
    a = whole;
  } else if (c.ftz && c.to == Type::f32) {
    const int32_t flushed = b.new_register(4);
    b.emit_lanes("flush.f32", flushed, {a});
    a = flushed;
  }
  if (c.sat) {
    const int32_t saturated = b.new_register(4);
    b.emit(units::rows().saturate, saturated, {a});
    a = saturated;
  }
  if (c.to == Type::f32)
    b.copy(d, a);
  else
    encode(b, format_of(c.to), c.fit, d, a);
  if (c.from == Type::f64 && c.to != Type::f32 && !c.sat)
    b.emit_lanes(std::string("nan.") + ptx::name_of(c.to) + ".f64", d, {d, wide});
  return {};
}

Status convert_to_integer(Builder& b, const Instruction& i, const Conversion& c) {
  int32_t wide = -1;
  const int32_t d = b.narrow_destination(i.operands[0], c.to, &wide);
  int32_t a = b.source(i.operands[1], c.from);
  if (b.failed()) return b.fail(i);
  std::string from = ptx::name_of(c.from);
  if (is_narrow(c.from)) {
    a = to_f32(b, a, c.from);
    from = "f32";
  }
  if (!b.emit_lanes("cvt." + c.rounding + (c.ftz && from == "f32" ? ".ftz." : ".") + integer_name(c.to) + "." + from, d,
                    {a}))
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  b.widen(wide, d, c.to);
  return {};
}

Status convert_from_integer(Builder& b, const Instruction& i, const Conversion& c) {
  const int32_t d = b.destination(i.operands[0], c.to), a = b.source(i.operands[1], c.from);
  if (b.failed()) return b.fail(i);
  const std::string from = integer_name(c.from);
  if (is_narrow(c.to)) {
    const int32_t wide = b.new_register(8), single = b.new_register(4);
    const std::string big = is_signed(c.from) ? "s64" : "u64";
    if (width_of(c.from) == 8)
      b.copy(wide, a);
    else
      b.emit_lanes("cvt." + big + "." + from, wide, {a});
    b.emit_lanes("odd.f32." + big, single, {wide});
    encode(b, format_of(c.to), c.fit, d, single);
    return {};
  }
  const int32_t result = c.sat ? b.new_register(b.width(d)) : d;
  const Action action = lane_function(std::string("cvt.") + ptx::name_of(c.to) + "." + from);
  if (action.shape == Shape::none)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  if (c.fit.rounding == Rounding::rn)
    b.emit(action, result, {a});
  else
    emit_rounded(b, c.fit.rounding, action, result, {a});
  if (c.sat && c.to == Type::f32) b.emit(units::rows().saturate, d, {result});
  if (c.sat && c.to == Type::f64) b.emit_lanes("saturate.f64", d, {result});
  return {};
}

}  // namespace

Status decode_cvt(Builder& b, const Instruction& i) {
  Modifiers words(i);
  Conversion c;
  if (words.take("pack")) return convert_packed(b, i, words);
  c.rounding = words.take_of({"rni", "rzi", "rmi", "rpi", "rna", "rn", "rz", "rm", "rp", "rs"});
  c.fit.rounding = c.rounding == "rz"    ? Rounding::rz
                   : c.rounding == "rm"  ? Rounding::rm
                   : c.rounding == "rp"  ? Rounding::rp
                   : c.rounding == "rna" ? Rounding::rna
                                         : Rounding::rn;
  c.ftz = words.take("ftz");
  c.sat = words.take("sat");
  c.fit.ftz = c.ftz;
  c.fit.saturate_finite = words.take("satfinite");
  c.fit.relu = words.take("relu");
  c.to = words.take_type();
  c.from = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  if (c.from == Type::none) return b.refuse(i, "must have types that the virtual GPU executes: use other types");
  if (c.rounding == "rs") return convert_stochastic(b, i, c);
  if (is_pair(c.to)) return convert_pair(b, i, c);
  if (is_real(c.to) && is_real(c.from)) return convert_real(b, i, c);
  if (is_real(c.from)) return convert_to_integer(b, i, c);
  if (is_real(c.to)) return convert_from_integer(b, i, c);
  int32_t wide = -1;
  const int32_t d = b.narrow_destination(i.operands[0], c.to, &wide), a = b.source(i.operands[1], c.from);
  if (b.failed()) return b.fail(i);
  b.emit_lanes(std::string("cvt.") + (c.sat ? "sat." : "") + integer_name(c.to) + "." + integer_name(c.from), d, {a});
  b.widen(wide, d, c.to);
  return {};
}

}  // namespace tandem::vgpu::machine
