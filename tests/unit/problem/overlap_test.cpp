// Compares overlap() with a count of bytes.
#include <gtest/gtest.h>

#include <vector>

#include "problem/operands.h"
#include "support/random.h"

namespace tandem::test {
namespace {

constexpr int64_t kBytes = 4096;

Operand random_view(Random& random, std::byte* memory) {
  Operand o;
  o.present = true;
  o.dtype = random.chance(0.5) ? DType::f32 : DType::bf16;
  o.rank = static_cast<int>(random.between(1, 4));
  int64_t last = 0, first = 0;
  for (int i = 0; i < o.rank; ++i) {
    o.shape[i] = random.between(1, 4);
    o.stride[i] = o.shape[i] == 1 ? 0 : random.chance(0.5) ? random.between(0, 9) : 6 * random.between(0, 6);
    if (random.chance(0.3)) o.stride[i] = -o.stride[i];
    (o.stride[i] < 0 ? first : last) += (o.shape[i] - 1) * o.stride[i];
  }
  o.bytes = (last - first + 1) * size_of(o.dtype);
  o.below = -first * size_of(o.dtype);
  o.data = memory + o.below + random.between(0, random.chance(0.5) ? 40 : 600);
  return o;
}

std::vector<bool> bytes_of(const Operand& o, const std::byte* memory) {
  std::vector<bool> touched(kBytes);
  for (int64_t n = 0;
       n < o.shape[0] * (o.rank > 1 ? o.shape[1] : 1) * (o.rank > 2 ? o.shape[2] : 1) * (o.rank > 3 ? o.shape[3] : 1);
       ++n) {
    int64_t at = 0, rest = n;
    for (int i = o.rank - 1; i >= 0; --i) {
      at += rest % o.shape[i] * o.stride[i];
      rest /= o.shape[i];
    }
    for (int64_t byte = 0; byte < size_of(o.dtype); ++byte) {
      touched[static_cast<size_t>(o.data - memory + at * size_of(o.dtype) + byte)] = true;
    }
  }
  return touched;
}

TEST(Overlap, AgreesWithCounting) {
  std::vector<std::byte> memory(kBytes);
  Random random(11);
  int shared = 0;
  constexpr int trials = 20000;
  for (int trial = 0; trial < trials; ++trial) {
    const Operand a = random_view(random, memory.data()), b = random_view(random, memory.data());
    const std::vector<bool> in_a = bytes_of(a, memory.data()), in_b = bytes_of(b, memory.data());
    bool meet = false;
    for (size_t i = 0; i < in_a.size(); ++i) meet |= in_a[i] && in_b[i];
    shared += meet;
    ASSERT_EQ(overlap(a, b), meet) << "trial " << trial;
    ASSERT_EQ(overlap(b, a), meet) << "trial " << trial;
  }
  EXPECT_GT(shared, trials / 10);  // both results occur
  EXPECT_LT(shared, trials * 9 / 10);
}

// overlap() assumes an overlap for views that are too complex.
TEST(Overlap, GivesUpSafely) {
  Operand a, b;
  a.present = b.present = true;
  a.rank = b.rank = 4;
  std::vector<std::byte> memory(1 << 20);
  a.data = memory.data();
  b.data = memory.data() + 4;
  const int64_t sizes[] = {40, 40, 40, 40}, strides[] = {2, 6, 10, 14};
  for (int i = 0; i < 4; ++i) {
    a.shape[i] = b.shape[i] = sizes[i];
    a.stride[i] = strides[i];
    b.stride[i] = strides[i] + 2;
  }
  a.bytes = b.bytes = 1 << 19;
  EXPECT_TRUE(overlap(a, b));
}

}  // namespace
}  // namespace tandem::test
