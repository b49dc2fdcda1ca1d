// Integer arithmetic, logic, shifts, comparison and selection.
#include "vgpu/src/machine/decode/builder.h"
#include "vgpu/src/machine/instructions/float.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Type;

bool is_float(Type type) { return type != Type::none && type != Type::pred && !is_integer(type); }

// d = name(sources). All operands of the instruction have the type, except the sources in other_types (by index).
Status simple(Builder& b, const Instruction& i, const std::string& name, Type d_type,
              std::initializer_list<Type> types) {
  if (i.operands.size() != types.size() + 1)
    return b.refuse(i, "must have the operands that PTX defines: correct the operands");
  const int32_t d = b.destination(i.operands[0], d_type);
  int32_t s[4] = {-1, -1, -1, -1};
  size_t n = 0;
  for (const Type type : types) {
    s[n] = b.source(i.operands[n + 1], type);
    ++n;
  }
  if (b.failed()) return b.fail(i);
  bool found = false;
  switch (n) {
    case 1: found = b.emit_lanes(name, d, {s[0]}); break;
    case 2: found = b.emit_lanes(name, d, {s[0], s[1]}); break;
    case 3: found = b.emit_lanes(name, d, {s[0], s[1], s[2]}); break;
    default: found = b.emit_lanes(name, d, {s[0], s[1], s[2], s[3]}); break;
  }
  return found ? Status() : b.refuse(i, "the form (" + name + ") must be supported: use another form");
}

// add, sub, mul, mad, min, max, ... of integers. float.cpp has their floating-point forms.
Status arithmetic(Builder& b, const Instruction& i) {
  Modifiers words(i);
  Modifiers look(i);
  const Type type = look.take_type();
  if (is_float(type)) return decode_real(b, i);
  std::string name = i.opcode;
  std::string text;
  // u16x2 and s16x2 are no types of registers.
  for (const char* packed : {"u16x2", "s16x2"})
    if (words.take(packed)) text = packed;
  if (text.empty()) words.take_type();
  const std::string part = words.take_of({"lo", "hi", "wide"});
  if (!part.empty()) name += "." + part;
  if (words.take("sat")) name += ".sat";
  if (words.take("relu")) name += ".relu";
  if (!words.left().empty()) return b.unknown(i, words);
  if (!text.empty()) {
    return simple(b, i, name + "." + text, Type::b32, {Type::b32, Type::b32});
  }
  if (type == Type::none) return b.refuse(i, "must name its type: add the type");
  name += "." + integer_name(type);
  Type d_type = type;
  if (part == "wide") d_type = ptx::bits_of(type) == 16 ? Type::b32 : Type::b64;
  const size_t sources = i.operands.size() - 1;
  if (sources == 1) return simple(b, i, name, d_type, {type});
  if (sources == 2) return simple(b, i, name, d_type, {type, type});
  if ((i.opcode == "min" || i.opcode == "max") && sources == 3) {  // three inputs
    const int32_t d = b.destination(i.operands[0], type), x = b.source(i.operands[1], type);
    const int32_t y = b.source(i.operands[2], type), z = b.source(i.operands[3], type),
                  t = b.new_register(width_of(type));
    if (b.failed()) return b.fail(i);
    b.emit_lanes(i.opcode + "." + integer_name(type), t, {x, y});
    b.emit_lanes(name, d, {t, z});
    return {};
  }
  return simple(b, i, name, d_type, {type, type, part == "wide" ? d_type : type});
}

// add.cc, addc, sub.cc, subc, mad.cc, madc: the carry is a separate register.
Status carrying(Builder& b, const Instruction& i) {
  Modifiers words(i);
  const bool sets = words.take("cc"), takes = i.opcode.ends_with('c');
  const bool mad = i.opcode.starts_with("mad");
  const std::string part = mad ? words.take_of({"lo", "hi"}) : "";
  const Type type = words.take_type();
  if (!words.left().empty()) return b.unknown(i, words);
  if (type == Type::none || (mad && part.empty())) return b.refuse(i, "must name its type: add the type");
  const std::string unsigned_type = str_cat("u", ptx::bits_of(type));
  const int32_t d = b.destination(i.operands[0], type);
  int32_t x = b.source(i.operands[1], type), y = b.source(i.operands[2], type);
  if (mad) {
    const int32_t z = b.source(i.operands[3], type);
    if (b.failed()) return b.fail(i);
    const int32_t product = b.new_register(width_of(type));
    b.emit_lanes("mul." + part + "." + integer_name(type), product, {x, y});
    x = product;
    y = z;
  }
  if (b.failed()) return b.fail(i);
  const int32_t carry = takes ? b.carry() : b.constant(4, 0);
  const std::string name = std::string("carry.") + (i.opcode.starts_with("sub") ? "sub." : "add.");
  const int32_t out = b.new_register(4);
  if (sets) b.emit_lanes(name + "out." + unsigned_type, out, {x, y, carry});
  b.emit_lanes(name + unsigned_type, d, {x, y, carry});
  if (sets) b.copy(b.carry(), out);
  return {};
}

Status add_sub_mad(Builder& b, const Instruction& i) { return i.has("cc") ? carrying(b, i) : arithmetic(b, i); }

Status logic(Builder& b, const Instruction& i) {
  Modifiers words(i);
  const Type type = words.take_type();
  if (type == Type::none || !words.left().empty())
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  const std::string name = i.opcode + (type == Type::pred ? ".pred" : ".b" + std::to_string(ptx::bits_of(type)));
  if (i.operands.size() == 2) return simple(b, i, name, type, {type});
  return simple(b, i, name, type, {type, type});
}

Status shift(Builder& b, const Instruction& i) {
  Modifiers words(i);
  const Type type = words.take_type();
  if (type == Type::none || !words.left().empty())
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  return simple(b, i, i.opcode + "." + integer_name(type), type, {type, Type::b32});
}

// Forms whose name is the instruction's text. Operands have 32 bits, or the type's width.
Status by_text(Builder& b, const Instruction& i) {
  Modifiers words(i);
  std::string name = i.opcode;
  const auto with = [&](const std::string& word) {
    if (!word.empty()) name += "." + word;
  };
  const auto rest = [&]() -> Status { return b.unknown(i, words); };
  if (i.opcode == "shf") {
    with(words.take_of({"l", "r"}));
    with(words.take_of({"wrap", "clamp"}));
    words.take("b32");
    TANDEM_TRY(rest());
    return simple(b, i, name, Type::b32, {Type::b32, Type::b32, Type::b32});
  }
  if (i.opcode == "prmt") {
    words.take("b32");
    name += ".b32";
    with(words.take_of({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"}));
    TANDEM_TRY(rest());
    return simple(b, i, name, Type::b32, {Type::b32, Type::b32, Type::b32});
  }
  if (i.opcode == "bmsk" || i.opcode == "szext") {
    with(words.take_of({"wrap", "clamp"}));
    const Type type = words.take_type();
    if (i.opcode == "szext") with(integer_name(type));
    TANDEM_TRY(rest());
    return simple(b, i, name, Type::b32, {Type::b32, Type::b32});
  }
  if (i.opcode == "dp4a" || i.opcode == "dp2a") {
    if (i.opcode == "dp2a") with(words.take_of({"lo", "hi"}));
    with(words.take_first());
    with(words.take_first());
    TANDEM_TRY(rest());
    return simple(b, i, name, Type::b32, {Type::b32, Type::b32, Type::b32});
  }
  return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
}

Status bit_fields(Builder& b, const Instruction& i) {
  Modifiers words(i);
  std::string name = i.opcode;
  if (words.take("shiftamt")) name += ".shiftamt";
  const Type type = words.take_type();
  if (type == Type::none || !words.left().empty())
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  if (i.opcode == "bfind") return simple(b, i, name + "." + integer_name(type), Type::b32, {type});
  if (i.opcode == "bfe") return simple(b, i, name + "." + integer_name(type), type, {type, Type::b32, Type::b32});
  name += ".b" + std::to_string(ptx::bits_of(type));
  if (i.opcode == "popc" || i.opcode == "clz") return simple(b, i, name, Type::b32, {type});
  if (i.opcode == "brev") return simple(b, i, name, type, {type});
  if (i.opcode == "bfi") return simple(b, i, name, type, {type, type, Type::b32, Type::b32});
  return simple(b, i, name, type, {type, type, type});  // fns
}

Status lop3(Builder& b, const Instruction& i) {
  Modifiers words(i);
  words.take("b32");
  const std::string combine = words.take_of({"or", "and"});
  TANDEM_TRY(b.unknown(i, words));
  if (combine.empty()) return simple(b, i, "lop3.b32", Type::b32, {Type::b32, Type::b32, Type::b32, Type::b32});
  // lop3.or.b32 d|p, a, b, c, table, q: p = (d != 0) or q.
  if (i.operands.size() != 6 || i.operands[0].kind != ptx::Operand::Kind::pair)
    return b.refuse(i, "must have the operands that PTX defines: correct the operands");
  const int32_t d = b.destination(i.operands[0].parts[0], Type::b32),
                p = b.destination(i.operands[0].parts[1], Type::pred);
  int32_t s[4];
  for (size_t n = 0; n < 4; ++n) s[n] = b.source(i.operands[n + 1], Type::b32);
  const int32_t q = b.source(i.operands[5], Type::pred), some = b.new_register(0);
  if (b.failed()) return b.fail(i);
  b.emit_lanes("lop3.b32", d, {s[0], s[1], s[2], s[3]});
  b.emit_lanes("setp.ne.u32", some, {d, b.constant(4, 0)});
  b.emit_lanes(combine + ".pred", p, {some, q});
  return {};
}

// Compares for setp and set, into a predicate. Values of f16 and bf16 are compared as float32.
struct Comparison {
  std::string op;
  Type type = Type::none;
  bool ftz = false;
};

int32_t compare(Builder& b, const Comparison& c, int32_t x, int32_t y) {
  const int32_t p = b.new_register(0);
  std::string op = c.op;
  bool found = false;
  if (c.type == Type::f16 || c.type == Type::bf16) {
    found =
        b.emit_lanes("setp." + op + (c.ftz ? ".ftz" : "") + ".f32", p, {to_f32(b, x, c.type), to_f32(b, y, c.type)});
  } else if (is_float(c.type)) {
    found = b.emit_lanes("setp." + op + (c.ftz ? ".ftz" : "") + "." + ptx::name_of(c.type), p, {x, y});
  } else {
    std::string type = integer_name(c.type);
    for (const auto& [same, as] : {std::pair{"lo", "lt"}, {"ls", "le"}, {"hi", "gt"}, {"hs", "ge"}}) {
      if (op != same) continue;
      op = as;
      type = str_cat("u", ptx::bits_of(c.type));
    }
    found = b.emit_lanes("setp." + op + "." + type, p, {x, y});
  }
  return found ? p : -1;
}

Comparison comparison_of(Modifiers& words) {
  Comparison c;
  c.op = words.take_of({"eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu", "gtu",
                        "geu", "num", "nan"});
  c.ftz = words.take("ftz");
  return c;
}

// Computes p = comparison combined with q.
int32_t combine(Builder& b, const std::string& with, int32_t p, int32_t q) {
  if (with.empty()) return p;
  const int32_t d = b.new_register(0);
  b.emit_lanes(with + ".pred", d, {p, q});
  return d;
}

Status setp_packed(Builder& b, const Instruction& i, Comparison c, const std::string& with) {
  c.type = c.type == Type::f16x2 ? Type::f16 : Type::bf16;
  if (i.operands[0].kind != ptx::Operand::Kind::pair) return b.refuse(i, "must have two predicates: write p|q");
  const int32_t x = b.source(i.operands[1], Type::b32), y = b.source(i.operands[2], Type::b32);
  const int32_t q = with.empty() ? -1 : b.source(i.operands[3], Type::pred);
  if (b.failed()) return b.fail(i);
  int32_t results[2];
  for (int half = 0; half < 2; ++half) {
    const int32_t u = b.new_register(4), v = b.new_register(4);
    b.emit_lanes("part.16.32." + std::to_string(half), u, {x});
    b.emit_lanes("part.16.32." + std::to_string(half), v, {y});
    const int32_t p = compare(b, c, u, v);
    if (p < 0) return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
    results[half] = combine(b, with, p, q);
  }
  for (size_t half = 0; half < 2; ++half) {
    const int32_t d = b.destination(i.operands[0].parts[half], Type::pred);
    if (b.failed()) return b.fail(i);
    b.copy(d, results[half]);
  }
  return {};
}

Status setp(Builder& b, const Instruction& i) {
  Modifiers words(i);
  Comparison c = comparison_of(words);
  const std::string with = words.take_of({"and", "or", "xor"});
  c.type = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  if (c.type == Type::none || c.op.empty())
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  if (i.operands.size() != (with.empty() ? 3u : 4u))
    return b.refuse(i, "must have the operands that PTX defines: correct the operands");
  if (c.type == Type::f16x2 || c.type == Type::bf16x2) return setp_packed(b, i, c, with);
  const bool two = i.operands[0].kind == ptx::Operand::Kind::pair;
  const int32_t x = b.source(i.operands[1], c.type), y = b.source(i.operands[2], c.type);
  const int32_t q = with.empty() ? -1 : b.source(i.operands[3], Type::pred);
  const int32_t d = b.destination(two ? i.operands[0].parts[0] : i.operands[0], Type::pred);
  const int32_t d2 = two ? b.destination(i.operands[0].parts[1], Type::pred) : -1;
  if (b.failed()) return b.fail(i);
  const int32_t p = compare(b, c, x, y);
  if (p < 0) return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  int32_t inverse = -1;
  if (two) {
    inverse = b.new_register(0);
    b.emit_lanes("not.pred", inverse, {p});
    inverse = combine(b, with, inverse, q);
  }
  if (!two && with.empty()) {
    b.code().ops.back().d = d;  // the usual case: no copy
    return {};
  }
  b.copy(d, combine(b, with, p, q));
  if (two) b.copy(d2, inverse);
  return {};
}

// set.cmp.dtype.stype: all ones or 1.0 where the comparison is true, else 0.
Status set(Builder& b, const Instruction& i) {
  Modifiers words(i);
  Comparison c = comparison_of(words);
  const std::string with = words.take_of({"and", "or", "xor"});
  const Type d_type = words.take_type();
  c.type = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  if (c.type == Type::none || c.op.empty() || width_of(d_type) != 4 || width_of(c.type) == 16)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  const bool packed = c.type == Type::f16x2 || c.type == Type::bf16x2;
  if (packed) return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  const int32_t d = b.destination(i.operands[0], d_type);
  const int32_t x = b.source(i.operands[1], c.type), y = b.source(i.operands[2], c.type);
  const int32_t q = with.empty() ? -1 : b.source(i.operands[3], Type::pred);
  if (b.failed()) return b.fail(i);
  const int32_t p = compare(b, c, x, y);
  if (p < 0) return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  uint64_t truth = ptx::bits_of(d_type) == 16 ? 0xffff : 0xffffffff;
  if (d_type == Type::f32) truth = 0x3f800000;
  if (d_type == Type::f16) truth = 0x3c00;
  if (d_type == Type::bf16) truth = 0x3f80;
  b.emit_lanes("select.4", d, {b.constant(4, truth), b.constant(4, 0), combine(b, with, p, q)});
  return {};
}

Status selp(Builder& b, const Instruction& i) {
  Modifiers words(i);
  const Type type = words.take_type();
  if (type == Type::none || width_of(type) > 8 || !words.left().empty())
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  return simple(b, i, "select." + std::to_string(width_of(type)), type, {type, type, Type::pred});
}

Status slct(Builder& b, const Instruction& i) {
  Modifiers words(i);
  const bool ftz = words.take("ftz");
  const Type type = words.take_type(), chooser = words.take_type();
  if (chooser == Type::none || width_of(type) > 8 || !words.left().empty())
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  if (ftz && chooser != Type::f32) return b.refuse(i, ".ftz must be used with .f32 only: remove .ftz");
  // -0 and flushed negative subnormals count as not negative, because the comparison is with 0.
  if (!ftz)
    return simple(b, i, "slct." + std::to_string(width_of(type)) + "." + ptx::name_of(chooser), type,
                  {type, type, chooser});
  const int32_t d = b.destination(i.operands[0], type), x = b.source(i.operands[1], type);
  const int32_t y = b.source(i.operands[2], type), z = b.source(i.operands[3], chooser), flushed = b.new_register(4);
  if (b.failed()) return b.fail(i);
  b.emit_lanes("flush.f32", flushed, {z});
  b.emit_lanes("slct." + std::to_string(width_of(type)) + ".f32", d, {x, y, flushed});
  return {};
}

constexpr Family kFamilies[] = {
    {"add", add_sub_mad}, {"sub", add_sub_mad}, {"mad", add_sub_mad},  {"addc", carrying},    {"subc", carrying},
    {"madc", carrying},   {"mul", arithmetic},  {"mul24", arithmetic}, {"mad24", arithmetic}, {"sad", arithmetic},
    {"div", arithmetic},  {"rem", arithmetic},  {"min", arithmetic},   {"max", arithmetic},   {"neg", arithmetic},
    {"abs", arithmetic},  {"and", logic},       {"or", logic},         {"xor", logic},        {"not", logic},
    {"cnot", logic},      {"shl", shift},       {"shr", shift},        {"shf", by_text},      {"prmt", by_text},
    {"bmsk", by_text},    {"szext", by_text},   {"dp4a", by_text},     {"dp2a", by_text},     {"popc", bit_fields},
    {"clz", bit_fields},  {"brev", bit_fields}, {"bfind", bit_fields}, {"bfe", bit_fields},   {"bfi", bit_fields},
    {"fns", bit_fields},  {"lop3", lop3},       {"setp", setp},        {"set", set},          {"selp", selp},
    {"slct", slct},
};

}  // namespace

std::span<const Family> arithmetic_families() { return kFamilies; }

}  // namespace tandem::vgpu::machine
