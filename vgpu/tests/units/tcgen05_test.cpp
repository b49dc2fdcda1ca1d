// Tests of tcgen05.mma against a plain product: every kind, data path layout, operand place and option.
#include "vgpu/src/units/tcgen05.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <set>

#include "vgpu/tests/units/window.h"

namespace tandem::vgpu::units {
namespace {

size_t wide(int x) { return static_cast<size_t>(x); }

using test::Random;

// An instruction to test. Omitted properties have their default.
struct Trial {
  TmmaKind kind = TmmaKind::f16;
  int group = 1;
  bool ws = false;
  int m = 128, n = 64;
  Format a = Format::bf16, b = Format::bf16;
  Sum d = Sum::f32;
  bool a_in_tmem = false, shift_a = false;
  bool a_mn_major = false, b_mn_major = false;
  MatrixSwizzle swizzle_a = MatrixSwizzle::b128, swizzle_b = MatrixSwizzle::b128;
  bool accumulate = false, negate_a = false, negate_b = false, saturate = false;
  uint32_t scale_d = 0;
  int base_lane = 0;
  uint32_t disabled[8] = {};
  int scale_vector = 0, scale_a_id = 0, scale_b_id = 0;
  Format scale = Format::ue8m0;
  uint64_t zero_columns = 0;
  int max_shift = 0;  // code

  bool scaled() const { return kind >= TmmaKind::mxf8f6f4; }
  bool fp4() const { return kind == TmmaKind::mxf4 || kind == TmmaKind::mxf4nvf4; }
  int k() const { return fp4() ? 64 : bits_of(a) < 8 ? 32 : 256 / bits_of(a); }
  int block() const { return scale_vector == 4 || scale_vector == 16 ? 16 : 32; }
};

uint32_t code_of_type(TmmaKind kind, Format format) {
  switch (format) {
    case Format::f16: return 0;
    case Format::bf16: return 1;
    case Format::tf32: return 2;
    case Format::u8: return 0;
    case Format::s8: return 1;
    case Format::e4m3: return 0;
    case Format::e5m2: return 1;
    case Format::e2m3: return 3;
    case Format::e3m2: return 4;
    default: return kind == TmmaKind::mxf4 || kind == TmmaKind::mxf4nvf4 ? 1 : 5;  // e2m1
  }
}

// The tables of the instruction descriptor.
uint32_t instruction_of(const Trial& t) {
  uint32_t word = code_of_type(t.kind, t.a) << 7 | code_of_type(t.kind, t.b) << 10 | uint32_t{t.negate_a} << 13 |
                  uint32_t{t.negate_b} << 14 | uint32_t{t.a_mn_major} << 15 | uint32_t{t.b_mn_major} << 16 |
                  static_cast<uint32_t>(t.n / 8) << 17;
  if (t.scaled())
    return word | static_cast<uint32_t>(t.scale_b_id) << 4 | uint32_t{t.scale == Format::ue8m0} << 23 |
           static_cast<uint32_t>(t.m / 128) << 27 | static_cast<uint32_t>(t.scale_a_id) << 29;
  return word | uint32_t{t.saturate} << 3 |
         static_cast<uint32_t>(t.d == Sum::f16   ? 0
                               : t.d == Sum::f32 ? 1
                                                 : 2)
             << 4 |
         static_cast<uint32_t>(t.m / 16) << 24 | static_cast<uint32_t>(t.max_shift) << 30;
}

// The position of D: layouts A to G.
struct ColumnPlace {
  int cta, lane, column;
};
ColumnPlace d_place(const Trial& t, int m, int n) {
  if (t.group == 2 && t.m == 256) return {m / 128, m % 128, n};                    // A
  if (t.group == 2) return {m / 64, m % 64 + 64 * (n >= t.n / 2), n % (t.n / 2)};  // B
  if (t.m == 128) return {0, m, n};                                                // D
  if (t.m == 64 && t.ws) return {0, m + 64 * (n >= t.n / 2), n % (t.n / 2)};       // E
  if (t.m == 64) return {0, m % 16 + 32 * (m / 16) + t.base_lane, n};              // F
  return {0, m + 32 * (n / (t.n / 4)), n % (t.n / 4)};                             // G
}

// Lanes of A's row m in tensor memory: the lanes of D's row, in every copy.
std::vector<std::pair<int, int>> a_lanes(const Trial& t, int m) {
  if (t.group == 2 && t.m == 256) return {{m / 128, m % 128}};
  if (t.group == 2) return {{m / 64, m % 64}, {m / 64, m % 64 + 64}};
  if (t.m == 128) return {{0, m}};
  if (t.m == 64 && t.ws) return {{0, m}, {0, m + 64}};
  if (t.m == 64) return {{0, m % 16 + 32 * (m / 16) + t.base_lane}};
  return {{0, m}, {0, m + 32}, {0, m + 64}, {0, m + 96}};
}

struct Pair {
  std::vector<std::byte> windows[2];
  std::unique_ptr<TensorMemory> memories[2];
  const std::byte* window_pointers[2];
  TensorMemory* memory_pointers[2];
  explicit Pair(Random& random) {
    for (int i = 0; i < 2; ++i) {
      windows[i] = random_bytes(random, kWindowBytes);
      memories[i] = std::make_unique<TensorMemory>();
      for (auto& column : memories[i]->cells)
        for (uint32_t& cell : column) cell = static_cast<uint32_t>(random.next());
      memory_pointers[i] = memories[i].get();
    }
  }
  const std::byte* const* const_windows() {
    for (int i = 0; i < 2; ++i) window_pointers[i] = windows[i].data();
    return window_pointers;
  }
};

constexpr int kD = 0, kA = 300, kScaleA = 320, kScaleB = 336;  // columns

void put_a_in_tmem(const Trial& t, const Plain& a, Pair* pair) {
  const int bits = t.fp4() ? 4 : std::max(bits_of(t.a), 8);
  for (int m = 0; m < t.m; ++m)
    for (const auto& [cta, lane] : a_lanes(t, m))
      for (int k = 0; k < t.k(); ++k) {
        uint32_t code = code_of(t.a, a.at(m, k));
        if (t.a == Format::e2m1 && bits == 8) code <<= 2;
        uint32_t& cell = pair->memories[cta]->cells[kA + k * bits / 32][lane];
        const int shift = k * bits % 32;
        const uint32_t mask = bits == 32 ? ~0u : (1u << bits) - 1;
        cell = (cell & ~(mask << shift)) | code << shift;
      }
}

void put_d(Random& random, const Trial& t, Pair* pair) {
  for (int m = 0; m < t.m; ++m)
    for (int n = 0; n < t.n; ++n) {
      const ColumnPlace p = d_place(t, m, n);
      const auto before = static_cast<double>(random.between(-40, 40));
      uint32_t& cell = pair->memories[p.cta]->cells[kD + p.column][p.lane];
      if (t.d == Sum::s32) cell = static_cast<uint32_t>(static_cast<int32_t>(before));
      if (t.d == Sum::f32) cell = encode(static_cast<float>(before), Format::f32);
      if (t.d == Sum::f16) cell = (cell & 0xffff0000) | encode(static_cast<float>(before), Format::f16);
    }
}

// Scale factors of A's rows and of B's columns, in all quadrants that use them.
struct Scales {
  std::vector<double> a, b;
  int per_row = 0;
};
Scales put_scales(Random& random, const Trial& t, Pair* pair) {
  Scales s;
  s.per_row = t.k() / t.block();
  const auto factor = [&](uint32_t* code) {
    *code = t.scale == Format::ue8m0 ? static_cast<uint32_t>(random.between(125, 129))
                                     : static_cast<uint32_t>(random.between(0x30, 0x47));
    return static_cast<double>(decode(*code, t.scale));
  };
  const auto write = [&](int cta, int lane, int column, int byte, uint32_t code) {
    uint32_t& cell = pair->memories[cta]->cells[column][lane];
    cell = (cell & ~(0xffu << (8 * byte))) | code << (8 * byte);
  };
  const int rows = t.m / t.group;
  const bool halves = t.group == 2 && t.m == 128;  // columns of B in two blocks
  for (int m = 0; m < t.m; ++m)
    for (int block = 0; block < s.per_row; ++block) {
      uint32_t code;
      s.a.push_back(factor(&code));
      for (int quadrant = 0; quadrant < 4; ++quadrant)
        write(m / rows, 32 * quadrant + m % 32, kScaleA + m % rows / 32, t.scale_a_id + block, code);
    }
  for (int n = 0; n < t.n; ++n)
    for (int block = 0; block < s.per_row; ++block) {
      uint32_t code;
      s.b.push_back(factor(&code));
      const int line = halves ? n % (t.n / 2) : n;
      for (int cta = 0; cta < t.group; ++cta)
        for (int quadrant = 0; quadrant < 4; ++quadrant)
          if (!halves || (quadrant >= 2) == (n >= t.n / 2))
            write(cta, 32 * quadrant + line % 32, kScaleB + line / 32, t.scale_b_id + block, code);
    }
  return s;
}

// Returns the columns of B that count as zero, from the mask's description.
std::vector<bool> zero_columns(const Trial& t) {
  std::vector<bool> mask(static_cast<size_t>(t.n), false);
  if ((t.zero_columns >> 39 & 1) == 0) return mask;
  const int parts = 128 / t.m, ones = static_cast<int>(t.zero_columns >> 40 & 0xff) + 1,
            zeros = static_cast<int>(t.zero_columns >> 48 & 0xff) + 1;
  for (int part = 0; part < parts; ++part) {
    const bool first = (t.zero_columns >> (32 + part) & 1) != 0;
    const int skip = static_cast<int>(t.zero_columns >> (8 * part) & 0xff);
    for (int i = 0; i < t.n / parts; ++i) {
      const int at = (i + skip + (first ? 0 : ones)) % (ones + zeros);  // ones lead the cycle
      mask[wide(part * t.n / parts + i)] = at < ones;
    }
  }
  return mask;
}

double read_d(const Trial& t, uint32_t cell) {
  if (t.d == Sum::s32) return static_cast<int32_t>(cell);
  return t.d == Sum::f16 ? decode(cell & 0xffff, Format::f16) : decode(cell, Format::f32);
}

struct Prepared {
  TmmaForm form;
  TmmaOperands operands;
};

Prepared prepare(const Trial& t, const Canonical& a, const Canonical& b) {
  Prepared p;
  p.form = {t.kind, t.group, t.ws, t.a_in_tmem, t.shift_a, t.scale_vector};
  const auto base = static_cast<uint32_t>(t.base_lane) << 16;
  p.operands.d = base | kD;
  p.operands.a = t.a_in_tmem ? base | kA : a.tcgen05();
  p.operands.b = b.tcgen05();
  p.operands.instruction = instruction_of(t);
  std::copy(std::begin(t.disabled), std::end(t.disabled), p.operands.disabled_lanes);
  p.operands.accumulate = t.accumulate;
  p.operands.scale_d = t.scale_d;
  p.operands.scale_a = kScaleA, p.operands.scale_b = kScaleB;
  p.operands.zero_columns = t.zero_columns;
  return p;
}

Canonical layout_for(Random& random, const Trial& t, bool is_a, int mn) {
  const auto T = static_cast<int>(elements_per_chunk(is_a ? t.a : t.b, t.fp4()));
  const bool mn_major = is_a ? t.a_mn_major : t.b_mn_major;
  Canonical c = random_canonical(random, is_a ? t.swizzle_a : t.swizzle_b, mn_major,
                                 static_cast<uint32_t>((mn_major ? mn : t.k()) / T),
                                 static_cast<uint32_t>(mn_major ? t.k() : mn));
  if (!is_a) c.start += 96 * 1024;
  return c;
}

void run(Random& random, const Trial& t) {
  const std::string what = "kind " + std::to_string(static_cast<int>(t.kind)) + " group " + std::to_string(t.group) +
                           (t.ws ? " ws" : "") + " m " + std::to_string(t.m) + " n " + std::to_string(t.n) + " " +
                           name_of(t.a) + " " + name_of(t.b);
  Pair pair(random);
  const int b_shift = static_cast<int>(t.zero_columns >> 56 & 0x3f), b_rows = t.n + (b_shift + 15) / 16 * 16;
  const Plain a = random_plain(random, t.a, t.m, t.k()), b = random_plain(random, t.b, b_rows, t.k());
  const int a_rows = t.m / t.group, b_columns = t.group == 2 ? t.n / 2 : b_rows;
  const Canonical a_layout = layout_for(random, t, true, a_rows), b_layout = layout_for(random, t, false, b_columns);
  for (int cta = 0; cta < t.group; ++cta) {
    const auto part = [&](const Plain& p, int rows) {
      Plain q{rows, p.k, {}};
      q.value.assign(p.value.begin() + cta * rows * p.k, p.value.begin() + (cta + 1) * rows * p.k);
      return q;
    };
    if (!t.a_in_tmem) put(&pair.windows[cta], a_layout, t.a, t.fp4(), part(a, a_rows));
    put(&pair.windows[cta], b_layout, t.b, t.fp4(), part(b, b_columns));
  }
  if (t.a_in_tmem) put_a_in_tmem(t, a, &pair);
  Scales scales;
  if (t.scaled()) scales = put_scales(random, t, &pair);
  if (t.accumulate) put_d(random, t, &pair);

  const Prepared prepared = prepare(t, a_layout, b_layout);
  Tmma mma;
  const Status status = decode(prepared.form, prepared.operands, kWindowBytes, &mma);
  ASSERT_TRUE(status.ok()) << what << ": " << status.message;
  ASSERT_EQ(mma.k, t.k());
  const TensorMemory before[2] = {*pair.memories[0], *pair.memories[1]};
  execute(mma, pair.const_windows(), pair.memory_pointers);

  const std::vector<bool> zero = zero_columns(t);
  std::set<std::pair<int, int>> written[2];
  for (int m = 0; m < t.m; ++m)
    for (int n = 0; n < t.n; ++n) {
      const ColumnPlace p = d_place(t, m, n);
      int32_t cta = -1, lane = -1, cell = -1;
      d_cell(mma, m, n, &cta, &lane, &cell);
      ASSERT_TRUE(cta == p.cta && lane == p.lane && cell == kD + p.column) << what << " cell of " << m << "," << n;
      written[p.cta].insert({p.lane, kD + p.column});
      const uint32_t old = before[p.cta].cells[kD + p.column][p.lane];
      const uint32_t got = pair.memories[p.cta]->cells[kD + p.column][p.lane];
      if ((t.disabled[4 * p.cta + p.lane / 32] >> (p.lane % 32) & 1) != 0) {
        ASSERT_EQ(got, old) << what << " disabled lane " << p.lane;
        continue;
      }
      double sum = t.accumulate ? read_d(t, old) * std::ldexp(1.0, -static_cast<int>(t.scale_d)) : 0;
      const int rows = t.m / t.group;
      const int a_row = t.shift_a && m % rows > 0 ? m - 1 : m;
      for (int k = 0; k < t.k() && !zero[static_cast<size_t>(n)]; ++k) {
        double x = a.at(a_row, k) * b.at(n + b_shift, k) * (t.negate_a ? -1 : 1) * (t.negate_b ? -1 : 1);
        if (t.scaled())
          x *= scales.a[wide(m * scales.per_row + k / t.block())] * scales.b[wide(n * scales.per_row + k / t.block())];
        sum += x;
      }
      if (t.d == Sum::f16) sum = decode(encode(static_cast<float>(sum), Format::f16), Format::f16);
      ASSERT_TRUE(t.d != Sum::f16 || got >> 16 == 0) << what;
      ASSERT_EQ(read_d(t, got), sum) << what << " at " << m << "," << n;
    }
  for (int cta = 0; cta < 2; ++cta) {
    for (int column = 0; column < kTmemColumns; ++column)
      for (int lane = 0; lane < kTmemLanes; ++lane)
        if (written[cta].count({lane, column}) == 0) {
          ASSERT_EQ(pair.memories[cta]->cells[column][lane], before[cta].cells[column][lane])
              << what << " touches lane " << lane << " column " << column;
        }
    if (cta >= t.group) continue;
    std::vector<Range> shared;
    std::vector<CellRange> reads, writes;
    list_ranges(mma, cta, &shared, &reads, &writes);
    std::set<std::pair<int, int>> listed;
    for (const CellRange& range : writes)
      for (int l = 0; l < range.lanes; ++l)
        for (int c = 0; c < range.columns; ++c) listed.insert({range.lane + l, range.column + c});
    ASSERT_EQ(listed, written[cta]) << what;
    ASSERT_EQ(reads.empty(), !t.accumulate && !t.a_in_tmem && !t.scaled());
    ASSERT_FALSE(shared.empty());
  }
}

#define RUN(trial)                 \
  do {                             \
    run(random, trial);            \
    if (HasFatalFailure()) return; \
  } while (false)

// Types of a kind, with the swizzles of their major modes.
struct Kind {
  TmmaKind kind;
  Format a, b;
  Sum d;
};
const Kind kKinds[] = {
    {TmmaKind::f16, Format::bf16, Format::bf16, Sum::f32},    {TmmaKind::f16, Format::f16, Format::f16, Sum::f16},
    {TmmaKind::f16, Format::f16, Format::bf16, Sum::f32},     {TmmaKind::tf32, Format::tf32, Format::tf32, Sum::f32},
    {TmmaKind::f8f6f4, Format::e4m3, Format::e5m2, Sum::f32}, {TmmaKind::f8f6f4, Format::e5m2, Format::e2m1, Sum::f16},
    {TmmaKind::f8f6f4, Format::e2m3, Format::e3m2, Sum::f32}, {TmmaKind::f8f6f4, Format::e2m1, Format::e4m3, Sum::f32},
    {TmmaKind::i8, Format::u8, Format::s8, Sum::s32},         {TmmaKind::i8, Format::s8, Format::s8, Sum::s32}};

struct Data {
  int group;
  bool ws;
  int m, n, base_lane;
};
const Data kLayouts[] = {{1, false, 128, 64, 0}, {1, false, 64, 48, 0},  {1, false, 64, 32, 16},
                         {1, true, 128, 64, 0},  {1, true, 64, 128, 0},  {1, true, 32, 256, 0},
                         {2, false, 256, 64, 0}, {2, false, 128, 96, 0}, {1, false, 128, 256, 0}};

Trial trial_of(const Kind& kind, const Data& data) {
  Trial t;
  t.kind = kind.kind, t.a = kind.a, t.b = kind.b, t.d = kind.d;
  t.group = data.group, t.ws = data.ws, t.m = data.m, t.n = data.n, t.base_lane = data.base_lane;
  return t;
}

MatrixSwizzle swizzle_for(Random& random, Format format, bool mn_major) {
  if (mn_major && bits_of(format) == 32) return MatrixSwizzle::b128_atom_32b;
  return static_cast<MatrixSwizzle>(random.between(0, mn_major ? 3 : 4));
}

TEST(Tcgen05, EveryKindAndDataPathLayout) {
  Random random(1);
  for (const Kind& kind : kKinds)
    for (const Data& data : kLayouts)
      for (int variant = 0; variant < 4; ++variant) {
        Trial t = trial_of(kind, data);
        t.a_in_tmem = (variant & 1) != 0;
        t.accumulate = (variant & 2) != 0;
        t.a_mn_major = !t.a_in_tmem && bits_of(t.a) >= 8 && random.chance(0.5);
        t.b_mn_major = bits_of(t.b) >= 8 && random.chance(0.5);
        if (t.b_mn_major && bits_of(t.b) == 8 && t.n % 32 != 0) t.b_mn_major = false;
        t.swizzle_a = swizzle_for(random, t.a, t.a_mn_major);
        t.swizzle_b = swizzle_for(random, t.b, t.b_mn_major);
        t.negate_a = t.d != Sum::s32 && random.chance(0.3);
        t.negate_b = t.d != Sum::s32 && random.chance(0.3);
        RUN(t);
      }
}

TEST(Tcgen05, EverySwizzleOfBothOperands) {
  Random random(2);
  for (const Kind& kind : {kKinds[0], kKinds[3], kKinds[4]})
    for (const bool mn_major : {false, true})
      for (int swizzle = 0; swizzle < 5; ++swizzle) {
        Trial t = trial_of(kind, kLayouts[0]);
        const auto s = static_cast<MatrixSwizzle>(swizzle);
        if (mn_major && (bits_of(t.a) == 32) != (s == MatrixSwizzle::b128_atom_32b)) continue;
        t.a_mn_major = t.b_mn_major = mn_major;
        t.swizzle_a = t.swizzle_b = s;
        RUN(t);
      }
}

TEST(Tcgen05, EveryN) {
  Random random(3);
  for (int n = 8; n <= 256; n += 8)
    for (const int group : {1, 2}) {
      Trial t;
      t.group = group, t.m = 128 * group, t.n = n;
      if (n % (8 * group) != 0) continue;
      RUN(t);
    }
}

TEST(Tcgen05, DisabledLanesAreNotWritten) {
  Random random(4);
  for (const Data& data : kLayouts) {
    Trial t = trial_of(kKinds[0], data);
    for (uint32_t& mask : t.disabled) mask = static_cast<uint32_t>(random.next());
    if (t.group == 1) std::fill(t.disabled + 4, t.disabled + 8, 0);
    t.accumulate = true;
    RUN(t);
  }
}

TEST(Tcgen05, ScalesD) {
  Random random(5);
  for (const uint32_t scale : {1u, 7u, 15u}) {
    Trial t;
    t.accumulate = true, t.scale_d = scale;
    RUN(t);
    t.kind = TmmaKind::tf32, t.a = t.b = Format::tf32;
    RUN(t);
  }
}

TEST(Tcgen05, ShiftsAInTensorMemory) {
  Random random(6);
  for (const int group : {1, 2}) {
    Trial t;
    t.group = group, t.m = 128 * group, t.a_in_tmem = t.shift_a = true;
    RUN(t);
  }
}

TEST(Tcgen05, BlockScaling) {
  Random random(7);
  struct Case {
    TmmaKind kind;
    Format a, b, scale;
    int vector;
  };
  const Case cases[] = {{TmmaKind::mxf8f6f4, Format::e4m3, Format::e5m2, Format::ue8m0, 0},
                        {TmmaKind::mxf8f6f4, Format::e2m1, Format::e2m3, Format::ue8m0, 1},
                        {TmmaKind::mxf8f6f4, Format::e3m2, Format::e4m3, Format::ue8m0, 32},
                        {TmmaKind::mxf4, Format::e2m1, Format::e2m1, Format::ue8m0, 0},
                        {TmmaKind::mxf4, Format::e2m1, Format::e2m1, Format::ue8m0, 2},
                        {TmmaKind::mxf4nvf4, Format::e2m1, Format::e2m1, Format::ue8m0, 2},
                        {TmmaKind::mxf4nvf4, Format::e2m1, Format::e2m1, Format::ue8m0, 4},
                        {TmmaKind::mxf4nvf4, Format::e2m1, Format::e2m1, Format::ue4m3, 16}};
  for (const Case& c : cases)
    for (int variant = 0; variant < 6; ++variant) {
      Trial t;
      t.kind = c.kind, t.a = c.a, t.b = c.b, t.scale = c.scale, t.scale_vector = c.vector;
      t.group = variant % 3 == 0 ? 1 : 2;
      t.m = variant % 3 == 2 ? 256 : 128;
      t.n = variant < 3 ? 64 : 192;
      t.a_in_tmem = variant % 2 == 1;
      t.accumulate = variant > 2;
      const int per_row = t.k() / t.block();
      t.scale_a_id = per_row * static_cast<int>(random.between(0, 4 / per_row - 1));
      t.scale_b_id = per_row * static_cast<int>(random.between(0, 4 / per_row - 1));
      t.swizzle_a = swizzle_for(random, t.a, false);
      t.swizzle_b = swizzle_for(random, t.b, false);
      t.negate_a = variant == 1;
      RUN(t);
    }
}

// Tests the examples of the zero-column mask descriptor.
TEST(Tcgen05, ZeroColumns) {
  Random random(8);
  const auto descriptor = [](uint64_t starts, uint64_t firsts, uint64_t skip, uint64_t use, uint64_t shift) {
    return starts | firsts << 32 | uint64_t{1} << 39 | skip << 40 | use << 48 | shift << 56;
  };
  Trial t;
  t.ws = true, t.m = 128, t.n = 64;
  t.zero_columns = descriptor(0, 0, 2, 3, 0);
  RUN(t);
  t.m = 64, t.zero_columns = descriptor(0, 1, 2, 3, 0);
  RUN(t);
  t.m = 32, t.n = 128, t.max_shift = 1, t.zero_columns = descriptor(0x01020100, 3, 2, 3, 2);
  RUN(t);
  Tmma mma;
  Canonical layout = layout_for(random, t, true, 32), b = layout_for(random, t, false, 144);
  const Prepared p = prepare(t, layout, b);
  ASSERT_TRUE(decode(p.form, p.operands, kWindowBytes, &mma).ok());
  const auto bits = [&](int part) {
    std::string text;
    for (int i = 13; i >= 0; --i) text += mma.b_zero[wide(32 * part + i)] ? '1' : '0';
    return text;
  };
  EXPECT_EQ(bits(0), "00001110000111");
  EXPECT_EQ(bits(1), "10000111000011");
  EXPECT_EQ(bits(2), "00111000011100");
  EXPECT_EQ(bits(3), "01110000111000");
  EXPECT_EQ(mma.b_shift, 2);
}

TEST(Tcgen05, IntegersSaturateOnlyOnRequest) {
  Random random(9);
  for (const bool saturate : {false, true}) {
    Trial t;
    t.kind = TmmaKind::i8, t.a = t.b = Format::u8, t.d = Sum::s32, t.saturate = saturate, t.accumulate = true;
    Pair pair(random);
    std::fill(pair.windows[0].begin(), pair.windows[0].end(), std::byte{255});
    for (auto& column : pair.memories[0]->cells) std::fill(std::begin(column), std::end(column), INT32_MAX - 9);
    const Prepared p = prepare(t, layout_for(random, t, true, 128), layout_for(random, t, false, 64));
    Tmma mma;
    ASSERT_TRUE(decode(p.form, p.operands, kWindowBytes, &mma).ok());
    execute(mma, pair.const_windows(), pair.memory_pointers);
    const uint32_t wrapped = static_cast<uint32_t>(INT32_MAX) - 9 + 32 * 255 * 255;
    EXPECT_EQ(pair.memories[0]->cells[kD][7], saturate ? static_cast<uint32_t>(INT32_MAX) : wrapped);
  }
}

TEST(Tcgen05, RefusesWhatDoesNotExist) {
  Random random(10);
  struct Case {
    const char* says;
    std::function<void(Trial&)> spoil;
  };
  const Case trials[] = {
      {"M = 0", [](Trial& t) { t.kind = TmmaKind::mxf8f6f4, t.a = t.b = Format::e4m3, t.m = 64; }},
      {"M = 64", [](Trial& t) { t.group = 2, t.m = 64; }},
      {"M = 32", [](Trial& t) { t.m = 32; }},
      {"M = 256", [](Trial& t) { t.m = 256; }},
      {"N = 0", [](Trial& t) { t.n = 0; }},
      {"N = 264", [](Trial& t) { t.n = 264; }},
      {"N = 24", [](Trial& t) { t.group = 2, t.m = 256, t.n = 24; }},
      {"N = 96", [](Trial& t) { t.ws = true, t.n = 96; }},
      {"N = 40", [](Trial& t) { t.kind = TmmaKind::i8, t.a = t.b = Format::s8, t.d = Sum::s32, t.n = 40; }},
      {"N = 24", [](Trial& t) { t.kind = TmmaKind::f8f6f4, t.a = t.b = Format::e4m3, t.n = 24, t.b_mn_major = true; }},
      {"type 1 of A", [](Trial& t) { t.kind = TmmaKind::tf32; }},
      {"type 2 of A", [](Trial& t) { t.a = Format::tf32; }},
      {"type 0 of D", [](Trial& t) { t.d = Sum::f16; }},
      {"type 2 of D", [](Trial& t) { t.d = Sum::s32; }},
      {"saturate", [](Trial& t) { t.saturate = true; }},
      {"negate", [](Trial& t) { t.kind = TmmaKind::i8, t.a = t.b = Format::s8, t.d = Sum::s32, t.negate_b = true; }},
      {"cannot be transposed", [](Trial& t) { t.a_in_tmem = t.a_mn_major = true; }},
      {"must be K-major", [](Trial& t) { t.kind = TmmaKind::f8f6f4, t.a = t.b = Format::e2m3, t.b_mn_major = true; }},
      {"must be K-major", [](Trial& t) { t.kind = TmmaKind::mxf4, t.a = t.b = Format::e2m1, t.a_mn_major = true; }},
      {"cannot have the", [](Trial& t) { t.b_mn_major = true, t.swizzle_b = MatrixSwizzle::b128_atom_32b; }},
      {"32-byte atoms", [](Trial& t) { t.kind = TmmaKind::tf32, t.a = t.b = Format::tf32, t.a_mn_major = true; }},
      {"cta_group::1", [](Trial& t) { t.ws = true, t.group = 2; }},
      {"without block scaling", [](Trial& t) { t.ws = true, t.kind = TmmaKind::mxf4, t.a = t.b = Format::e2m1; }},
      {".ashift needs A in tensor memory", [](Trial& t) { t.shift_a = true; }},
      {".ashift needs M", [](Trial& t) { t.shift_a = t.a_in_tmem = true, t.m = 64; }},
      {"scale vector 4", [](Trial& t) { t.kind = TmmaKind::mxf4, t.a = t.b = Format::e2m1, t.scale_vector = 4; }},
      {"scale vector 0", [](Trial& t) { t.kind = TmmaKind::mxf4nvf4, t.a = t.b = Format::e2m1; }},
      {"scale vector 1", [](Trial& t) { t.scale_vector = 1; }},
      {"ue4m3", [](Trial& t) { t.kind = TmmaKind::mxf4, t.a = t.b = Format::e2m1, t.scale = Format::ue4m3; }},
      {"scale factor ids", [](Trial& t) { t.kind = TmmaKind::mxf4, t.a = t.b = Format::e2m1, t.scale_b_id = 1; }},
      {"scale-input-d", [](Trial& t) { t.scale_d = 16; }},
      {"scale-input-d", [](Trial& t) { t.kind = TmmaKind::f8f6f4, t.a = t.b = Format::e4m3, t.scale_d = 1; }},
      {"lane 16 of D", [](Trial& t) { t.base_lane = 16; }},
      {"maximum shift", [](Trial& t) { t.max_shift = 1; }},
      {"zero-column mask shifts", [](Trial& t) { t.ws = true, t.zero_columns = uint64_t{9} << 56, t.max_shift = 1; }},
      {"zero-column mask", [](Trial& t) { t.zero_columns = uint64_t{1} << 39; }},
  };
  for (const Case& c : trials) {
    Trial t;
    Tmma mma;
    Prepared p = prepare(t, layout_for(random, t, true, 128), layout_for(random, t, false, 64));
    ASSERT_TRUE(decode(p.form, p.operands, kWindowBytes, &mma).ok());
    c.spoil(t);
    p = prepare(t, layout_for(random, t, true, 128), layout_for(random, t, false, 64));
    const Status status = decode(p.form, p.operands, kWindowBytes, &mma);
    EXPECT_FALSE(status.ok()) << c.says;
    EXPECT_NE(status.message.find(c.says), std::string::npos) << status.message << " (wanted: " << c.says << ")";
  }
  // Tests cases that no field of a trial describes.
  const Trial t;
  const Prepared good = prepare(t, layout_for(random, t, true, 128), layout_for(random, t, false, 64));
  const auto refused = [&](const char* says, auto&& spoil) {
    Prepared p = good;
    spoil(p.operands);
    Tmma mma;
    const Status status = decode(p.form, p.operands, kWindowBytes, &mma);
    EXPECT_NE(status.message.find(says), std::string::npos) << status.message << " (wanted: " << says << ")";
  };
  refused("sparse", [](TmmaOperands& o) { o.instruction |= 4; });
  refused("bits 6, 23 and 29", [](TmmaOperands& o) { o.instruction |= 1u << 23; });
  refused("ends beyond tensor memory", [](TmmaOperands& o) { o.d = 449; });
  refused("lane 32 of D", [](TmmaOperands& o) { o.d = 32 << 16; });
  refused("beyond the block's shared memory", [](TmmaOperands& o) { o.b |= 0x3fff; });
  refused("bit 15 of a tcgen05 shared memory descriptor", [](TmmaOperands& o) { o.a |= 1 << 15; });
}

}  // namespace
}  // namespace tandem::vgpu::units
