// Tests of PTX ISA, "ld", "st", "atom", "red", "cvta", "isspacep" and the state spaces. Every thread has a separate
// place.
#include <cmath>

#include "vgpu/src/units/numbers.h"
#include "vgpu/tests/instructions/form.h"

namespace tandem::test {
namespace {

using vgpu::units::decode;
using vgpu::units::encode;
using vgpu::units::Format;
using u16 = uint16_t;
using u32 = uint32_t;
using s32 = int32_t;
using u64 = uint64_t;
using s64 = int64_t;

// Declares sixteen bytes of each of 64 threads, at register "at" of a space.
std::string place(const std::string& space) {
  std::string text = "{\n.reg .b32 lane, at;\n.reg .b64 wide;\nmov.u32 lane, %tid.x;\n";
  if (space == "local") return text + ".local .align 16 .b8 memory[32];\nmov.u32 at, memory;\n";
  return text + ".shared .align 16 .b8 memory[1024];\nmov.u32 at, memory;\nmad.lo.s32 at, lane, 16, at;\n";
}

struct Width {
  const char* type;
  int bytes;
  bool sign;
};
const Width kWidths[] = {{"b8", 1, false},  {"u8", 1, false},  {"s8", 1, true},   {"b16", 2, false}, {"u16", 2, false},
                         {"s16", 2, true},  {"b32", 4, false}, {"u32", 4, false}, {"s32", 4, false}, {"f32", 4, false},
                         {"b64", 8, false}, {"u64", 8, false}, {"s64", 8, false}, {"f64", 8, false}};

// Returns the register after a load of this width from its low bytes.
u64 loaded(const Width& w, u64 x, int register_bytes) {
  if (w.bytes < 8) x &= (u64{1} << (8 * w.bytes)) - 1;
  if (w.sign && (x >> (8 * w.bytes - 1) & 1) != 0) x |= ~u64{0} << (8 * w.bytes);
  return register_bytes < 8 ? x & ((u64{1} << (8 * register_bytes)) - 1) : x;
}

TEST(Memory, EveryWidthInEverySpace) {
  std::vector<Form> forms;
  for (const Width& w : kWidths) {
    const std::string t = w.type;
    const auto add = [&](const std::string& text) {
      // Tests narrow values in registers of the same width, and of 32 bits.
      if (w.bytes <= 2) forms.push_back(form(text, [=](u16 a) { return static_cast<u16>(loaded(w, a, 2)); }));
      if (w.bytes <= 4) forms.push_back(form(text, [=](u32 a) { return static_cast<u32>(loaded(w, a, 4)); }));
      if (w.bytes == 8) forms.push_back(form(text, [=](u64 a) { return a; }));
    };
    add("st.global." + t + " [out_], a;\nld.global." + t + " d, [out_];");
    add("st." + t + " [out_], a;\nld." + t + " d, [out_];");
    add(place("shared") + "st.shared." + t + " [at+8], a;\nld.shared." + t + " d, [at+8];\n}");
    add(place("local") + "st.local." + t + " [at+16], a;\nld.local." + t + " d, [at+16];\n}");
    add(place("shared") + "cvt.u64.u32 wide, at;\ncvta.shared.u64 wide, wide;\nst." + t + " [wide], a;\nld.shared." +
        t + " d, [at];\n}");
    add(place("local") + "cvt.u64.u32 wide, at;\ncvta.local.u64 wide, wide;\nst.local." + t + " [at], a;\nld." + t +
        " d, [wide];\n}");
    add("ld.global." + t + " d, [in_];");
    add("ld.global.nc." + t + " d, [in_];");
  }
  try_all(forms);
}

TEST(Memory, Vectors) {
  const auto pair = [](u32 a, u32 b) { return std::pair(b, a); };
  const auto wide_pair = [](u64 a, u64 b) { return std::pair(b, a); };
  const auto narrow_pair = [](u16 a, u16 b) { return std::pair(b, a); };
  std::vector<Form> forms;
  for (const std::string space : {"shared", "local"}) {
    const std::string s = "." + space;
    forms.push_back(form(place(space) + "st" + s + ".v2.b32 [at], {a, b};\nld" + s + ".v2.b32 {e, d}, [at];\n}", pair));
    forms.push_back(form(place(space) + "st" + s + ".v2.u32 [at], {a, b};\nld" + s + ".v2.f32 {e, d}, [at];\n}", pair));
    forms.push_back(form(
        place(space) + "st" + s + ".v2.f32 [at+8], {a, b};\nld" + s + ".b32 d, [at+12];\nld" + s + ".b32 e, [at+8];\n}",
        pair));
    forms.push_back(
        form(place(space) + "st" + s + ".v2.b64 [at], {a, b};\nld" + s + ".v2.u64 {e, d}, [at];\n}", wide_pair));
    forms.push_back(
        form(place(space) + "st" + s + ".v2.u64 [at], {a, b};\nld" + s + ".v2.b64 {e, d}, [at];\n}", wide_pair));
    forms.push_back(
        form(place(space) + "st" + s + ".v4.u32 [at], {a, b, c, g};\nld" + s + ".v4.b32 {_, d, _, e}, [at];\n}",
             [](u32, u32 b, u32, u32 g) { return std::pair(b, g); }));
    forms.push_back(form(place(space) + "cvt.u64.u32 wide, at;\ncvta" + s +
                             ".u64 wide, wide;\nst.v4.u32 [wide], {a, b, c, g};\nld" + s +
                             ".v4.b32 {_, d, _, e}, [at];\n}",
                         [](u32, u32 b, u32, u32 g) { return std::pair(b, g); }));
    forms.push_back(
        form(place(space) + "st" + s + ".v2.b16 [at+4], {a, b};\nld" + s + ".v2.u16 {e, d}, [at+4];\n}", narrow_pair));
    forms.push_back(
        form(place(space) + "st" + s + ".v4.b32 [at], {a, b, c, g};\nld" + s + ".v4.u32 {_, d, _, e}, [at];\n}",
             [](u32, u32 b, u32, u32 g) { return std::pair(b, g); }));
    forms.push_back(form(place(space) + "st" + s + ".v4.u8 [at], {a, b, c, g};\nld" + s + ".u32 d, [at];\n}",
                         [](u16 a, u16 b, u16 c, u16 g) {
                           return u32{a & 0xffu} | u32{b & 0xffu} << 8 | u32{c & 0xffu} << 16 | u32{g & 0xffu} << 24;
                         }));
    forms.push_back(form(place(space) + ".reg .b128 q;\nmov.b128 q, {a, b};\nst" + s + ".b128 [at], q;\nld" + s +
                             ".v2.b64 {e, d}, [at];\n}",
                         wide_pair));
  }
  forms.push_back(form("ld.global.v2.b32 {d, e}, [in_];",
                       [](u64 a) { return std::pair(static_cast<u32>(a), static_cast<u32>(a >> 32)); }));
  forms.push_back(form("ld.global.v2.b64 {d, e}, [in_];", [](u64 a, u64 b) { return std::pair(a, b); }));
  forms.push_back(form("st.global.v2.u64 [out_], {a, b};\nld.global.v2.u64 {e, d}, [out_];", wide_pair));
  forms.push_back(form("ld.global.nc.v4.u16 {d, _, _, e}, [in_];",
                       [](u64 a) { return std::pair(static_cast<u16>(a), static_cast<u16>(a >> 48)); }));
  forms.push_back(form("st.global.v2.u32 [out_], {a, b};\nld.global.b64 d, [out_];",
                       [](u32 a, u32 b) { return u64{b} << 32 | a; }));
  forms.push_back(form("{\n.reg .b128 q;\nld.global.b128 q, [in_];\nmov.b128 {d, e}, q;\n}",
                       [](u64 a, u64 b) { return std::pair(a, b); }));
  forms.push_back(form("ld.global.v4.b64 {d, _, _, e}, [in_];", [](u64 a, u64, u64, u64 g) {
                    return std::pair(a, g);
                  }).on(Needs::blackwell));
  forms.push_back(form("{\n.reg .b32 x<8>;\nld.global.nc.v8.b32 {x0, x1, x2, x3, x4, x5, x6, x7}, [in_];\nmov.b64 d, "
                       "{x0, x1};\nmov.b64 e, {x6, x7};\n}",
                       [](u64 a, u64, u64, u64 g) { return std::pair(a, g); })
                      .on(Needs::blackwell));
  try_all(forms);
}

// Hints and orders change nothing that one thread sees.
TEST(Memory, Qualifiers) {
  const auto same = [](u32 a) { return a; };
  std::vector<Form> forms;
  for (const char* q : {"ca",
                        "cg",
                        "cs",
                        "lu",
                        "cv",
                        "volatile",
                        "relaxed.cta",
                        "relaxed.cluster",
                        "relaxed.gpu",
                        "relaxed.sys",
                        "acquire.cta",
                        "acquire.cluster",
                        "acquire.gpu",
                        "acquire.sys",
                        "L1::evict_last",
                        "L1::no_allocate",
                        "L1::evict_first",
                        "L2::128B",
                        "L2::64B",
                        "L2::256B"}) {
    const std::string qualifier = q;
    const bool first = qualifier == "volatile" || qualifier.find("relaxed") == 0 || qualifier.find("acquire") == 0;
    const std::string name = first ? "ld." + qualifier + ".global" : "ld.global." + qualifier;
    forms.push_back(form("st.global.b32 [out_], a;\n" + name + ".b32 d, [out_];", same));
  }
  for (const char* q : {"wb", "cg", "cs", "wt", "volatile", "relaxed.cta", "relaxed.gpu", "relaxed.sys", "release.cta",
                        "release.cluster", "release.gpu", "release.sys", "L1::evict_last"}) {
    const std::string qualifier = q;
    const bool first = qualifier == "volatile" || qualifier.find("relaxed") == 0 || qualifier.find("release") == 0;
    const std::string name = first ? "st." + qualifier + ".global" : "st.global." + qualifier;
    forms.push_back(form(name + ".b32 [out_], a;\nld.global.b32 d, [out_];", same));
  }
  for (const char* q : {"volatile", "relaxed.cta", "acquire.cta"})
    forms.push_back(form(place("shared") + "st.shared.b32 [at], a;\nld." + q + ".shared.b32 d, [at];\n}", same));
  for (const char* q : {"volatile", "relaxed.cta", "release.cta"})
    forms.push_back(form(place("shared") + "st." + q + ".shared.b32 [at], a;\nld.shared.b32 d, [at];\n}", same));
  forms.push_back(
      form("{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, "
           "1.0;\nld.global.L2::cache_hint.b32 d, [in_], policy;\n}",
           same));
  forms.push_back(
      form("prefetch.global.L2 [in_];\nprefetch.global.L1 [in_];\nprefetchu.L1 [in_];\nld.global.b32 d, [in_];", same));
  forms.push_back(form("ld.global.nc.L1::no_allocate.L2::128B.b32 d, [in_];", same));
  forms.push_back(form("ldu.global.b32 d, [in_];", same));
  // Instructions that end the kernel or lose data are not executed.
  forms.push_back(
      form("{\n.reg .pred never;\n.reg .b64 line;\nsetp.ne.b32 never, a, a;\nand.b64 line, out_, -128;\n"
           "@never discard.global.L2 [line], 128;\n@never trap;\n@never brkpt;\n"
           "applypriority.global.L2::evict_normal [line], 128;\nmov.b32 d, a;\n}",
           same));
  try_all(forms);
}

TEST(Memory, ConstantsAndParameters) {
  BenchKernel kernel;
  kernel.declarations =
      ".const .align 8 .b8 table[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};\n"
      ".const .u32 one = 77;\n"
      ".global .align 8 .u32 counters[4] = {5, 6, 7, 8};\n"
      ".global .u64 pointer = generic(counters)+8;\n";
  kernel.body = R"(
    .reg .b32 x, lane;
    .reg .b64 out, w;
    ld.param.u64 out, [p0];
    mov.u32 lane, %tid.x;
    mad.wide.u32 out, lane, 36, out;
    ld.const.u32 x, [table+4];
    st.global.b32 [out], x;
    ld.const.u8 x, [table+15];
    st.global.b32 [out+4], x;
    ld.const.u32 x, [one];
    st.global.b32 [out+8], x;
    ld.global.u32 x, [counters+4];
    st.global.b32 [out+12], x;
    ld.global.u64 w, [pointer];
    ld.u32 x, [w];
    st.global.b32 [out+16], x;
    mov.u64 w, table;
    cvta.const.u64 w, w;
    ld.u32 x, [w+8];
    st.global.b32 [out+20], x;
    mov.u64 w, counters;
    ld.global.v2.u32 {x, lane}, [w+8];
    st.global.b32 [out+24], x;
    st.global.b32 [out+28], lane;
    // The upper half of the parameter, read in two ways.
    .reg .b32 y;
    ld.param.u32 x, [p0+4];
    ld.param.v2.u32 {y, lane}, [p0];
    xor.b32 x, x, lane;
    st.global.b32 [out+32], x;)";
  kernel.memory = {Memory::out(32 * 36)};
  on_each(kernel, [](const Bench&, const BenchKernel& done) {
    for (size_t lane = 0; lane < 32; ++lane) {
      const auto at = [&](size_t i) { return done.memory[0].at<u32>(9 * lane + i); };
      EXPECT_EQ(at(0), 0x08070605u);
      EXPECT_EQ(at(1), 16u);
      EXPECT_EQ(at(2), 77u);
      EXPECT_EQ(at(3), 6u);
      EXPECT_EQ(at(4), 7u);
      EXPECT_EQ(at(5), 0x0c0b0a09u);
      EXPECT_EQ(at(6), 7u);
      EXPECT_EQ(at(7), 8u);
      EXPECT_EQ(at(8), 0u);
    }
  });
}

TEST(Memory, SpacesOfAddresses) {
  const auto yes = [](u32) { return true; };
  const auto no = [](u32) { return false; };
  const auto shared = place("shared") + "cvt.u64.u32 wide, at;\ncvta.shared.u64 wide, wide;\n";
  const auto local = place("local") + "cvt.u64.u32 wide, at;\ncvta.local.u64 wide, wide;\nst.local.b32 [at], a;\n";
  try_all({
      form("isspacep.global d, out_;", yes),
      form("isspacep.shared d, out_;", no),
      form("isspacep.local d, out_;", no),
      form(shared + "isspacep.shared d, wide;\n}", yes),
      form(shared + "isspacep.shared::cta d, wide;\n}", yes),
      form(shared + "isspacep.shared::cluster d, wide;\n}", yes),
      form(shared + "isspacep.global d, wide;\n}", no),
      form(local + "isspacep.local d, wide;\n}", yes),
      form(local + "isspacep.shared d, wide;\n}", no),
      // Converts an address to a space and back.
      form(shared + "st.shared.b32 [at], a;\ncvta.to.shared.u64 wide, wide;\ncvt.u32.u64 at, wide;\nld.shared.b32 d, "
                    "[at];\n}",
           [](u32 a) { return a; }),
      form(local + "cvta.to.local.u64 wide, wide;\nld.local.b32 d, [wide];\n}", [](u32 a) { return a; }),
      form("{\n.reg .b64 w;\ncvta.to.global.u64 w, in_;\ncvta.global.u64 w, w;\nld.b32 d, [w];\n}",
           [](u32 a) { return a; }),
  });
}

// ---- Atomic operations: the old value, and the new value in memory ----
template <class T>
std::string atom(const std::string& space, const std::string& name, const std::string& type,
                 const std::string& operands) {
  const std::string load = sizeof(T) == 8 ? ".b64" : ".b32";
  if (space == "shared" || space == "shared::cta" || space == "shared::cluster")
    return place("shared") + "st.shared" + load + " [at], a;\natom." + space + "." + name + "." + type + " d, [at], " +
           operands + ";\nld.shared" + load + " e, [at];\n}";
  const std::string dot = space.empty() ? "." : "." + space + ".";
  return "st.global" + load + " [out_], a;\natom" + dot + name + "." + type + " d, [out_], " + operands +
         ";\nld.global" + load + " e, [out_];";
}

template <class T, class F>
void add_atomic(const std::string& name, const std::string& type, F f, std::vector<Form>* forms) {
  for (const char* space : {"global", "shared", ""})
    forms->push_back(form(atom<T>(space, name, type, "b"), [=](T a, T b) { return std::pair(a, f(a, b)); }));
  // The same without the old value.
  const std::string load = sizeof(T) == 8 ? ".b64" : ".b32";
  if (name == "exch") return;
  forms->push_back(form("st.global" + load + " [out_], a;\nred.global." + name + "." + type + " [out_], b;\nld.global" +
                            load + " d, [out_];",
                        f));
}

TEST(Atomic, Integers) {
  std::vector<Form> forms;
  add_atomic<u32>(
      "add", "u32", [](u32 a, u32 b) { return a + b; }, &forms);
  add_atomic<s32>(
      "add", "s32", [](s32 a, s32 b) { return static_cast<s32>(static_cast<u32>(a) + static_cast<u32>(b)); }, &forms);
  add_atomic<u64>(
      "add", "u64", [](u64 a, u64 b) { return a + b; }, &forms);
  add_atomic<u32>(
      "min", "u32", [](u32 a, u32 b) { return std::min(a, b); }, &forms);
  add_atomic<s32>(
      "min", "s32", [](s32 a, s32 b) { return std::min(a, b); }, &forms);
  add_atomic<u64>(
      "min", "u64", [](u64 a, u64 b) { return std::min(a, b); }, &forms);
  add_atomic<s64>(
      "min", "s64", [](s64 a, s64 b) { return std::min(a, b); }, &forms);
  add_atomic<u32>(
      "max", "u32", [](u32 a, u32 b) { return std::max(a, b); }, &forms);
  add_atomic<s32>(
      "max", "s32", [](s32 a, s32 b) { return std::max(a, b); }, &forms);
  add_atomic<u64>(
      "max", "u64", [](u64 a, u64 b) { return std::max(a, b); }, &forms);
  add_atomic<s64>(
      "max", "s64", [](s64 a, s64 b) { return std::max(a, b); }, &forms);
  add_atomic<u32>(
      "inc", "u32", [](u32 a, u32 b) { return a >= b ? 0 : a + 1; }, &forms);
  add_atomic<u32>(
      "dec", "u32", [](u32 a, u32 b) { return a == 0 || a > b ? b : a - 1; }, &forms);
  add_atomic<u32>(
      "and", "b32", [](u32 a, u32 b) { return a & b; }, &forms);
  add_atomic<u32>(
      "or", "b32", [](u32 a, u32 b) { return a | b; }, &forms);
  add_atomic<u32>(
      "xor", "b32", [](u32 a, u32 b) { return a ^ b; }, &forms);
  add_atomic<u64>(
      "and", "b64", [](u64 a, u64 b) { return a & b; }, &forms);
  add_atomic<u64>(
      "or", "b64", [](u64 a, u64 b) { return a | b; }, &forms);
  add_atomic<u64>(
      "xor", "b64", [](u64 a, u64 b) { return a ^ b; }, &forms);
  add_atomic<u32>(
      "exch", "b32", [](u32, u32 b) { return b; }, &forms);
  add_atomic<u64>(
      "exch", "b64", [](u64, u64 b) { return b; }, &forms);
  for (const char* space : {"global", "shared", ""}) {
    forms.push_back(
        form(atom<u32>(space, "cas", "b32", "b, c"), [](u32 a, u32 b, u32 c) { return std::pair(a, a == b ? c : a); }));
    forms.push_back(
        form(atom<u64>(space, "cas", "b64", "b, c"), [](u64 a, u64 b, u64 c) { return std::pair(a, a == b ? c : a); }));
    // Tests equal values, because random numbers are not equal.
    forms.push_back(form(atom<u32>(space, "cas", "b32", "a, c"), [](u32 a, u32, u32 c) { return std::pair(a, c); }));
  }
  forms.push_back(form("st.global.b16 [out_], a;\natom.global.cas.b16 d, [out_], b, c;\nld.global.b16 e, [out_];",
                       [](u16 a, u16 b, u16 c) { return std::pair(a, a == b ? c : a); }));
  for (const char* q :
       {"relaxed.cta", "relaxed.gpu", "relaxed.sys", "acquire.gpu", "release.gpu", "acq_rel.gpu", "acq_rel.cluster"})
    forms.push_back(form(
        "st.global.b32 [out_], a;\natom." + std::string(q) + ".global.add.u32 d, [out_], b;\nld.global.b32 e, [out_];",
        [](u32 a, u32 b) { return std::pair(a, a + b); }));
  for (const char* q : {"relaxed.gpu", "release.gpu", "relaxed.cta", "release.sys"})
    forms.push_back(
        form("st.global.b32 [out_], a;\nred." + std::string(q) + ".global.add.s32 [out_], b;\nld.global.b32 d, [out_];",
             [](u32 a, u32 b) { return a + b; }));
  forms.push_back(form(atom<u32>("shared::cta", "add", "u32", "b"), [](u32 a, u32 b) { return std::pair(a, a + b); }));
  forms.push_back(
      form(atom<u32>("shared::cluster", "add", "u32", "b"), [](u32 a, u32 b) { return std::pair(a, a + b); }));
  try_all(forms);
}

TEST(Atomic, Floats) {
  const auto flushed = [](float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; };
  const auto nan = [](float x) { return std::isnan(x) ? value_of<float>(0x7fffffff) : x; };
  std::vector<Form> forms;
  // float32 is flushed in global memory, and not in shared memory.
  forms.push_back(form(atom<float>("global", "add", "f32", "b"),
                       [=](float a, float b) { return std::pair(a, nan(flushed(flushed(a) + flushed(b)))); }));
  forms.push_back(form("st.global.b32 [out_], a;\nred.global.add.f32 [out_], b;\nld.global.b32 d, [out_];",
                       [=](float a, float b) { return nan(flushed(flushed(a) + flushed(b))); }));
  forms.push_back(
      form(atom<float>("shared", "add", "f32", "b"), [=](float a, float b) { return std::pair(a, nan(a + b)); }));
  forms.push_back(form(atom<double>("global", "add", "f64", "b"), [](double a, double b) {
                    return std::pair(a, a + b);
                  }).where([](double a, double b) { return !std::isnan(a + b); }));
  const auto halves = [](Pair a, Pair b, Format format) {
    u32 d = 0;
    for (const int shift : {0, 16})
      d |= encode(decode(a.bits >> shift & 0xffff, format) + decode(b.bits >> shift & 0xffff, format), format) << shift;
    return Pair{d};
  };
  for (const Format format : {Format::f16, Format::bf16}) {
    const std::string type = vgpu::units::name_of(format);
    for (const char* space : {"global", "shared", ""})
      forms.push_back(form(atom<u32>(space, "add.noftz", type + "x2", "b"),
                           [=](Pair a, Pair b) { return std::pair(a, halves(a, b, format)); }));
    forms.push_back(form(
        "st.global.b16 [out_], a;\natom.global.add.noftz." + type + " d, [out_], b;\nld.global.b16 e, [out_];",
        [=](Half a, Half b) {
          return std::pair(a, Half{static_cast<u16>(encode(decode(a.bits, format) + decode(b.bits, format), format))});
        }));
  }
  // Vectors: the low and the high half of a result's eight bytes.
  const auto two = [=](float a, float b, float c, float g) {
    const auto add = [=](float x, float y) { return bits_of(nan(flushed(flushed(x) + flushed(y)))); };
    return add(b, g) << 32 | add(a, c);
  };
  forms.push_back(
      form("st.global.v2.b32 [out_], {a, b};\nred.global.v2.f32.add [out_], {c, g};\nld.global.b64 d, [out_];", two));
  forms.push_back(
      form("{\n.reg .b32 x, y;\nst.global.v2.b32 [out_], {a, b};\natom.global.v2.f32.add {x, y}, [out_], {c, "
           "g};\nld.global.b64 d, [out_];\n}",
           two));
  forms.push_back(
      form("st.global.v4.b32 [out_], {a, b, c, g};\nred.global.add.v4.f32 [out_], {b, c, g, a};\n"
           "ld.global.v2.b64 {d, e}, [out_];",
           [=](float a, float b, float c, float g) { return std::pair(two(a, b, b, c), two(c, g, g, a)); }));
  // PTX does not specify the NaN of a sum.
  for (Form& form : forms) {
    const bool wide = form.from[0] == Operand::f32, two_of_them = form.to[0] == Operand::integer64;
    if (!wide) continue;
    form.within([=](const Values&, uint64_t got, uint64_t want) {
      for (const int shift : {0, 32}) {
        if (shift == 32 && !two_of_them) break;
        const u32 x = static_cast<u32>(got >> shift), y = static_cast<u32>(want >> shift);
        if (x != y && !(std::isnan(value_of<float>(x)) && std::isnan(value_of<float>(y)))) return false;
      }
      return true;
    });
  }
  try_all(forms);
}

// Every thread of every block adds to one counter: each thread receives a different old value.
TEST(Atomic, AllThreadsOnOneCounter) {
  BenchKernel kernel;
  kernel.body = R"(
    .reg .b64 counter, out;
    .reg .b32 old, one;
    ld.param.u64 counter, [p0];
    ld.param.u64 out, [p1];
    atom.relaxed.gpu.global.add.u32 old, [counter], 1;
    mad.wide.u32 out, old, 4, out;
    st.global.b32 [out], old;
    red.global.max.u32 [counter+4], old;
    mov.u32 one, 1;
    red.relaxed.gpu.global.add.u32 [counter+8], one;)";
  kernel.grid = {7, 1, 1}, kernel.block = {96, 1, 1};
  kernel.memory = {Memory::inout(std::vector<u32>{0, 0, 5}), Memory::out(7 * 96 * 4)};
  on_each(kernel, [](const Bench&, const BenchKernel& done) {
    EXPECT_EQ(done.memory[0].at<u32>(0), 672u);
    EXPECT_EQ(done.memory[0].at<u32>(1), 671u);
    EXPECT_EQ(done.memory[0].at<u32>(2), 677u);
    for (u32 i = 0; i < 672; ++i) ASSERT_EQ(done.memory[1].at<u32>(i), i);
  });
}

}  // namespace
}  // namespace tandem::test
