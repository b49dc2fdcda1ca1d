// Floating-point arithmetic: maps forms of instructions to the functions of units/numbers.h.
#include "vgpu/src/machine/instructions/float.h"

#include <cfenv>

#include "vgpu/src/machine/lanes/lanes.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Type;
using units::Fit;
using units::Format;
using units::Rounding;

struct FormatDetail : Detail {
  Format format = Format::f16;
  Fit fit;
};
struct HalfDetail : Detail {
  units::Rows::Half half;
  bool propagate_nan = false;
};
struct InnerDetail : Detail {  // another function, called in a special way
  Action action;
  int rounding = FE_TONEAREST;
};

template <class T>
const T* row(const std::byte* registers, int32_t at) {
  return reinterpret_cast<const T*>(registers + at);
}

void call(const Action& action, const Op& op, const std::byte* r, void* d, int32_t skip) {
  const std::byte* const base = r + skip;
  std::byte* const to = static_cast<std::byte*>(d) + skip;
  switch (action.shape) {
    case Shape::f1: return action.f1(row<float>(base, op.a), reinterpret_cast<float*>(to));
    case Shape::f2: return action.f2(row<float>(base, op.a), row<float>(base, op.b), reinterpret_cast<float*>(to));
    case Shape::f3:
      return action.f3(row<float>(base, op.a), row<float>(base, op.b), row<float>(base, op.c),
                       reinterpret_cast<float*>(to));
    case Shape::r1: return action.r1(base + op.a, to);
    case Shape::r2: return action.r2(base + op.a, base + op.b, to);
    case Shape::r3: return action.r3(base + op.a, base + op.b, base + op.c, to);
    default: return;
  }
}

// f32x2: 64 lanes of float32. Low and high halves alternate, which elementwise arithmetic allows.
void both_halves(const Op& op, const std::byte* r, void* d) {
  const Action& action = op.as<InnerDetail>().action;
  call(action, op, r, d, 0);
  call(action, op, r, d, 4 * kLanes);
}
void rounded(const Op& op, const std::byte* r, void* d) {
  const auto& inner = op.as<InnerDetail>();
  std::fesetround(inner.rounding);
  call(inner.action, op, r, d, 0);
  std::fesetround(FE_TONEAREST);
}
void decode_row(const Op& op, const std::byte* r, void* d) {
  units::rows().decode(op.as<FormatDetail>().format, row<uint32_t>(r, op.a), static_cast<float*>(d));
}
void encode_row(const Op& op, const std::byte* r, void* d) {
  const auto& f = op.as<FormatDetail>();
  units::rows().encode(f.format, f.fit, row<float>(r, op.a), static_cast<uint32_t*>(d));
}

using PairFunction = void (*)(units::Rows::Half, const uint32_t*, const uint32_t*, uint32_t*);
template <PairFunction units::Rows::*Member>
void pair(const Op& op, const std::byte* r, void* d) {
  (units::rows().*Member)(op.as<HalfDetail>().half, row<uint32_t>(r, op.a), row<uint32_t>(r, op.b),
                          static_cast<uint32_t*>(d));
}
using ExtremeFunction = void (*)(units::Rows::Half, bool, const uint32_t*, const uint32_t*, uint32_t*);
template <ExtremeFunction units::Rows::*Member>
void extreme_pair(const Op& op, const std::byte* r, void* d) {
  const auto& h = op.as<HalfDetail>();
  (units::rows().*Member)(h.half, h.propagate_nan, row<uint32_t>(r, op.a), row<uint32_t>(r, op.b),
                          static_cast<uint32_t*>(d));
}
using OnePairFunction = void (*)(units::Rows::Half, const uint32_t*, uint32_t*);
template <OnePairFunction units::Rows::*Member>
void one_pair(const Op& op, const std::byte* r, void* d) {
  (units::rows().*Member)(op.as<HalfDetail>().half, row<uint32_t>(r, op.a), static_cast<uint32_t*>(d));
}
void fma_pair(const Op& op, const std::byte* r, void* d) {
  units::rows().fma_pair(op.as<HalfDetail>().half, row<uint32_t>(r, op.a), row<uint32_t>(r, op.b),
                         row<uint32_t>(r, op.c), static_cast<uint32_t*>(d));
}

template <class D>
D* with_detail(Builder& b, Action action, int32_t d, std::initializer_list<int32_t> sources) {
  auto detail = std::make_unique<D>();
  D* const made = detail.get();
  b.emit(action, d, sources).detail = made;
  b.code().details.push_back(std::move(detail));
  return made;
}

bool is_half(Type t) { return t == Type::f16 || t == Type::bf16 || t == Type::f16x2 || t == Type::bf16x2; }
Format format_of(Type t) { return t == Type::f16 || t == Type::f16x2 ? Format::f16 : Format::bf16; }

// The qualifiers that floating-point arithmetic can have.
struct Form {
  std::string opcode;
  Type type = Type::none, source_type = Type::none;  // source_type: of mixed precision
  Rounding rounding = Rounding::rn;
  bool ftz = false, sat = false, relu = false, nan = false, xorsign = false, abs = false;
  bool approx = false, full = false;
};

Action f32_action(const Form& f) {
  const units::Rows& r = units::rows();
  const auto n = static_cast<size_t>(f.rounding);
  if (f.opcode == "add" || f.opcode == "sub") return r.add[n][f.ftz];
  if (f.opcode == "mul") return r.mul[n][f.ftz];
  if (f.opcode == "fma" || f.opcode == "mad") return r.fma[n][f.ftz];
  if (f.opcode == "div") return f.approx ? r.div_approx[f.ftz] : f.full ? r.div_full[f.ftz] : r.div[n][f.ftz];
  if (f.opcode == "rcp") return f.approx ? r.rcp_approx[f.ftz] : r.rcp[n][f.ftz];
  if (f.opcode == "sqrt") return f.approx ? r.sqrt_approx[f.ftz] : r.sqrt[n][f.ftz];
  if (f.opcode == "rsqrt") return r.rsqrt_approx[f.ftz];
  if (f.opcode == "ex2") return r.ex2_approx[f.ftz];
  if (f.opcode == "lg2") return r.lg2_approx[f.ftz];
  if (f.opcode == "sin") return r.sin_approx[f.ftz];
  if (f.opcode == "cos") return r.cos_approx[f.ftz];
  if (f.opcode == "tanh") return r.tanh_approx;
  if (f.opcode == "min") return r.min[f.nan][f.ftz];
  if (f.opcode == "max") return r.max[f.nan][f.ftz];
  if (f.opcode == "neg" || f.opcode == "abs" || f.opcode == "copysign") return lane_function(f.opcode + ".f32");
  return {};
}

void emit_two(Builder& b, const Action& action, int32_t d, const std::vector<int32_t>& s) {
  switch (s.size()) {
    case 1: b.emit(action, d, {s[0]}); break;
    case 2: b.emit(action, d, {s[0], s[1]}); break;
    default: b.emit(action, d, {s[0], s[1], s[2]}); break;
  }
}

// min and max, including forms with absolute values, with the exclusive or of the signs, and with three operands.
Status extreme_f32(Builder& b, const Form& f, int32_t d, std::vector<int32_t> s) {
  const Action action = f32_action(f);
  if (s.size() == 3) {
    const int32_t t = b.new_register(4);
    b.emit(action, t, {s[0], s[1]});
    b.emit(action, d, {t, s[2]});
    return {};
  }
  if (!f.xorsign && !f.abs) {
    b.emit(action, d, {s[0], s[1]});
    return {};
  }
  const int32_t sign = b.new_register(4), x = b.new_register(4), y = b.new_register(4), t = b.new_register(4);
  if (f.xorsign) b.emit_lanes("xorsign.32", sign, {s[0], s[1]});
  b.emit_lanes("magnitude.32", x, {s[0]});
  b.emit_lanes("magnitude.32", y, {s[1]});
  b.emit(action, t, {x, y});
  if (!f.xorsign) {
    b.copy(d, t);
    return {};
  }
  b.emit_lanes("or.b32", t, {t, sign});
  b.emit_lanes("plain_nan.32", d, {t});
  return {};
}

Status real_f32(Builder& b, const Instruction& i, const Form& f, int32_t d, std::vector<int32_t> s) {
  const Action action = f32_action(f);
  if (action.shape == Shape::none)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  if (f.opcode == "min" || f.opcode == "max") return extreme_f32(b, f, d, std::move(s));
  if (f.opcode == "sub") {
    const int32_t negative = b.new_register(4);
    b.emit_lanes("sign.32", negative, {s[1]});
    s[1] = negative;
  }
  if ((f.opcode == "neg" || f.opcode == "abs") && f.ftz) {
    const int32_t flushed = b.new_register(4);
    b.emit_lanes("flush.f32", flushed, {s[0]});
    s[0] = flushed;
  }
  if (!f.sat) {
    emit_two(b, action, d, s);
    return {};
  }
  const int32_t exact = b.new_register(4);
  emit_two(b, action, exact, s);
  b.emit(units::rows().saturate, d, {exact});
  return {};
}

Status real_f32x2(Builder& b, const Instruction& i, const Form& f, int32_t d, std::vector<int32_t> s) {
  if (f.sat || f.nan || f.xorsign || (f.opcode != "add" && f.opcode != "sub" && f.opcode != "mul" && f.opcode != "fma"))
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  if (f.opcode == "sub") {
    const int32_t negative = b.new_register(8);
    with_detail<InnerDetail>(b, both_halves, negative, {s[1]})->action = lane_function("sign.32");
    s[1] = negative;
  }
  const Action action = f32_action(f);
  InnerDetail* const detail = s.size() == 3 ? with_detail<InnerDetail>(b, both_halves, d, {s[0], s[1], s[2]})
                                            : with_detail<InnerDetail>(b, both_halves, d, {s[0], s[1]});
  detail->action = action;
  return {};
}

Status real_f64(Builder& b, const Instruction& i, const Form& f, int32_t d, const std::vector<int32_t>& s) {
  const Action action = lane_function((f.opcode == "mad" ? "fma" : f.opcode) + ".f64");
  if (action.shape == Shape::none || f.sat)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  if (f.rounding == Rounding::rn)
    emit_two(b, action, d, s);
  else if (s.size() == 3)
    emit_rounded(b, f.rounding, action, d, {s[0], s[1], s[2]});
  else if (s.size() == 2)
    emit_rounded(b, f.rounding, action, d, {s[0], s[1]});
  else
    emit_rounded(b, f.rounding, action, d, {s[0]});
  return {};
}

Status extreme_half(Builder& b, const Form& f, int32_t d, const std::vector<int32_t>& s) {
  using R = units::Rows;
  const Action action =
      f.opcode == "min" ? Action(RowsOf(extreme_pair<&R::min_pair>)) : Action(RowsOf(extreme_pair<&R::max_pair>));
  const auto put = [&](int32_t to, int32_t x, int32_t y) {
    HalfDetail* const detail = with_detail<HalfDetail>(b, action, to, {x, y});
    detail->half = {format_of(f.type), f.ftz, false, false};
    detail->propagate_nan = f.nan;
  };
  int32_t x = s[0], y = s[1];
  const bool signs = f.xorsign;
  const int32_t sign = signs ? b.new_register(4) : -1;
  if (signs) b.emit_lanes("xorsign.16", sign, {x, y});
  if (f.abs) {
    const int32_t p = b.new_register(4), q = b.new_register(4);
    b.emit_lanes("abs.16x2", p, {x});
    b.emit_lanes("abs.16x2", q, {y});
    x = p;
    y = q;
  }
  if (s.size() == 3) {
    const int32_t t = b.new_register(4);
    put(t, x, y);
    put(d, t, s[2]);
  } else if (signs) {
    const int32_t t = b.new_register(4);
    put(t, x, y);
    b.emit_lanes("or.b32", t, {t, sign});
    b.emit_lanes("plain_nan.16", d, {t});
  } else {
    put(d, x, y);
  }
  return {};
}

Status real_half(Builder& b, const Instruction& i, const Form& f, int32_t d, const std::vector<int32_t>& s) {
  using R = units::Rows;
  const bool packed = f.type == Type::f16x2 || f.type == Type::bf16x2;
  if (f.rounding != Rounding::rn) return b.refuse(i, "must round to nearest: use .rn");
  if (f.opcode == "min" || f.opcode == "max") return extreme_half(b, f, d, s);
  if (f.opcode == "neg" || f.opcode == "abs") {
    int32_t a = s[0];
    if (f.ftz) {  // multiplied by one
      const uint64_t one = f.type == Type::f16 ? 0x3c00 : 0x3c003c00;
      const int32_t flushed = b.new_register(4);
      with_detail<HalfDetail>(b, RowsOf(pair<&R::mul_pair>), flushed, {a, b.constant(4, one)})->half = {
          Format::f16, true, false, false};
      a = flushed;
    }
    b.emit_lanes(f.opcode + (packed ? ".16x2" : ".16"), d, {a});
    return {};
  }
  HalfDetail* detail = nullptr;
  if (f.opcode == "add") detail = with_detail<HalfDetail>(b, RowsOf(pair<&R::add_pair>), d, {s[0], s[1]});
  if (f.opcode == "sub") detail = with_detail<HalfDetail>(b, RowsOf(pair<&R::sub_pair>), d, {s[0], s[1]});
  if (f.opcode == "mul") detail = with_detail<HalfDetail>(b, RowsOf(pair<&R::mul_pair>), d, {s[0], s[1]});
  if (f.opcode == "fma") detail = with_detail<HalfDetail>(b, RowsOf(fma_pair), d, {s[0], s[1], s[2]});
  if (f.opcode == "ex2") detail = with_detail<HalfDetail>(b, RowsOf(one_pair<&R::ex2_pair>), d, {s[0]});
  if (f.opcode == "tanh") detail = with_detail<HalfDetail>(b, RowsOf(one_pair<&R::tanh_pair>), d, {s[0]});
  if (detail == nullptr) return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  detail->half = {format_of(f.type), f.ftz, f.sat, f.relu};
  if (!packed) b.emit_lanes("cvt.u32.u16", d, {d});  // the upper half stays zero
  return {};
}

size_t sources_of(const std::string& opcode) {
  if (opcode == "fma" || opcode == "mad") return 3;
  for (const char* two : {"add", "sub", "mul", "div", "min", "max", "copysign"})
    if (opcode == two) return 2;
  return 1;
}

}  // namespace

Rounding take_rounding(Modifiers& words) {
  const std::string word = words.take_of({"rn", "rz", "rm", "rp"});
  return word == "rz" ? Rounding::rz : word == "rm" ? Rounding::rm : word == "rp" ? Rounding::rp : Rounding::rn;
}

int32_t to_f32(Builder& b, int32_t reg, Type type) {
  if (type == Type::f32) return reg;
  const int32_t d = b.new_register(4);
  with_detail<FormatDetail>(b, RowsOf(decode_row), d, {reg})->format = format_of(type);
  return d;
}

void encode(Builder& b, Format format, Fit fit, int32_t d, int32_t a) {
  FormatDetail* const detail = with_detail<FormatDetail>(b, RowsOf(encode_row), d, {a});
  detail->format = format;
  detail->fit = fit;
}

void emit_rounded(Builder& b, Rounding rounding, Action action, int32_t d, std::initializer_list<int32_t> sources) {
  InnerDetail* const detail = with_detail<InnerDetail>(b, RowsOf(rounded), d, sources);
  detail->action = action;
  detail->rounding = rounding == Rounding::rz   ? FE_TOWARDZERO
                     : rounding == Rounding::rm ? FE_DOWNWARD
                     : rounding == Rounding::rp ? FE_UPWARD
                                                : FE_TONEAREST;
}

Status decode_real(Builder& b, const Instruction& i) {
  Modifiers words(i);
  Form f;
  f.opcode = i.opcode;
  f.rounding = take_rounding(words);
  f.ftz = words.take("ftz");
  f.sat = words.take("sat");
  f.relu = words.take("relu");
  f.nan = words.take("NaN");
  f.xorsign = words.take("xorsign");
  f.abs = words.take("abs");
  f.approx = words.take("approx");
  f.full = words.take("full");
  f.type = words.take_type();
  f.source_type = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  const size_t n = sources_of(f.opcode), given = i.operands.size() - 1;
  if (given != n && !(given == 3 && (f.opcode == "min" || f.opcode == "max")))
    return b.refuse(i, "must have the operands that PTX defines: correct the operands");
  const int32_t d = b.destination(i.operands[0], f.type);
  std::vector<int32_t> s;
  for (size_t k = 1; k < i.operands.size(); ++k) {
    // add.f32.bf16 d, a, c: only a is narrow. fma: a and b are narrow.
    const bool narrow = f.source_type != Type::none && k < given;
    s.push_back(b.source(i.operands[k], narrow ? f.source_type : f.type));
    if (narrow && !b.failed()) s.back() = to_f32(b, s.back(), f.source_type);
  }
  if (b.failed()) return b.fail(i);
  if (f.source_type != Type::none && (f.type != Type::f32 || !is_half(f.source_type)))
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  switch (f.type) {
    case Type::f32: return real_f32(b, i, f, d, std::move(s));
    case Type::f32x2: return real_f32x2(b, i, f, d, std::move(s));
    case Type::f64: return real_f64(b, i, f, d, s);
    default:
      return is_half(f.type) ? real_half(b, i, f, d, s)
                             : b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  }
}

namespace {

Status testp(Builder& b, const Instruction& i) {
  Modifiers words(i);
  const std::string what = words.take_of({"finite", "infinite", "number", "notanumber", "normal", "subnormal"});
  const Type type = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  const int32_t d = b.destination(i.operands[0], Type::pred), a = b.source(i.operands[1], type);
  if (b.failed()) return b.fail(i);
  if (!b.emit_lanes("testp." + what + "." + ptx::name_of(type), d, {a}))
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  return {};
}

constexpr Family kFamilies[] = {
    {"fma", decode_real},  {"rcp", decode_real},      {"sqrt", decode_real}, {"rsqrt", decode_real},
    {"ex2", decode_real},  {"lg2", decode_real},      {"sin", decode_real},  {"cos", decode_real},
    {"tanh", decode_real}, {"copysign", decode_real}, {"testp", testp},
};

}  // namespace

std::span<const Family> real_families() { return kFamilies; }

}  // namespace tandem::vgpu::machine
