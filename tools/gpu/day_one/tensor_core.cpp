// E1 to E4 and E10: products one by one with integer operands, their order, and commits.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <stdexcept>

#include "base/text.h"
#include "lab.h"

namespace tandem::day_one {
namespace {

constexpr int kGuard = 16;  // as in kernels/product.cuh
constexpr float kUntouched = -77;
constexpr unsigned kSmemBytes = 32768 + 65536;

// As in kernels/operands.cuh.
struct Swizzle {
  int row_bytes = 128, mask = 0x70;
};
constexpr Swizzle k64Bytes{64, 0x30};

// The parameters and the words of kernels/product.cuh.
struct Parameters {
  int m, n, k;
  int a_in_tmem, a_by_columns, b_by_columns, f16;
  Swizzle b_swizzle;
  int column, columns, repeat, arrivals, limit, run, n_added;
  uint64_t flipped;
};
struct Seen {
  uint32_t instr_desc, a_high, a_low, b_high, b_low;
  int signalled, clocks;
};

// instr_desc: as CUTLASS' make_instr_desc compiles it.
struct Row {
  const char* name;
  int ctas, m, n;
  bool a_in_tmem, a_by_columns, b_by_columns, f16;
  int column;
  uint32_t instr_desc;
  int k = 128;
  Swizzle b_swizzle = {};
};
constexpr Row kOneCta[] = {
    {"S = K Q", 1, 128, 128, false, false, false, false, 256, 0x08200490},
    {"S = K Q in float16", 1, 128, 128, false, false, false, true, 256, 0x08200010},
    {"dV += P dO", 1, 128, 128, true, false, true, false, 256, 0x08210490},
    {"O += P V, 64 columns", 1, 128, 64, true, false, true, false, 320, 0x08110490},
    {"dQ = dS K", 1, 128, 128, false, true, true, false, 128, 0x08218490},
    {"dQ = dS K, 64 columns", 1, 128, 64, false, true, true, false, 448, 0x08118490},
};
constexpr Row kTwoCtas[] = {
    {"S = K Q", 2, 256, 128, false, false, false, false, 256, 0x10200490},
    {"dV += P dO", 2, 256, 128, true, false, true, false, 256, 0x10210490},
    {"O += P V, 256 columns", 2, 256, 256, true, false, true, false, 256, 0x10410490},
    {"dQ = dS K, 128 rows", 2, 128, 128, false, true, true, false, 64, 0x08218490},
};
constexpr Row kExactOneCta[] = {
    {"N 80 at column 336", 1, 128, 80, true, false, true, false, 336, 0x08150490},
    {"N 96", 1, 128, 96, true, false, true, false, 256, 0x08190490},
    {"N 112", 1, 128, 112, true, false, true, false, 400, 0x081d0490},
    {"N 48", 1, 128, 48, true, false, true, false, 256, 0x080d0490},
    {"dQ of N 80", 1, 128, 80, false, true, true, false, 416, 0x08158490},
    {"dQ of N 112", 1, 128, 112, false, true, true, false, 128, 0x081d8490},
};
constexpr Row kExactTwoCtas[] = {
    {"N 96, 48 in each CTA", 2, 256, 96, true, false, true, false, 256, 0x10190490},
    {"N 160, 80 in each CTA", 2, 256, 160, true, false, true, false, 256, 0x10290490},
    {"N 192, 96 in each CTA", 2, 256, 192, true, false, true, false, 256, 0x10310490},
};
// The products of two_cta_ring() whose operand has blocks of 32 columns.
constexpr Row k64ByteSwizzle[] = {
    {"dK += dS Q, 32 columns in each CTA", 2, 256, 64, true, false, true, false, 320, 0x10110490, 128, k64Bytes},
    {"dQ = dS K, 96 columns in each CTA", 2, 128, 192, false, true, true, false, 96, 0x08318490, 256, k64Bytes},
};

uint16_t element(int x, bool f16) {
  if (!f16) return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(x)) >> 16);
  if (x == 0) return 0;
  const int exponent = std::bit_width(static_cast<unsigned>(x)) - 1;
  return static_cast<uint16_t>((15 + exponent) << 10 | (x << (10 - exponent) & 0x3ff));
}
// Integers from 0 to 7 that differ between neighbours in both dimensions.
int number(int line, int k, int seed) { return static_cast<int>((line * 7919u + k * 104729u + seed * 31u) >> 3 & 7); }

class ProductTest {
 public:
  ProductTest(Lab& lab, const Row& row)
      : lab_(lab),
        row_(row),
        columns_(row.m / row.ctas == 64 ? row.n / 2 : row.n),
        p_{row.m,
           row.n,
           row.k,
           row.a_in_tmem,
           row.a_by_columns,
           row.b_by_columns,
           row.f16,
           row.b_swizzle,
           row.column,
           columns_,
           1,
           1,
           lab.polls(),
           0,
           0,
           0} {
    if (lab.plants("n")) p_.n_added = 16;
    if (lab.plants("descriptor")) p_.flipped = uint64_t{1} << 33;
    if (lab.plants("barrier")) p_.arrivals = 2;
    if (lab.plants("swizzle")) p_.b_swizzle.mask = 0x70;
  }

  // Returns what is wrong, or nothing.
  std::string run() {
    std::vector<uint16_t> a, b;
    for (int i = 0; i < row_.m; ++i)
      for (int k = 0; k < p_.k; ++k) a.push_back(element(number(i, k, 1), row_.f16));
    for (int j = 0; j < row_.n; ++j)
      for (int k = 0; k < p_.k; ++k) b.push_back(element(number(j, k, 2), row_.f16));
    const GpuBuffer a_at(lab_.gpu(), "a", a), b_at(lab_.gpu(), "b", b);
    const GpuBuffer dump(lab_.gpu(), "dump", static_cast<size_t>(row_.ctas) * 128 * width() * 4, true);
    const GpuBuffer seen(lab_.gpu(), "seen", sizeof(Seen), true);
    // Returns the device's error. After an error a virtual GPU's memory has what the kernel stored.
    const auto launch = [&]() -> std::string {
      std::string error;
      void *a_p = a_at.address(), *b_p = b_at.address(), *dump_p = dump.address(), *seen_p = seen.address();
      try {
        lab_.launch("product.cuh", "product", row_.ctas,
                    {.blocks = static_cast<unsigned>(row_.ctas), .dynamic_smem_bytes = kSmemBytes},
                    {&a_p, &b_p, &dump_p, &seen_p, &p_}, {&a_at, &b_at, &dump, &seen});
      } catch (const std::runtime_error& failure) {
        error = failure.what();
      }
      seen_ = seen.read<Seen>().front();
      return error;
    };
    if (const std::string error = launch(); !error.empty()) return error;
    if (const std::string wrong = check_words(); !wrong.empty()) return wrong;
    p_.run = 1;
    const std::string error = launch();
    if (seen_.instr_desc != 0 && seen_.signalled == 0)
      return str_cat("the commit's barrier, which expects ", p_.arrivals,
                     " arrival(s), received fewer in time: barrier count or commit", error.empty() ? "" : "; ", error);
    if (!error.empty()) return error;
    return check_dump(dump.read<float>());
  }
  // Issues the product many times, and returns the clocks of one.
  double clocks(int repeat) {
    p_.repeat = repeat;
    const std::string wrong = run();
    if (!wrong.empty()) throw std::runtime_error(str_cat(row_.name, ": ", wrong));
    return static_cast<double>(seen_.clocks) / repeat;
  }

 private:
  int width() const { return columns_ + 2 * kGuard; }
  static std::string hex(uint32_t x) {
    char text[16];
    std::snprintf(text, sizeof text, "%08x", x);
    return text;
  }
  std::string check_words() const {
    const auto low = [&](bool by_columns, int row_bytes) {
      return by_columns ? static_cast<uint32_t>(p_.k * row_bytes / 16) << 16 : 0u;
    };
    if (seen_.instr_desc != row_.instr_desc)
      return str_cat("instruction descriptor ", hex(seen_.instr_desc), " must be ", hex(row_.instr_desc), " (N is ",
                     (seen_.instr_desc >> 17 & 63) * 8, ", must be ", row_.n, ")");
    for (const auto& [name, high, its_low, by_columns, row_bytes] :
         {std::tuple("a", seen_.a_high, seen_.a_low, row_.a_by_columns, 128),
          std::tuple("b", seen_.b_high, seen_.b_low, row_.b_by_columns, row_.b_swizzle.row_bytes)}) {
      const uint32_t right_high = row_bytes == 128 ? 0x40004040 : 0x80004020, right_low = low(by_columns, row_bytes);
      if (high != right_high || its_low != right_low)
        return str_cat("shared memory descriptor of ", name, " is ", hex(high), hex(its_low),
                       " without its address, must be ", hex(right_high), hex(right_low));
    }
    return "";
  }
  // The element (row, column) of lane and column of a CTA. A pair of 128 rows has half of the columns in lanes 64 to
  // 127.
  float expected(int cta, int lane, int column) const {
    int row = cta * 128 + lane;
    if (row_.m / row_.ctas == 64) {
      row = cta * 64 + lane % 64;
      column += lane / 64 * columns_;
    }
    int sum = 0;
    for (int k = 0; k < p_.k; ++k) sum += number(row, k, 1) * number(column, k, 2);
    return static_cast<float>(sum);
  }
  std::string check_dump(const std::vector<float>& dump) const {
    int wrong = 0, untouched = 0, outside = 0;
    std::string first;
    for (int cta = 0; cta < row_.ctas; ++cta) {
      for (int lane = 0; lane < 128; ++lane) {
        for (int c = -kGuard; c < columns_ + kGuard; ++c) {
          const float x = dump[static_cast<size_t>((cta * 128 + lane) * width() + kGuard + c)];
          const bool inside = c >= 0 && c < columns_;
          const float right = inside ? expected(cta, lane, c) : kUntouched;
          if (x == right) continue;
          if (wrong++ == 0)
            first = str_cat("first CTA ", cta, " lane ", lane, " column ", c, ": ", x, " must be ", right);
          untouched += inside && x == kUntouched;
          outside += !inside;
        }
      }
    }
    if (wrong == 0) return "";
    print(dump);
    return str_cat(wrong, " of ", row_.ctas * 128 * columns_, " sums are wrong (", untouched, " not written, ", outside,
                   " written outside), ", first);
  }

  // Prints the whole result, with the guards, to the log.
  void print(const std::vector<float>& dump) const {
    for (size_t line = 0; line * width() < dump.size(); ++line) {
      std::printf("%s: CTA %zu lane %zu:", row_.name, line / 128, line % 128);
      for (int c = 0; c < width(); ++c) std::printf(" %g", dump[line * width() + c]);
      std::printf("\n");
    }
  }

  Lab& lab_;
  const Row row_;
  const int columns_;
  Parameters p_;
  Seen seen_{};
};

Outcome not_blackwell() { return {Verdict::skipped, "only Blackwell has tcgen05 products"}; }

template <size_t n>
Outcome products(Lab& lab, const Row (&rows)[n]) {
  if (!lab.is_blackwell()) return not_blackwell();
  std::string failures;
  for (const Row& row : rows) {
    std::string wrong;
    try {
      wrong = ProductTest(lab, row).run();
    } catch (const std::runtime_error& error) {
      wrong = error.what();
    }
    std::printf("%s: %s\n", row.name, wrong.empty() ? "right" : wrong.c_str());
    std::fflush(stdout);
    if (!wrong.empty() && failures.empty()) failures = str_cat(row.name, ": ", wrong);
  }
  if (!failures.empty()) return {Verdict::failed, failures};
  return {Verdict::ok, str_cat(n, " products: every sum and every word of their descriptors is right")};
}

// As in kernels/order.cuh.
struct OrderParameters {
  int n, m_scores, scores;
  Swizzle b_swizzle;
  int iterations, limit, reversed;
};
struct OrderShape {
  int ctas, n, scores;
  int m_scores = 128;
  Swizzle b_swizzle = {};
};

// Compares the sums of P b over all iterations with integers.
std::string order_of(Lab& lab, const OrderShape& shape) {
  const int ctas = shape.ctas, n = shape.n;
  constexpr int kInner = 128, kRows = 256, kTurns = 8;
  const OrderParameters o{n,           shape.m_scores,     shape.scores, shape.b_swizzle, lab.count(1000, 3),
                          lab.polls(), lab.plants("order")};
  std::vector<uint16_t> p, b, s(128 * 64, element(1, false));
  for (int i = 0; i < kTurns * kRows; ++i)
    for (int k = 0; k < kInner; ++k) p.push_back(element(number(i, k, 3), false));
  for (int j = 0; j < n; ++j)
    for (int k = 0; k < kInner; ++k) b.push_back(element(number(j, k, 4), false));
  std::vector<float> expected(static_cast<size_t>(ctas * 128 * n));
  for (int turn = 0; turn < std::min(kTurns, o.iterations); ++turn) {
    const int times = (o.iterations - turn + kTurns - 1) / kTurns;
    for (int row = 0; row < ctas * 128; ++row) {
      for (int j = 0; j < n; ++j) {
        int sum = 0;
        for (int k = 0; k < kInner; ++k) sum += number(turn * kRows + row, k, 3) * number(j, k, 4);
        expected[static_cast<size_t>(row * n + j)] += static_cast<float>(times * sum);
      }
    }
  }
  const GpuBuffer p_at(lab.gpu(), "p", p), b_at(lab.gpu(), "b", b), s_at(lab.gpu(), "s", s),
      expected_at(lab.gpu(), "expected", expected), wrong(lab.gpu(), "wrong", 4, true);
  void *p_p = p_at.address(), *b_p = b_at.address(), *s_p = s_at.address(), *expected_p = expected_at.address(),
       *wrong_p = wrong.address();
  const auto blocks = static_cast<unsigned>(ctas * lab.count(70, 1));
  for (int i = 0; i < lab.count(100, 1); ++i)
    lab.launch("order.cuh", "order", ctas, {.blocks = blocks, .dynamic_smem_bytes = kSmemBytes},
               {&p_p, &b_p, &s_p, &expected_p, &wrong_p, const_cast<OrderParameters*>(&o)},
               {&p_at, &b_at, &s_at, &expected_at, &wrong});
  const int count = wrong.read<int>().front();
  return count == 0 ? ""
                    : str_cat(count, " sums are wrong: scores overwrote P before the product of ", n,
                              " columns had read it (order of products)");
}

Outcome order(Lab& lab) {
  if (!lab.is_blackwell()) return not_blackwell();
  // The last shape is dK of two_cta_ring() with dQ, which overwrites dS.
  for (const OrderShape& shape : {OrderShape{1, 128, 128}, OrderShape{1, 64, 128}, OrderShape{1, 128, 64},
                                  OrderShape{2, 128, 128}, OrderShape{2, 64, 192, 64, k64Bytes}}) {
    std::string wrong;
    try {
      wrong = order_of(lab, shape);
    } catch (const std::runtime_error& error) {
      wrong = str_cat("order of products: ", error.what());
    }
    const std::string name = str_cat(shape.ctas, " CTA(s), N ", shape.n, " then N ", shape.scores);
    std::printf("%s: %s\n", name.c_str(), wrong.empty() ? "right" : wrong.c_str());
    if (!wrong.empty()) return {Verdict::failed, str_cat(name, ": ", wrong)};
  }
  return {Verdict::ok, "scores over P without a wait between the products: every sum is right"};
}

Outcome empty_commit(Lab& lab) {
  if (!lab.is_blackwell()) return not_blackwell();
  if (lab.is_virtual()) return {Verdict::skipped, "a virtual GPU cannot know which barriers an empty commit signals"};
  const std::vector<uint16_t> s(128 * 64, element(1, false));
  const GpuBuffer s_at(lab.gpu(), "s", s), flags(lab.gpu(), "flags", 8, true);
  void *s_p = s_at.address(), *flags_p = flags.address();
  int limit = 100'000;
  for (int i = 0; i < 10; ++i) {
    flags.clear();
    lab.launch("order.cuh", "empty_commit", 2, {.blocks = 2, .dynamic_smem_bytes = kSmemBytes},
               {&s_p, &flags_p, &limit}, {&s_at, &flags});
    const std::vector<int> got = flags.read<int>();
    if (got[0] == 0 || got[1] == 0)
      return {Verdict::failed, str_cat("an empty multicast commit signals ",
                                       got[0]   ? "the issuing CTA only"
                                       : got[1] ? "the other CTA only"
                                                : "no CTA",
                                       ": a second commit without new products is not safe")};
  }
  return {Verdict::ok, "an empty multicast commit signals both CTAs"};
}

Outcome pair_rate(Lab& lab) {
  if (!lab.is_blackwell()) return not_blackwell();
  if (lab.is_virtual()) return {Verdict::skipped, "time has no meaning on a virtual GPU"};
  constexpr int kRepeat = 512;
  const double scores = ProductTest(lab, kTwoCtas[0]).clocks(kRepeat),
               dq = ProductTest(lab, kTwoCtas[3]).clocks(kRepeat), one = ProductTest(lab, kOneCta[0]).clocks(kRepeat);
  char text[200];
  std::snprintf(
      text, sizeof text,
      "clocks of a product with K = 128: one CTA %.0f (full rate 512), pair of 256 rows %.0f (512), pair of 128 "
      "rows %.0f (256)",
      one, scores, dq);
  return {Verdict::measured, text};
}

Outcome tmem_loads(Lab& lab) {
  if (!lab.is_blackwell()) return not_blackwell();
  const GpuBuffer clocks(lab.gpu(), "clocks", 8, true);
  void* clocks_p = clocks.address();
  lab.launch("order.cuh", "tmem_loads", 1, {.blocks = 1}, {&clocks_p}, {&clocks});
  const std::vector<int> got = clocks.read<int>();
  if (lab.is_virtual()) return {Verdict::ok, "the kernel runs; time has no meaning on a virtual GPU"};
  return {Verdict::measured, str_cat("clocks of a load of tensor memory with its wait: 32 columns ", got[0],
                                     ", 128 columns in four loads ", got[1])};
}

}  // namespace

std::vector<Experiment> tensor_core_experiments() {
  return {{"e1-one-cta", [](Lab& lab) { return products(lab, kOneCta); }},
          {"e1-two-ctas", [](Lab& lab) { return products(lab, kTwoCtas); }},
          {"e2-one-cta", [](Lab& lab) { return products(lab, kExactOneCta); }},
          {"e2-two-ctas", [](Lab& lab) { return products(lab, kExactTwoCtas); }},
          {"e3-products", order},
          {"e4", empty_commit},
          {"e9", tmem_loads},
          {"e10", pair_rate},
          {"e14", [](Lab& lab) { return products(lab, k64ByteSwizzle); }}};
}

}  // namespace tandem::day_one
