// PTX ISA, "TensorCore 5th Generation Family Instructions" of Blackwell: allocation, loads and stores, copies, the
// shift, products, commits; and clusterlaunchcontrol. vgpu/tests/units compares the products with plain products. These
// tests run products in whole kernels. Values are small integers, whose sums are exact.
#include "vgpu/src/units/tcgen05.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/text.h"
#include "support/random.h"
#include "vgpu/tests/instructions/bench.h"
#include "vgpu/tests/units/window.h"

namespace tandem::test {
namespace {

using namespace vgpu::units;
using u32 = uint32_t;
using u64 = uint64_t;

constexpr u32 kBase = 1024;  // possible begin of dynamic shared memory
constexpr u32 kImage = 96 * 1024;
constexpr size_t kCells = size_t{kTmemLanes} * kTmemColumns;

std::string number(u64 x) { return std::to_string(x); }
std::string registers(const std::string& name, int count) {
  std::string text = "{";
  for (int i = 0; i < count; ++i) text += (i == 0 ? "" : ", ") + name + std::to_string(i);
  return text + "}";
}

// Declares registers, fills shared memory, initialises the mbarriers and allocates tensor memory.
std::string prologue(int group) {
  const std::string g = number(static_cast<u64>(group));
  return R"(
  .reg .b32 t, warp, lane, rank, x, y, at, bar, bar2, taddr, quad, idesc, v<4>, r<128>;
  .reg .b64 image, in, out, wide, where, da, db;
  .reg .pred p, q, always, w0;
  .shared .align 8 .b64 barriers[2];
  .shared .b32 allocated;
  ld.param.u64 image, [p0];
  ld.param.u64 in, [p1];
  ld.param.u64 out, [p2];
  mov.u32 t, %tid.x;
  mov.u32 rank, %cluster_ctarank;
  shr.u32 warp, t, 5;
  and.b32 lane, t, 31;
  setp.eq.u32 w0, warp, 0;
  setp.eq.u32 q, t, 0;
  setp.eq.u32 p, rank, 0;
  and.pred p, p, q;
  setp.eq.u32 always, t, t;
  mov.u32 at, smem;
  mov.u32 bar, barriers;
  add.u32 bar2, bar, 8;
  mad.wide.u32 image, rank, )" +
         number(kImage) + R"(, image;
  mad.wide.u32 in, rank, )" +
         number(4 * kCells) + R"(, in;
  mad.wide.u32 out, rank, )" +
         number(4 * kCells) + R"(, out;
  mul.lo.u32 x, t, 16;
  fill:
  add.u32 y, at, x;
  cvt.u64.u32 wide, x;
  add.s64 wide, image, wide;
  ld.global.v4.b32 {v0, v1, v2, v3}, [wide];
  st.shared.v4.b32 [y], {v0, v1, v2, v3};
  add.u32 x, x, 2048;
  setp.lt.u32 q, x, )" +
         number(kImage) + R"(;
  @q bra fill;
  fence.proxy.async.shared::cta;
  setp.eq.u32 q, t, 0;
  @q mbarrier.init.shared::cta.b64 [bar], 1;
  @q mbarrier.init.shared::cta.b64 [bar2], 1;
  fence.mbarrier_init.release.cluster;
  mov.u32 y, allocated;
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  @!w0 bra allocated_;
  tcgen05.alloc.cta_group::)" +
         g + R"(.sync.aligned.shared::cta.b32 [y], 512;
  tcgen05.relinquish_alloc_permit.cta_group::)" +
         g + R"(.sync.aligned;
  allocated_:
  bar.sync 0;
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  ld.shared.b32 taddr, [y];
  mul.lo.u32 x, warp, 0x200000;
  add.u32 quad, taddr, x;
  mad.wide.u32 in, t, 4, in;
  mad.wide.u32 out, t, 4, out;
)";
}

// Orders tensor memory and the threads of all blocks.
const char* const kSettle =
    "tcgen05.fence::before_thread_sync;\nbar.sync "
    "0;\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\ntcgen05.fence::after_thread_sync;\n";

// A kernel of one block or a pair fills shared memory from p0 and tensor memory from p1 (by columns). The end stores
// tensor memory to p2. The body has t (thread), warp, lane, p (thread 0 of the even block) and r0 to r127. Addresses
// are at (shared memory), taddr and quad (taddr at the warp's lanes). The mbarriers bar and bar2 expect one arrival.
BenchKernel kernel_of(const std::string& body, const std::vector<u32>& image, const std::vector<u32>& cells,
                      int group) {
  BenchKernel kernel;
  kernel.needs = Needs::blackwell;
  kernel.body = prologue(group);
  for (u32 chunk = 0; chunk < 16; ++chunk) {
    for (u32 i = 0; i < 32; ++i)
      kernel.body += "ld.global.b32 r" + number(i) + ", [in+" + number(512 * (32 * chunk + i)) + "];\n";
    kernel.body += "add.u32 x, quad, " + number(32 * chunk) + ";\ntcgen05.st.sync.aligned.32x32b.x32.b32 [x], " +
                   registers("r", 32) + ";\n";
  }
  kernel.body += std::string("tcgen05.wait::st.sync.aligned;\n") + kSettle + body + "\n" + kSettle;
  for (u32 chunk = 0; chunk < 16; ++chunk) {
    kernel.body += "add.u32 x, quad, " + number(32 * chunk) + ";\ntcgen05.ld.sync.aligned.32x32b.x32.b32 " +
                   registers("r", 32) + ", [x];\ntcgen05.wait::ld.sync.aligned;\n";
    for (u32 i = 0; i < 32; ++i)
      kernel.body += "st.global.b32 [out+" + number(512 * (32 * chunk + i)) + "], r" + number(i) + ";\n";
  }
  kernel.body +=
      kSettle + std::string("@!w0 bra freed;\ntcgen05.dealloc.cta_group::") + number(static_cast<u64>(group)) +
      ".sync.aligned.b32 taddr, 512;\nfreed:\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;";
  kernel.directives = group == 2 ? ".explicitcluster" : "";
  kernel.grid = kernel.cluster = {static_cast<u32>(group), 1, 1};
  kernel.block = {128, 1, 1};
  kernel.dynamic_smem_bytes = kImage;
  kernel.memory = {Memory::in(image), Memory::in(cells), Memory::out(4 * kCells * static_cast<size_t>(group))};
  return kernel;
}

// Returns the issuing thread's work, and a commit that both blocks wait for.
std::string issued(const std::string& work, int group) {
  const std::string commit = group == 1
                                 ? "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];\n"
                                 : ".reg .b16 both;\nmov.b16 both, "
                                   "3;\ntcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::"
                                   "cluster.b64 [bar], both;\n";
  return "@!p bra issued;\n" + work + commit +
         "issued:\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 q, [bar], 0;\n@!q bra "
         "wait;\ntcgen05.fence::after_thread_sync;\n";
}

struct State {
  std::vector<u32> image, cells;  // threads of all blocks
  std::vector<std::vector<std::byte>> windows;
  std::vector<std::unique_ptr<TensorMemory>> memories;
  std::vector<const std::byte*> window_pointers;
  std::vector<TensorMemory*> memory_pointers;
};

// Fills the image with random words or small values of formats: one below its middle, one above; and the cells.
template <class Image, class Cells>
State state_of(int group, Image&& image_word, Cells&& cell) {
  State s;
  for (size_t i = 0; i < static_cast<size_t>(group) * kImage / 4; ++i) s.image.push_back(image_word(4 * i % kImage));
  for (size_t i = 0; i < static_cast<size_t>(group) * kCells; ++i) s.cells.push_back(cell(i % kCells / kTmemLanes));
  for (size_t cta = 0; cta < static_cast<size_t>(group); ++cta) {
    s.windows.emplace_back(kBase + kImage);
    std::memcpy(s.windows.back().data() + kBase, s.image.data() + cta * kImage / 4, kImage);
    s.memories.push_back(std::make_unique<TensorMemory>());
    std::memcpy(s.memories.back()->cells, s.cells.data() + cta * kCells, 4 * kCells);
  }
  for (size_t cta = 0; cta < static_cast<size_t>(group); ++cta) {
    s.window_pointers.push_back(s.windows[cta].data());
    s.memory_pointers.push_back(s.memories[cta].get());
  }
  return s;
}

// After the kernel, tensor memory must equal the state's memories.
void try_kernel(const std::string& body, const State& s, int group, const State* before) {
  on_each(kernel_of(body, before->image, before->cells, group), [&](const Bench&, const BenchKernel& done) {
    size_t wrong = 0;
    for (size_t i = 0; i < kCells * static_cast<size_t>(group); ++i) {
      const size_t cta = i / kCells, column = i % kCells / kTmemLanes, lane = i % kTmemLanes;
      const u32 want = s.memories[cta]->cells[column][lane], got = done.memory[2].at<u32>(i);
      if (got != want && ++wrong <= 3)
        ADD_FAILURE() << "block " << cta << " lane " << lane << " column " << column << ": " << got << ", not " << want;
    }
    EXPECT_EQ(wrong, 0u);
  });
}

State random_state(Random& random, int group) {
  return state_of(
      group, [&](size_t) { return static_cast<u32>(random.next()); },
      [&](size_t) { return static_cast<u32>(random.next()); });
}

TEST(Tcgen05, LoadsAndStores) {
  Random random(1);
  struct Case {
    const char* shape;
    TmemAccess::Shape value;
    int each, most;  // registers per repeat
  };
  for (const Case& c :
       {Case{"32x32b", TmemAccess::Shape::s32x32b, 1, 128}, Case{"16x64b", TmemAccess::Shape::s16x64b, 1, 128},
        Case{"16x128b", TmemAccess::Shape::s16x128b, 2, 64}, Case{"16x256b", TmemAccess::Shape::s16x256b, 4, 32},
        Case{"16x32bx2", TmemAccess::Shape::s16x32bx2, 1, 128}})
    for (const int repeat : {1, 2, 4, 8, 16, 32, 64, 128})
      for (const bool pack : {false, true}) {
        if (repeat > c.most) continue;
        TmemAccess access = {c.value, repeat, pack, 0};
        const int width =
            repeat * (c.value == TmemAccess::Shape::s16x64b ? 2 : 1) * c.each * (c.each > 1 ? 2 : 1) * (pack ? 2 : 1);
        if (2 * width > 512) continue;
        const bool halves = c.value == TmemAccess::Shape::s16x32bx2;
        if (halves) access.second_offset = width + 3;
        if (2 * width + 3 > 240) continue;
        // Copies from column 3 of the quadrant to column 250.
        const int count = vgpu::units::registers(access);
        const std::string offset = halves ? ", " + std::to_string(access.second_offset) : "";
        const std::string suffix = std::string(".sync.aligned.") + c.shape + ".x" + std::to_string(repeat);
        const std::string body = "add.u32 x, quad, 3;\ntcgen05.ld" + suffix + (pack ? ".pack::16b" : "") + ".b32 " +
                                 registers("r", count) + ", [x]" + offset +
                                 ";\ntcgen05.wait::ld.sync.aligned;\nadd.u32 x, quad, 250;\ntcgen05.st" + suffix +
                                 (pack ? ".unpack::16b" : "") + ".b32 [x]" + offset + ", " + registers("r", count) +
                                 ";\ntcgen05.wait::st.sync.aligned;\n";
        SCOPED_TRACE(body);
        const State before = random_state(random, 1);
        State after = state_of(
            1, [&](size_t) { return 0u; }, [&](size_t) { return 0u; });
        *after.memories[0] = *before.memories[0];
        std::vector<u32> words(static_cast<size_t>(32 * count));
        std::vector<Row> rows;
        std::vector<ConstRow> const_rows;
        for (int r = 0; r < count; ++r) rows.push_back(words.data() + 32 * r), const_rows.push_back(rows.back());
        for (u32 warp = 0; warp < 4; ++warp) {
          ASSERT_TRUE(check(access, (32 * warp) << 16 | 250, static_cast<int>(warp)).ok());
          load_tmem(access, *before.memories[0], (32 * warp) << 16 | 3, rows.data());
          store_tmem(access, after.memories[0].get(), (32 * warp) << 16 | 250, const_rows.data());
        }
        try_kernel(body, after, 1, &before);
      }
}

// Loads the upper half of a warp's lanes.
TEST(Tcgen05, LoadsOfUpperLanes) {
  Random random(2);
  const State before = random_state(random, 1);
  State after = random_state(random, 1);
  *after.memories[0] = *before.memories[0];
  std::vector<u32> words(32 * 4);
  std::vector<Row> rows;
  std::vector<ConstRow> const_rows;
  for (int r = 0; r < 4; ++r) rows.push_back(words.data() + 32 * r), const_rows.push_back(rows.back());
  const TmemAccess access = {TmemAccess::Shape::s16x64b, 4, false, 0};
  for (u32 warp = 0; warp < 4; ++warp) {
    load_tmem(access, *before.memories[0], (32 * warp + 16) << 16 | 8, rows.data());
    store_tmem(access, after.memories[0].get(), (32 * warp) << 16 | 100, const_rows.data());
  }
  try_kernel(
      "add.u32 x, quad, 0x100008;\ntcgen05.ld.sync.aligned.16x64b.x4.b32 {r0, r1, r2, r3}, "
      "[x];\ntcgen05.wait::ld.sync.aligned;\n"
      "add.u32 x, quad, 100;\ntcgen05.st.sync.aligned.16x64b.x4.b32 [x], {r0, r1, r2, "
      "r3};\ntcgen05.wait::st.sync.aligned;\n",
      after, 1, &before);
}

std::string descriptor(const std::string& name, const Canonical& l) {
  return "add.u32 x, at, " + number(l.start - kBase) +
         ";\nshr.u32 x, x, 4;\nand.b32 x, x, 0x3fff;\ncvt.u64.u32 where, x;\nmov.b64 " + name + ", " +
         number(l.tcgen05() & ~u64{0x3fff}) + ";\nor.b64 " + name + ", " + name + ", where;\n";
}

TEST(Tcgen05, Copies) {
  Random random(3);
  using S = TmemCopy::Shape;
  using M = TmemCopy::Multicast;
  using F = TmemCopy::Source;
  struct Case {
    const char* name;
    TmemCopy copy;
    u32 rows, chunks;
  };
  const Case cases[] = {{"128x256b", {S::s128x256b, M::none, F::plain}, 128, 2},
                        {"4x256b", {S::s4x256b, M::none, F::plain}, 4, 2},
                        {"128x128b", {S::s128x128b, M::none, F::plain}, 128, 1},
                        {"64x128b.warpx2::02_13", {S::s64x128b, M::warpx2_02_13, F::plain}, 64, 1},
                        {"64x128b.warpx2::01_23", {S::s64x128b, M::warpx2_01_23, F::plain}, 64, 1},
                        {"32x128b.warpx4", {S::s32x128b, M::warpx4, F::plain}, 32, 1},
                        {"128x256b.b8x16.b4x16_p64", {S::s128x256b, M::none, F::b4x16_p64}, 128, 2},
                        {"32x128b.warpx4.b8x16.b6x16_p32", {S::s32x128b, M::warpx4, F::b6x16_p32}, 32, 1}};
  for (const int group : {1, 2})
    for (const Case& c : cases) {
      const Canonical layout =
          random_canonical(random, c.chunks == 2 ? MatrixSwizzle::b32 : MatrixSwizzle::none, false, c.chunks, c.rows);
      MatrixDescriptor d;
      ASSERT_TRUE(decode_tcgen05(layout.tcgen05(), &d).ok());
      const State before = random_state(random, group);
      State after = random_state(random, group);
      for (size_t cta = 0; cta < static_cast<size_t>(group); ++cta) {
        *after.memories[cta] = *before.memories[cta];
        copy_to_tmem(c.copy, d, before.windows[cta].data(), after.memories[cta].get(), 40);
      }
      SCOPED_TRACE(c.name);
      try_kernel(issued(descriptor("da", layout) + "add.u32 x, taddr, 40;\ntcgen05.cp.cta_group::" +
                            std::to_string(group) + "." + c.name + " [x], da;\n",
                        group),
                 after, group, &before);
    }
}

TEST(Tcgen05, Shift) {
  Random random(4);
  const State before = random_state(random, 1);
  State after = random_state(random, 1);
  *after.memories[0] = *before.memories[0];
  shift_down(after.memories[0].get(), 64 << 16 | 24);
  try_kernel(issued("add.u32 x, taddr, 0x400018;\ntcgen05.shift.cta_group::1.down [x];\n", 1), after, 1, &before);
}

// ---- Products ----
struct Product {
  const char* kind;
  TmmaForm form;
  u32 instruction;     // descriptor
  Format a, b, cells;  // formats of A's and B's images and of tensor memory
  MatrixSwizzle swizzle = MatrixSwizzle::b128;
  bool accumulate = true;
  const char* qualifiers = "";
  std::vector<u32> disabled = {};
  u32 scale_d = 0;
};

constexpr u32 kD = 0, kA = 300, kScaleA = 320, kScaleB = 340;  // columns

u32 small_word(Random& random, Format format) {
  const int bits = std::max(bits_of(format), 8), count = 32 / bits;
  u32 word = 0;
  for (int i = 0; i < count; ++i) {
    const auto x = static_cast<double>(random.between(-4, 4));
    word |= (format == Format::u8      ? static_cast<u32>(random.between(0, 9))
             : format == Format::ue8m0 ? static_cast<u32>(random.between(126, 129))
                                       : code_of(format, x))
            << (bits * i % 32);
  }
  // Formats of 4 and 6 bits use random bits, because all their codes are small.
  return bits_of(format) < 8 ? static_cast<u32>(random.next()) : word;
}

void try_product(Random& random, const Product& c) {
  const TmmaForm& form = c.form;
  const int group = form.group;
  const bool fp4 = form.kind == TmmaKind::mxf4 || form.kind == TmmaKind::mxf4nvf4;
  const bool a_mn = (c.instruction >> 15 & 1) != 0, b_mn = (c.instruction >> 16 & 1) != 0;
  const int n = static_cast<int>(c.instruction >> 17 & 63) * 8, m = static_cast<int>(c.instruction >> 24 & 31) * 16;
  const int k = fp4 ? 64 : bits_of(c.a) < 8 ? 32 : 256 / bits_of(c.a);
  const auto layout = [&](Format format, bool mn_major, int mn) {
    const auto T = static_cast<int>(elements_per_chunk(format, fp4));
    return random_canonical(random, c.swizzle, mn_major, static_cast<u32>((mn_major ? mn : k) / T),
                            static_cast<u32>(mn_major ? k : mn));
  };
  const Canonical a = layout(c.a, a_mn, m / group);
  Canonical b = layout(c.b, b_mn, n / group);
  b.start += 40 * 1024;
  const State before = state_of(
      group, [&](size_t at) { return small_word(random, at < 40 * 1024 ? c.a : c.b); },
      [&](size_t column) {
        return small_word(random, column >= kScaleA ? Format::ue8m0 : column >= kA ? c.a : c.cells);
      });
  State after = random_state(random, group);
  for (size_t cta = 0; cta < static_cast<size_t>(group); ++cta) *after.memories[cta] = *before.memories[cta];

  TmmaOperands o;
  o.d = kD, o.b = b.tcgen05(), o.a = form.a_in_tmem ? kA : a.tcgen05();
  o.instruction = c.instruction, o.accumulate = c.accumulate, o.scale_d = c.scale_d, o.scale_a = kScaleA,
  o.scale_b = kScaleB;
  std::copy(c.disabled.begin(), c.disabled.end(), o.disabled_lanes);
  Tmma mma;
  const Status status = decode(form, o, kBase + kImage, &mma);
  ASSERT_TRUE(status.ok()) << c.kind << ": " << status.message;
  execute(mma, before.window_pointers.data(), after.memory_pointers.data());

  std::string text = "tcgen05.mma" + std::string(form.ws ? ".ws" : "") + ".cta_group::" + std::to_string(group) +
                     ".kind::" + c.kind + c.qualifiers + " [taddr], ";
  std::string setup = descriptor("db", b) + "mov.b32 idesc, " + number(c.instruction) + ";\nsetp.ne.b32 q, " +
                      (c.accumulate ? "1" : "0") + ", 0;\n";
  if (form.a_in_tmem) {
    setup += "add.u32 y, taddr, " + number(kA) + ";\n";
    text += "[y], db, idesc";
  } else {
    setup += descriptor("da", a);
    text += "da, db, idesc";
  }
  if (form.kind >= TmmaKind::mxf8f6f4) {
    setup += "add.u32 v0, taddr, " + number(kScaleA) + ";\nadd.u32 v1, taddr, " + number(kScaleB) + ";\n";
    text += ", [v0], [v1]";
  }
  if (!c.disabled.empty()) {
    text += ", {";
    for (size_t i = 0; i < c.disabled.size(); ++i) {
      setup += "mov.b32 r" + number(i) + ", " + number(c.disabled[i]) + ";\n";
      text += (i == 0 ? "r" : ", r") + number(i);
    }
    text += "}";
  }
  text += c.scale_d != 0 ? ", q, " + number(c.scale_d) + ";\n" : ", q;\n";
  SCOPED_TRACE(text + " descriptor " + number(c.instruction));
  try_kernel(issued(setup + text, group), after, group, &before);
}

// Returns an instruction descriptor of the kinds without scale factors.
u32 plain(u32 d, u32 a, u32 b, int m, int n, u32 more = 0) {
  return d << 4 | a << 7 | b << 10 | static_cast<u32>(n / 8) << 17 | static_cast<u32>(m / 16) << 24 | more;
}
u32 scaled(u32 a, u32 b, int m, int n, u32 more = 0) {
  return a << 7 | b << 10 | static_cast<u32>(n / 8) << 17 | 1u << 23 | static_cast<u32>(m / 128) << 27 | more;
}

TEST(Tcgen05, EveryKind) {
  Random random(5);
  const Format f16 = Format::f16, bf16 = Format::bf16, f32 = Format::f32, tf32 = Format::tf32, e4m3 = Format::e4m3,
               e5m2 = Format::e5m2;
  for (const bool tmem : {false, true}) {
    const auto form = [&](TmmaKind kind, int group, bool ws = false, int vector = 0) {
      return TmmaForm{kind, group, ws, tmem, false, vector};
    };
    try_product(random, {"f16", form(TmmaKind::f16, 1), plain(1, 1, 1, 128, 64), bf16, bf16, f32});
    try_product(random, {"f16", form(TmmaKind::f16, 1), plain(0, 0, 0, 128, 128), f16, f16, f16});
    try_product(random, {"f16", form(TmmaKind::f16, 1), plain(1, 0, 0, 64, 32), f16, f16, f32});
    try_product(random, {"f16", form(TmmaKind::f16, 2), plain(1, 1, 1, 256, 64), bf16, bf16, f32});
    try_product(random, {"f16", form(TmmaKind::f16, 2), plain(1, 1, 1, 128, 96), bf16, bf16, f32});
    try_product(random, {"tf32", form(TmmaKind::tf32, 1), plain(1, 2, 2, 128, 40), tf32, tf32, f32});
    try_product(random, {"f8f6f4", form(TmmaKind::f8f6f4, 1), plain(1, 0, 1, 128, 48), e4m3, e5m2, f32});
    try_product(random, {"f8f6f4", form(TmmaKind::f8f6f4, 2), plain(0, 1, 1, 256, 32), e5m2, e5m2, f16});
    if (!tmem)
      try_product(random,
                  {"f8f6f4", form(TmmaKind::f8f6f4, 1), plain(1, 3, 5, 128, 48), Format::e2m3, Format::e2m1, f32});
    try_product(random, {"i8", form(TmmaKind::i8, 1), plain(2, 1, 1, 128, 32), Format::s8, Format::s8, Format::s8});
    try_product(random, {"i8", form(TmmaKind::i8, 1), plain(2, 0, 1, 64, 16, 8), Format::u8, Format::s8, Format::s8});
    try_product(random, {"f16", form(TmmaKind::f16, 1, true), plain(1, 1, 1, 64, 128), bf16, bf16, f32});
    try_product(random, {"f16", form(TmmaKind::f16, 1, true), plain(1, 1, 1, 32, 64), bf16, bf16, f32,
                         MatrixSwizzle::b64, false, ".collector::b0::fill"});
    try_product(random, {"mxf8f6f4", form(TmmaKind::mxf8f6f4, 1, false, 1), scaled(0, 0, 128, 64), e4m3, e4m3, f32,
                         MatrixSwizzle::b128, true, ".block_scale.scale_vec::1X"});
    try_product(random, {"mxf8f6f4", form(TmmaKind::mxf8f6f4, 2, false, 32), scaled(0, 1, 256, 64, 2u << 4 | 1u << 29),
                         e4m3, e5m2, f32, MatrixSwizzle::b128, true, ".block_scale.block32"});
  }
  const auto form = [&](TmmaKind kind, int vector) { return TmmaForm{kind, 1, false, false, false, vector}; };
  try_product(random, {"mxf4", form(TmmaKind::mxf4, 2), scaled(1, 1, 128, 64, 2u << 4), Format::e2m1, Format::e2m1, f32,
                       MatrixSwizzle::b128, true, ".block_scale.scale_vec::2X"});
  try_product(random, {"mxf4nvf4", form(TmmaKind::mxf4nvf4, 4), scaled(1, 1, 128, 64), Format::e2m1, Format::e2m1, f32,
                       MatrixSwizzle::b128, true, ".block_scale.scale_vec::4X"});
}

TEST(Tcgen05, EveryLayout) {
  Random random(6);
  for (int swizzle = 0; swizzle < 4; ++swizzle)
    for (const u32 major : {0u, 1u, 2u, 3u})
      try_product(random, {"f16",
                           {TmmaKind::f16, 1, false, false, false, 0},
                           plain(1, 1, 1, 128, 96, major << 15),
                           Format::bf16,
                           Format::bf16,
                           Format::f32,
                           static_cast<MatrixSwizzle>(swizzle)});
  try_product(random, {"tf32",
                       {TmmaKind::tf32, 1, false, false, false, 0},
                       plain(1, 2, 2, 128, 64, 3u << 15),
                       Format::tf32,
                       Format::tf32,
                       Format::f32,
                       MatrixSwizzle::b128_atom_32b});
}

TEST(Tcgen05, Options) {
  Random random(7);
  const TmmaForm one = {TmmaKind::f16, 1, false, false, false, 0}, two = {TmmaKind::f16, 2, false, false, false, 0},
                 shifted = {TmmaKind::f16, 1, false, true, true, 0};
  const u32 f16_one = plain(1, 1, 1, 128, 64), f16_two = plain(1, 1, 1, 256, 64);
  const auto base = [&](const TmmaForm& form, u32 instruction) {
    return Product{"f16", form, instruction, Format::bf16, Format::bf16, Format::f32};
  };
  Product c = base(one, f16_one);
  c.disabled = {0xf0f0f0f0, 1, 0x80000000, 0xffff};
  try_product(random, c);
  c = base(two, f16_two);
  c.disabled = {0xff, 0, 0xaaaaaaaa, 3, 0, 0xffffffff, 7, 0x12345678};
  try_product(random, c);
  c = base(one, f16_one);
  c.scale_d = 3;
  try_product(random, c);
  try_product(random, base(one, f16_one | 1u << 13));  // negated A
  try_product(random, base(one, f16_one | 1u << 14));
  c = base(one, f16_one);
  c.accumulate = false;
  try_product(random, c);
  c = base(shifted, f16_one);
  c.qualifiers = ".ashift";
  try_product(random, c);
  for (const char* use : {".collector::a::fill", ".collector::a::discard"}) {
    c = base(one, f16_one);
    c.qualifiers = use;
    try_product(random, c);
  }
}

// Running blocks take over the work of blocks that have not begun: each block's number is written exactly once.
// cluster: clusters of several blocks, which all receive the response.
BenchKernel block_takers(bool cluster) {
  BenchKernel kernel;
  kernel.needs = Needs::blackwell;
  kernel.body = str_cat(R"(
  .reg .b32 t, x, y, z, bar, answer, parity;
  .reg .b64 out, wide;
  .reg .b128 response;
  .reg .pred p, q;
  .shared .align 16 .b8 memory[16];
  .shared .align 8 .b64 barrier;
  ld.param.u64 out, [p0];
  mov.u32 t, %tid.x;
  mov.u32 bar, barrier;
  mov.u32 answer, memory;
  setp.eq.u32 p, t, 0;
  @p mbarrier.init.shared::cta.b64 [bar], 1;
  fence.mbarrier_init.release.cluster;
  bar.sync 0;
  mov.u32 x, %ctaid.x;
  mov.u32 parity, 0;
  next:
  mad.wide.u32 wide, x, 4, out;
  @p red.global.add.u32 [wide], 1;
  @!p bra wait;
  fence.proxy.async.shared::cta;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 16;
  clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes)",
                        cluster ? ".multicast::cluster::all" : "", R"(.b128 [answer], [bar];
  wait:
  mbarrier.try_wait.parity.shared::cta.b64 q, [bar], parity;
  @!q bra wait;
  xor.b32 parity, parity, 1;
  ld.shared.b128 response, [answer];
  clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 q, response;
  @!q bra done;
  clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {x, y, z, _}, response;
  bar.sync 0;
  bra next;
  done:)");
  kernel.grid = {300, 1, 1}, kernel.block = {64, 1, 1};
  kernel.memory = {Memory::inout(std::vector<u32>(300, 0))};
  return kernel;
}

TEST(ClusterLaunchControl, TakesOverBlocks) {
  for (const bool cluster : {false, true})
    on_each(block_takers(cluster), [](const Bench&, const BenchKernel& done) {
      for (size_t i = 0; i < 300; ++i) ASSERT_EQ(done.memory[0].at<u32>(i), 1u) << "block " << i;
    });
}

}  // namespace
}  // namespace tandem::test
