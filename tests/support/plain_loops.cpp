#include "support/plain_loops.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace tandem::test {
namespace {

using Doubles [[gnu::vector_size(8 * kLanes)]] = double;
using Floats [[gnu::vector_size(4 * kLanes)]] = float;

// n + 1 steps of the generator at once: factor^(n + 1), and the sum of the addends.
constexpr int64_t kChunk = 64;
struct Steps {
  std::array<uint64_t, kChunk> factor, addend;
};
constexpr Steps steps() {
  Steps s{};
  uint64_t factor = 1, addend = 0;
  for (size_t n = 0; n < kChunk; ++n) {
    factor *= kFactor;
    addend = addend * kFactor + kAddend;
    s.factor[n] = factor;
    s.addend[n] = addend;
  }
  return s;
}
constexpr Steps kSteps = steps();

template <class Vector, class T>
[[gnu::always_inline]] inline void load(Vector& v, const T* from) {
  std::memcpy(&v, from, sizeof v);
}

// Computes kGroups * kLanes rows from row j on, because sums of one group wait for each other.
template <bool rounds, int kGroups>
[[gnu::always_inline]] inline void dots_of_groups(const double* a, const Interleaved& rows, int64_t j, Dot* dots) {
  Doubles sum[kGroups]{}, squares[kGroups]{};
  const double* b = rows.at(j);
  for (int64_t c = 0; c < rows.length(); ++c, b += kLanes) {
    for (int g = 0; g < kGroups; ++g) {
      Doubles with;
      load(with, b + g * kLanes * rows.length());
      const Doubles product = a[c] * with;
      sum[g] += product;
      if (rounds) {
        sum[g] = __builtin_convertvector(__builtin_convertvector(sum[g], Floats), Doubles);
      } else {
        squares[g] += product * product + sum[g] * sum[g];
      }
    }
  }
  for (int64_t g = 0; g < kGroups; ++g) {
    for (int64_t lane = 0; lane < kLanes; ++lane) dots[j + g * kLanes + lane] = {sum[g][lane], squares[g][lane]};
  }
}
template <bool rounds>
[[gnu::always_inline]] inline void dots_of(const double* a, const Interleaved& rows, int64_t begin, int64_t end,
                                           Dot* dots) {
  constexpr int kGroups = 4;
  int64_t j = begin / kLanes * kLanes;
  for (; j + (kGroups - 1) * kLanes < end; j += kGroups * kLanes) dots_of_groups<rounds, kGroups>(a, rows, j, dots);
  for (; j < end; j += kLanes) dots_of_groups<rounds, 1>(a, rows, j, dots);
}
[[gnu::always_inline]] inline void dots(const double* a, const Interleaved& rows, int64_t begin, int64_t end,
                                        Rounding rounding, Dot* to) {
  if (rounding == Rounding::f32) {
    dots_of<true>(a, rows, begin, end, to);
  } else {
    dots_of<false>(a, rows, begin, end, to);
  }
}

// Returns false and changes nothing if a number is exempt.
[[gnu::always_inline]] inline bool add_chunk(double* to, double factor, const double* from, int64_t n,
                                             const Disturbance& by, uint64_t state) {
  double sums[kChunk];
  uint64_t exempt = 0;
  for (int64_t c = 0; c < n; ++c) {  // scalar: the compiler splits vector comparisons
    const double x = to[c] + factor * from[c];
    const auto bits = std::bit_cast<uint64_t>(x);
    const double magnitude = std::bit_cast<double>(bits & (~uint64_t{0} >> 1));
    exempt |= uint64_t{!(magnitude < by.largest)} | uint64_t{magnitude == 0};
    const auto at = static_cast<size_t>(c);
    const uint64_t drawn = state * kSteps.factor[at] + kSteps.addend[at];
    const double unit = 2 * std::bit_cast<double>(drawn >> 12 | uint64_t{1023} << 52) - 3;
    const double half = std::bit_cast<double>(bits & uint64_t{0x7ff} << 52) * by.half_unit;
    sums[c] = x + (half < by.least ? by.least : half) * unit;
  }
  if (exempt != 0) return false;
  std::memcpy(to, sums, static_cast<size_t>(n) * sizeof *sums);
  return true;
}
[[gnu::always_inline]] inline int64_t add_scaled(double* to, double factor, const double* from, int64_t n,
                                                 const Disturbance& by, uint64_t* state) {
  int64_t c = 0;
  while (c + kLanes <= n) {
    const int64_t now = std::min(kChunk, (n - c) / kLanes * kLanes);
    if (!add_chunk(to + c, factor, from + c, now, by, *state)) break;
    *state = *state * kSteps.factor[static_cast<size_t>(now - 1)] + kSteps.addend[static_cast<size_t>(now - 1)];
    c += now;
  }
  return c;
}

[[gnu::always_inline]] inline void add_rounded(double* to, double factor, const double* from, int64_t n) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    Doubles sum, with;
    load(sum, to + c);
    load(with, from + c);
    sum = __builtin_convertvector(__builtin_convertvector(sum + factor * with, Floats), Doubles);
    std::memcpy(to + c, &sum, sizeof sum);
  }
  for (; c < n; ++c) to[c] = static_cast<float>(to[c] + factor * from[c]);
}

#if defined(__x86_64__)
[[gnu::target("arch=x86-64-v4")]] void dots_v4(const double* a, const Interleaved& rows, int64_t begin, int64_t end,
                                               Rounding rounding, Dot* to) {
  dots(a, rows, begin, end, rounding, to);
}
[[gnu::target("arch=x86-64-v4")]] void add_rounded_v4(double* to, double factor, const double* from, int64_t n) {
  add_rounded(to, factor, from, n);
}
[[gnu::target("arch=x86-64-v4")]] int64_t add_scaled_v4(double* to, double factor, const double* from, int64_t n,
                                                        const Disturbance& by, uint64_t* state) {
  return add_scaled(to, factor, from, n, by, state);
}
[[gnu::target("arch=x86-64-v3")]] void dots_v3(const double* a, const Interleaved& rows, int64_t begin, int64_t end,
                                               Rounding rounding, Dot* to) {
  dots(a, rows, begin, end, rounding, to);
}
[[gnu::target("arch=x86-64-v3")]] void add_rounded_v3(double* to, double factor, const double* from, int64_t n) {
  add_rounded(to, factor, from, n);
}
[[gnu::target("arch=x86-64-v3")]] int64_t add_scaled_v3(double* to, double factor, const double* from, int64_t n,
                                                        const Disturbance& by, uint64_t* state) {
  return add_scaled(to, factor, from, n, by, state);
}
#endif
void dots_generic(const double* a, const Interleaved& rows, int64_t begin, int64_t end, Rounding rounding, Dot* to) {
  dots(a, rows, begin, end, rounding, to);
}
void add_rounded_generic(double* to, double factor, const double* from, int64_t n) { add_rounded(to, factor, from, n); }
int64_t add_scaled_generic(double* to, double factor, const double* from, int64_t n, const Disturbance& by,
                           uint64_t* state) {
  return add_scaled(to, factor, from, n, by, state);
}

}  // namespace

void Interleaved::set(const std::vector<std::vector<double>>& rows, int64_t length) {
  count_ = static_cast<int64_t>(rows.size());
  length_ = length;
  numbers_.assign(static_cast<size_t>((count_ + kLanes - 1) / kLanes * kLanes * length), 0);
  for (int64_t j = 0; j < count_; ++j) {
    double* to = numbers_.data() + j / kLanes * kLanes * length + j % kLanes;
    for (int64_t c = 0; c < length; ++c) to[c * kLanes] = rows[static_cast<size_t>(j)][static_cast<size_t>(c)];
  }
}

const std::vector<Loops>& all_loops() {
  static const std::vector<Loops> all = [] {
    std::vector<Loops> here;
#if defined(__x86_64__)
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (v4) here.push_back({dots_v4, add_rounded_v4, add_scaled_v4});
    if (v3) here.push_back({dots_v3, add_rounded_v3, add_scaled_v3});
#endif
    here.push_back({dots_generic, add_rounded_generic, add_scaled_generic});
    return here;
  }();
  return all;
}

}  // namespace tandem::test
