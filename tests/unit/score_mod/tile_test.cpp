// Compares the loops over tiles with the operations on one element at a time.
#include "score_mod/tile.h"

#include <bit>
#include <cmath>

#include "base/instruction_set.h"
#include "unit/score_mod/texts.h"

namespace tandem::score_mod {
extern const TileLoops tile_loops_generic;
#if defined(__x86_64__)
extern const TileLoops tile_loops_avx2, tile_loops_avx512;
#endif
}  // namespace tandem::score_mod

namespace tandem::score_mod::test {
namespace {

std::vector<const TileLoops*> all_loops() {
  std::vector<const TileLoops*> all = {&tile_loops_generic};
#if defined(__x86_64__)
  for (const auto set : instruction_sets()) {
    if (set == "avx2") all.push_back(&tile_loops_avx2);
    if (set == "avx512") all.push_back(&tile_loops_avx512);
  }
#endif
  return all;
}

float float_of(double x) { return static_cast<float>(x); }

// Returns the number of floats between a and b; 0 for equal ones, also for two NaN.
int64_t steps_between(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b) ? 0 : INT64_MAX;
  const auto line = [](float x) {
    const auto bits = std::bit_cast<int32_t>(x);
    return bits < 0 ? -static_cast<int64_t>(bits & INT32_MAX) : static_cast<int64_t>(bits);
  };
  return std::abs(line(a) - line(b));
}

const float kFloats[] = {
    0.0f,          -0.0f,      1.0f,     -1.0f,     0.5f,    -0.5f,      1.5f,     2.5f,          -2.5f,
    1e-3f,         -1e-3f,     9.99e-4f, 1e-30f,    -1e-40f, 3.4e38f,    -3.4e38f, 2147483648.0f, -2147483648.0f,
    2147483520.0f, 88.7f,      -87.3f,   -103.9f,   127.9f,  128.0f,     -149.0f,  -150.5f,       0.70710677f,
    0.99999994f,   1.0000001f, INFINITY, -INFINITY, NAN,     3.1415927f, -7.0f,    3.0f,          1e-45f};
const int32_t kInts[] = {0,
                         1,
                         -1,
                         2,
                         -2,
                         3,
                         7,
                         -7,
                         8,
                         31,
                         32,
                         33,
                         -31,
                         64,
                         100,
                         65535,
                         65536,
                         46341,
                         INT32_MAX,
                         INT32_MIN,
                         INT32_MAX - 1,
                         INT32_MIN + 1};

TEST(Tile, floats_of_every_operation) {
  for (const TileLoops* loops : all_loops()) {
    for (int number = 0; number < kOps; ++number) {
      const auto op = static_cast<Op>(number);
      const Loop loop = loops->loops[number][2];
      if (loop == nullptr || op == Op::select) continue;
      std::vector<float> a, b, c;
      for (const float x : kFloats) {
        for (const float y : kFloats) a.push_back(x), b.push_back(y), c.push_back(y > 0 ? y + 1 : x * 2);
      }
      for (size_t begin = 0; begin < a.size(); begin += kTile) {
        const int count = static_cast<int>(std::min<size_t>(kTile, a.size() - begin));
        float to[kTile];
        loop({count, to, {a.data() + begin, b.data() + begin, c.data() + begin, nullptr}, nullptr});
        for (int i = 0; i < count; ++i) {
          const size_t at = begin + static_cast<size_t>(i);
          const Value<double> wide[3] = {{a[at], 0}, {b[at], 0}, {c[at], 0}};
          const Value<float> narrow[3] = {{a[at], 0}, {b[at], 0}, {c[at], 0}};
          const bool approximated = op >= Op::exp && op <= Op::sigmoid;
          const bool to_int = op == Op::to_int || (op >= Op::less && op <= Op::not_equal);
          if (to_int) {
            EXPECT_EQ(std::bit_cast<int32_t>(to[i]), apply(op, Type::real, narrow).integer)
                << name_of(op) << " " << a[at] << " " << b[at];
            continue;
          }
          // Functions are correctly rounded except for their error of 1e-11, so they are rarely one step off.
          const float wanted =
              approximated ? float_of(apply(op, Type::real, wide).real) : apply(op, Type::real, narrow).real;
          EXPECT_LE(steps_between(to[i], wanted), approximated ? 1 : 0)
              << loops->name << " " << name_of(op) << " " << a[at] << " " << b[at] << " " << c[at] << ": " << to[i]
              << ", not " << wanted;
        }
      }
    }
  }
}

TEST(Tile, ints_of_every_operation) {
  for (const TileLoops* loops : all_loops()) {
    for (const int type : {0, 1}) {
      for (int number = 0; number < kOps; ++number) {
        const auto op = static_cast<Op>(number);
        const Loop loop = loops->loops[number][type];
        if (loop == nullptr || op == Op::select) continue;
        std::vector<int32_t> a, b;
        for (const int32_t x : kInts) {
          for (const int32_t y : kInts) a.push_back(type == 0 ? x & 1 : x), b.push_back(type == 0 ? y & 1 : y);
        }
        for (size_t begin = 0; begin < a.size(); begin += kTile) {
          const int count = static_cast<int>(std::min<size_t>(kTile, a.size() - begin));
          int32_t to[kTile];
          loop({count, to, {a.data() + begin, b.data() + begin, nullptr, nullptr}, nullptr});
          for (int i = 0; i < count; ++i) {
            const size_t at = begin + static_cast<size_t>(i);
            const Value<float> operands[3] = {{0, a[at]}, {0, b[at]}, {}};
            const Value<float> wanted = apply(op, static_cast<Type>(type), operands);
            const int32_t bits = op == Op::to_real ? std::bit_cast<int32_t>(wanted.real) : wanted.integer;
            EXPECT_EQ(to[i], bits) << loops->name << " " << name_of(op) << " " << a[at] << " " << b[at];
          }
        }
      }
    }
  }
}

TEST(Tile, reads_every_type_of_element) {
  const double f64[] = {1.5, -2, 1e300};
  const uint16_t bf16[] = {0x3fc0, 0xc000, 0x7f80}, f16[] = {0x3e00, 0x0001, 0xfc00};
  const int64_t i64[] = {5, int64_t{1} << 40, -(int64_t{1} << 40)};
  const uint8_t bytes[] = {0, 1, 7};
  const auto expect = [](const void* data, Element element, std::vector<double> wanted) {
    const TensorView tensor = Bound::view(data, element, {3});
    const int32_t index[] = {0, 1, 2};
    for (const TileLoops* loops : all_loops()) {
      float to[3];
      loops->gathers[static_cast<int>(element)]({3, to, {index, nullptr, nullptr, nullptr}, &tensor});
      for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(type_of(element) == Type::real ? to[i] : std::bit_cast<int32_t>(to[i]),
                  float_of(wanted[static_cast<size_t>(i)]));
        if (element != Element::f64) {
          EXPECT_EQ(read(tensor, i), wanted[static_cast<size_t>(i)]);
        }
      }
    }
  };
  expect(f64, Element::f64, {1.5, -2, INFINITY});
  expect(bf16, Element::bf16, {1.5, -2, INFINITY});
  expect(f16, Element::f16, {1.5, 0x1p-24, -INFINITY});
  expect(i64, Element::i64, {5, INT32_MAX, INT32_MIN});
  expect(bytes, Element::boolean, {0, 1, 1});
}

}  // namespace
}  // namespace tandem::score_mod::test
