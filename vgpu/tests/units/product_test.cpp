// Tests of products and the unpacking of chunks, on every instruction set.
#include "vgpu/src/units/product.h"

#include <gtest/gtest.h>

#include <cmath>

#include "vgpu/tests/units/window.h"

namespace tandem::vgpu::units {
namespace {

size_t wide(int x) { return static_cast<size_t>(x); }

using test::Random;

struct Shape {
  int m, n, k;
};
constexpr Shape kShapes[] = {{16, 8, 8}, {16, 64, 16}, {64, 128, 16}, {128, 256, 16}, {256, 16, 64},
                             {7, 5, 3},  {1, 1, 1},    {13, 36, 40},  {64, 8, 32},    {8, 128, 64}};

TEST(Product, MatchesDoubleWithinTheRoundingOfItsSums) {
  Random random(1);
  for (const Shape& s : kShapes)
    for (const bool accumulate : {false, true}) {
      const int64_t a_pitch = s.k + 2, b_pitch = s.n + 3, d_pitch = s.n + 1;
      std::vector<float> a(static_cast<size_t>(s.m * a_pitch)), b(static_cast<size_t>(s.k * b_pitch)),
          before(static_cast<size_t>(s.m * d_pitch));
      // Values of f16, whose products are exact in float32.
      for (auto* list : {&a, &b, &before})
        for (float& x : *list) x = decode(encode(static_cast<float>(random.normal()), Format::f16), Format::f16);
      std::vector<float> first;
      for (const Products* products : all_products()) {
        std::vector<float> d = before;
        products->f32({s.m, s.n, s.k, a.data(), a_pitch, b.data(), b_pitch, d.data(), d_pitch, accumulate});
        if (first.empty()) first = d;
        ASSERT_EQ(d, first) << products->target << " differs from " << all_products()[0]->target;
      }
      for (int i = 0; i < s.m; ++i)
        for (int64_t j = 0; j < d_pitch; ++j) {
          const auto at = static_cast<size_t>(i * d_pitch + j);
          if (j >= s.n) {
            ASSERT_EQ(first[at], before[at]) << "beyond a row";
            continue;
          }
          double sum = accumulate ? static_cast<double>(before[at]) : 0, magnitude = std::fabs(sum);
          for (int k = 0; k < s.k; ++k) {
            const double x = static_cast<double>(a[static_cast<size_t>(i * a_pitch + k)]) *
                             static_cast<double>(b[static_cast<size_t>(k * b_pitch + j)]);
            sum += x, magnitude += std::fabs(x);
          }
          ASSERT_NEAR(first[at], sum, s.k * 0x1p-23 * magnitude) << i << "," << j;
        }
    }
}

TEST(Product, SumsInOrder) {
  // 2^24 + 1 + 1 is 2^24 if the ones are added one after the other.
  const float a[] = {4096, 1, 1}, b[] = {4096, 1, 1};
  for (const Products* products : all_products()) {
    float d = 0;
    products->f32({1, 1, 3, a, 3, b, 1, &d, 1, false});
    EXPECT_EQ(d, 0x1p24f) << products->target;
  }
}

TEST(Product, IntegersWrapOrSaturate) {
  Random random(2);
  for (const Shape& s : kShapes)
    for (const bool accumulate : {false, true})
      for (const bool saturate : {false, true}) {
        std::vector<int32_t> a(static_cast<size_t>(s.m * s.k)), b(static_cast<size_t>(s.k * s.n)),
            before(static_cast<size_t>(s.m * s.n));
        for (auto* list : {&a, &b})
          for (int32_t& x : *list) x = static_cast<int32_t>(random.between(-128, 255));
        for (int32_t& x : before) {
          const auto near = static_cast<int32_t>(random.between(0, 100000));
          x = random.chance(0.3) ? INT32_MAX - near : random.chance(0.5) ? INT32_MIN + near : near;
        }
        for (const Products* products : all_products()) {
          std::vector<int32_t> d = before;
          products->s32({s.m, s.n, s.k, a.data(), s.k, b.data(), s.n, d.data(), s.n, accumulate}, saturate);
          for (int i = 0; i < s.m; ++i)
            for (int j = 0; j < s.n; ++j) {
              int64_t sum = accumulate ? before[wide(i * s.n + j)] : 0;
              for (int k = 0; k < s.k; ++k) sum += int64_t{a[wide(i * s.k + k)]} * b[wide(k * s.n + j)];
              const auto clamped = std::min<int64_t>(std::max<int64_t>(sum, INT32_MIN), INT32_MAX);
              const auto want =
                  saturate ? static_cast<int32_t>(clamped) : static_cast<int32_t>(static_cast<uint32_t>(sum));
              ASSERT_EQ(d[static_cast<size_t>(i * s.n + j)], want) << products->target;
            }
        }
      }
}

TEST(Product, UnpacksChunksOfEveryFormat) {
  Random random(3);
  const std::vector<std::byte> window = random_bytes(random, 4096 * 16);
  for (const Format format : {Format::f32, Format::tf32, Format::f16, Format::bf16, Format::e4m3, Format::e5m2,
                              Format::e2m3, Format::e3m2, Format::e2m1, Format::s8, Format::u8})
    for (const int count : {1, 7, 8, 40})
      for (const bool across : {false, true}) {
        const auto T = static_cast<int>(elements_per_chunk(format, false));
        std::vector<uint32_t> offsets(static_cast<size_t>(count));
        for (uint32_t& offset : offsets) offset = 16 * static_cast<uint32_t>(random.between(0, 4095));
        const int64_t pitch = (across ? count : T) + 1;
        for (const Products* products : all_products()) {
          std::vector<float> to(static_cast<size_t>(pitch * (across ? T : count)), -7);
          std::vector<int32_t> integers(to.size(), -7);
          const bool integer = format == Format::s8 || format == Format::u8;
          const ChunkList chunks = {format, window.data(), offsets.data(), count};
          products->unpack_f32(chunks, across, pitch, to.data());
          if (integer) products->unpack_s32(chunks, across, pitch, integers.data());
          for (int i = 0; i < count; ++i)
            for (int j = 0; j < T; ++j) {
              const auto bits = static_cast<uint32_t>(bits_of(format));
              const uint32_t code =
                  read_bits(window, offsets[static_cast<size_t>(i)], static_cast<uint32_t>(j) * bits, bits);
              const float want = decode(code, format);
              const auto at = static_cast<size_t>(across ? j * pitch + i : i * pitch + j);
              ASSERT_TRUE(to[at] == want || (std::isnan(want) && std::isnan(to[at])))
                  << products->target << name_of(format);
              if (integer) {
                ASSERT_EQ(integers[at], static_cast<int32_t>(want));
              }
            }
          ASSERT_EQ(to.back(), -7) << "the last row's end is nobody's";
        }
      }
}

}  // namespace
}  // namespace tandem::vgpu::units
