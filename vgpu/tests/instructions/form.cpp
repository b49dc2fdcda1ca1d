#include "vgpu/tests/instructions/form.h"

#include <cmath>
#include <set>

#include "base/text.h"
#include "support/random.h"

namespace tandem::test {
namespace {

// Returns adversarial values: ends of ranges, zeros of both signs, ties, infinities, NaN.
std::vector<uint64_t> hostile(Operand operand) {
  switch (operand) {
    case Operand::predicate: return {0, 1};
    case Operand::integer16:
      return {0, 1, 2, 5, 7, 15, 16, 17, 31, 0x7f, 0x80, 0xff, 0x100, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff};
    case Operand::integer32:
      return {0,          1,          2,          3,          7,          15,         16,
              31,         32,         33,         0x7f,       0x80,       0xff,       0x100,
              0x7fff,     0x8000,     0xffff,     0x10000,    0x12345678, 0x55555555, 0x7ffffffe,
              0x7fffffff, 0x80000000, 0x80000001, 0xaaaaaaaa, 0xfffffffe, 0xffffffff};
    case Operand::integer64:
      return {0,
              1,
              2,
              31,
              32,
              63,
              64,
              65,
              0xff,
              0x7fffffff,
              0x80000000,
              0xffffffff,
              0x100000000,
              0x123456789abcdef0,
              0x7fffffffffffffff,
              0x8000000000000000,
              0x8000000000000001,
              0xfffffffffffffffe,
              0xffffffffffffffff};
    case Operand::half:
      return {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x007f, 0x0080, 0x3bff,
              0x3c00, 0x3c01, 0xbc00, 0x3f80, 0xbf80, 0x4248, 0x7bff, 0xfbff, 0x7c00,
              0xfc00, 0x7c01, 0x7e00, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc1, 0x7fff};
    case Operand::pair:
      return {0x00000000, 0x80003c00, 0x3c008000, 0x00010400, 0x3f80bf80, 0x7bfffbff, 0x7c00fc00, 0x7e013c01,
              0x7f7fff7f, 0x7f80ff80, 0x03ff83ff, 0x42483555, 0x7fff0001, 0x3c01bc01, 0x40490fdb, 0x00800080};
    case Operand::f32:
      return {0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x807fffff, 0x00800000,
              0x80800001, 0x33800000, 0x3effffff, 0x3f000000, 0xbf000000, 0x3f7fffff, 0x3f800000,
              0xbf800000, 0x3f800001, 0x3fc00000, 0xc0200000, 0x40490fdb, 0x42fe0000, 0x4b000001,
              0x4effffff, 0x4f000000, 0xcf000001, 0x4f800000, 0x5f000000, 0x7e800001, 0x7f7fffff,
              0xff7fffff, 0x7f800000, 0xff800000, 0x7f800001, 0x7fc00000, 0xffffffff};
    case Operand::f64:
      return {0x0000000000000000, 0x8000000000000000, 0x0000000000000001, 0x800fffffffffffff, 0x0010000000000000,
              0x3fdfffffffffffff, 0x3fe0000000000000, 0x3ff0000000000000, 0xbff0000000000001, 0x3ff8000000000000,
              0x40091eb851eb851f, 0x41dfffffffc00000, 0x41e0000000000000, 0x43e0000000000000, 0x36a0000000000000,
              0x47efffffe0000000, 0x47effffff0000000, 0x7fefffffffffffff, 0x7ff0000000000000, 0xfff0000000000000,
              0x7ff8000000000000, 0x7ff0000000000001};
    case Operand::none: break;
  }
  return {0};
}

uint64_t random_value(Random& random, Operand operand) {
  const uint64_t bits = random.next();
  switch (operand) {
    case Operand::predicate: return bits & 1;
    case Operand::integer16: return bits & 0xffff;
    case Operand::half: return bits & 0xffff;
    case Operand::integer32: return (bits & 0xffffffff) >> (random.chance(0.3) ? random.between(0, 31) : 0);
    case Operand::integer64: return bits >> (random.chance(0.3) ? random.between(0, 63) : 0);
    case Operand::f32: {  // half of them of ordinary size
      if (random.chance(0.5)) return bits & 0xffffffff;
      const double x = random.normal();
      return bits_of(static_cast<float>(x * std::exp2(random.between(-6, 6))));
    }
    case Operand::f64:  // the host's mathematics would decide the last bits
      return random.chance(0.5) ? bits : (bits & 0x800fffffffffffff) | (0x3ff + random.next() % 13 - 6) << 52;
    default: return bits & 0xffffffff;
  }
}

// FNV-1a: the operands are the same with every compiler.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

// All pairs of adversarial values of the first two operands, with adversarial and random third operands. Random values
// follow.
std::vector<Values> operands_of(const Form& form) {
  Random random(hash_of(form.text));
  std::vector<Values> list;
  const size_t count = form.from.size();
  const auto special = [&](size_t i) {
    const std::vector<uint64_t> values = hostile(form.from[i]);
    return values[random.next() % values.size()];
  };
  const auto add = [&](Values v) {
    if (!form.defined || form.defined(v)) list.push_back(v);
  };
  if (count == 0) return std::vector<Values>(64, Values{});
  if (!form.only.empty()) {
    for (size_t i = 0; i < 64; ++i) list.push_back(form.only[i % form.only.size()]);
    return list;
  }
  for (const uint64_t a : hostile(form.from[0]))
    for (const uint64_t b : count > 1 ? hostile(form.from[1]) : std::vector<uint64_t>{0}) {
      Values v{a, b};
      for (size_t i = 2; i < count; ++i) v[i] = special(i);
      add(v);
    }
  for (int n = 0; n < 600; ++n) {
    Values v{};
    for (size_t i = 0; i < count; ++i) v[i] = random.chance(0.2) ? special(i) : random_value(random, form.from[i]);
    add(v);
  }
  while (list.size() % 64 != 0) list.push_back(list.front());
  return list;
}

const char* register_type(Operand operand) {
  switch (operand) {
    case Operand::predicate: return "pred";
    case Operand::integer16:
    case Operand::half: return "b16";
    case Operand::integer64:
    case Operand::f64: return "b64";
    default: return "b32";
  }
}

// One thread per set of operands. Each value has 8 bytes of memory.
std::string body_of(const Form& form) {
  constexpr const char* sources[] = {"a", "b", "c", "g"};
  constexpr const char* results[] = {"d", "e"};
  std::string text =
      ".reg .b32 tid_, block_, size_, word_;\n.reg .b64 in_, out_, at_;\n"
      "ld.param.u64 in_, [p0];\nld.param.u64 out_, [p1];\n"
      "mov.u32 tid_, %tid.x;\nmov.u32 block_, %ctaid.x;\nmov.u32 size_, %ntid.x;\nmad.lo.s32 tid_, block_, size_, "
      "tid_;\n";
  text += str_cat("mul.wide.u32 at_, tid_, ", 8 * form.from.size(), ";\nadd.s64 in_, in_, at_;\n");
  text += str_cat("mul.wide.u32 at_, tid_, ", 8 * form.to.size(), ";\nadd.s64 out_, out_, at_;\n");
  for (size_t i = 0; i < form.from.size(); ++i) {
    const std::string type = register_type(form.from[i]);
    text += str_cat(".reg .", type, " ", sources[i], ";\n");
    if (type == "pred") {
      text += str_cat("ld.global.b32 word_, [in_+", 8 * i, "];\nsetp.ne.s32 ", sources[i], ", word_, 0;\n");
    } else {
      text += str_cat("ld.global.", type, " ", sources[i], ", [in_+", 8 * i, "];\n");
    }
  }
  for (size_t i = 0; i < form.to.size(); ++i)
    text += str_cat(".reg .", register_type(form.to[i]), " ", results[i], ";\n");
  text += form.text + "\nmov.b64 at_, 0;\n";
  for (size_t i = 0; i < form.to.size(); ++i) {
    const std::string type = register_type(form.to[i]);
    text += str_cat("st.global.b64 [out_+", 8 * i, "], at_;\n");
    if (type == "pred") {
      text += str_cat("selp.b32 word_, 1, 0, ", results[i], ";\nst.global.b32 [out_+", 8 * i, "], word_;\n");
    } else {
      text += str_cat("st.global.", type, " [out_+", 8 * i, "], ", results[i], ";\n");
    }
  }
  return text + "ret;";
}

std::string hex(uint64_t x) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

// Prints the first few differences, each with its operands.
void compare(const Form& form, const std::vector<Values>& operands, const Memory& out) {
  int wrong = 0;
  for (size_t i = 0; i < operands.size(); ++i) {
    const Results want = form.expected(operands[i]);
    for (size_t j = 0; j < form.to.size(); ++j) {
      const auto got = out.at<uint64_t>(i * form.to.size() + j);
      const bool good = form.accepts ? form.accepts(operands[i], got, want[j]) : got == want[j];
      if (good || ++wrong > 3) continue;
      std::string sources;
      for (size_t k = 0; k < form.from.size(); ++k) sources += str_cat(" ", hex(operands[i][k]));
      ADD_FAILURE() << form.text << " of" << sources << " gives " << hex(got) << ", not " << hex(want[j]);
    }
  }
  EXPECT_EQ(wrong, 0) << form.text << ": so many of " << operands.size() << " sets of operands";
}

}  // namespace

Form& Form::within_ulps(double ulps) {
  accepts = [ulps](const Values&, uint64_t got, uint64_t want) {
    const auto x = value_of<float>(got), y = value_of<float>(want);
    if (std::isnan(y)) return std::isnan(x);
    if (got == want) return true;
    if (std::isinf(x) || std::isinf(y))
      return std::fabs(x) >= 0x1.fffffcp127f && std::fabs(y) >= 0x1.fffffcp127f && x * y > 0;
    const int exponent = std::max(y == 0 ? -126 : std::ilogb(y), -126);
    return std::signbit(x) == std::signbit(y) &&
           std::fabs(static_cast<double>(x) - static_cast<double>(y)) <= std::ldexp(ulps, exponent - 23);
  };
  return *this;
}

void try_all(const std::vector<Form>& forms) {
  for (const Form& form : forms) {
    SCOPED_TRACE(form.text);
    const std::vector<Values> operands = operands_of(form);
    ASSERT_FALSE(operands.empty());
    std::vector<uint64_t> in;
    for (const Values& v : operands)
      for (size_t i = 0; i < form.from.size(); ++i) in.push_back(v[i]);
    in.resize(in.size() + 1);  // never empty
    BenchKernel kernel;
    kernel.body = body_of(form);
    kernel.needs = form.needs;
    kernel.block = {64, 1, 1};
    kernel.grid = {static_cast<uint32_t>(operands.size() / 64), 1, 1};
    kernel.memory = {Memory::in(in), Memory::out(operands.size() * form.to.size() * 8)};
    on_each(kernel, [&](const Bench&, const BenchKernel& done) { compare(form, operands, done.memory[1]); });
  }
}

}  // namespace tandem::test
