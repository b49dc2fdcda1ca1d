// Compares the functions of printed expressions (kernels/device/mod_functions.cuh) with src/score_mod/arithmetic.h.
// Ints are equal to the bit, and floats are within the bounds that their comments promise.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "base/text.h"
#include "jit/compiler.h"
#include "kernels/on_gpu.h"
#include "score_mod/arithmetic.h"

namespace tandem::test {
namespace {

constexpr int kThreads = 256;

// Computes to[i] = function(a[i], b[i]) by one block.
template <class T>
std::vector<T> run(const Gpu& gpu, const std::string& call, const std::vector<T>& a, const std::vector<T>& b) {
  const char* type = std::is_same_v<T, float> ? "float" : "int";
  const jit::Request request{
      .name = "functions",
      .source = str_cat("#include \"device/mod_functions.cuh\"\nextern \"C\" __global__ void functions(const ", type,
                        "* x, const ", type, "* y, ", type,
                        "* to, int n) {\n  for (int i = threadIdx.x; i < n; i += blockDim.x) {\n    const ", type,
                        " a = x[i], b = y[i];\n    to[i] = ", call, ";\n  }\n}\n"),
      .arch = gpu.device().properties().arch(),
      .options = {"--std=c++20", "--device-as-default-execution-space"},
      .output = gpu.device().properties().image == gpu::Image::ptx ? jit::Output::ptx : jit::Output::cubin};
  std::unique_ptr<jit::Compiler> compiler;
  require(jit::Compiler::open({}, Env::get(), &compiler));
  std::string code, log;
  require(compiler->compile(request, jit::included_by(request.source, jit::kernels()), &code, &log));
  std::unique_ptr<gpu::Module> module;
  require(gpu.device().load(std::as_bytes(std::span(code)), &module));
  gpu::Launch launch{.grid = {}, .block = {.x = kThreads}, .cluster = {}, .stream = gpu.stream(), .buffers = {}};
  require(module->find("functions", 0, &launch.kernel));
  const size_t bytes = a.size() * sizeof(T);
  const DeviceMemory memory(gpu.device(), 3 * bytes);
  void *x = memory.at(0), *y = memory.at(bytes), *to = memory.at(2 * bytes);
  require(gpu.device().copy_to_device(x, a.data(), bytes, gpu.stream()));
  require(gpu.device().copy_to_device(y, b.data(), bytes, gpu.stream()));
  const gpu::NamedBuffer buffers[] = {{"x", x, bytes}, {"y", y, bytes}, {"to", to, bytes, true, false}};
  launch.buffers = buffers;
  int n = static_cast<int>(a.size());
  void* args[] = {&x, &y, &to, &n};
  launch.args = args;
  require(gpu.device().launch(launch));
  std::vector<T> result(a.size());
  require(gpu.device().copy_to_host(result.data(), to, bytes, gpu.stream()));
  require(gpu.device().synchronize(gpu.stream()));
  return result;
}

TEST(KernelsFunctions, WholeQuotients) {
  std::mt19937 bits(7);
  std::vector<int> a, b;
  const int ends[] = {0, 1, -1, 2, -2, 3, -7, 64, -64, 65537, 1 << 30, INT32_MAX, -INT32_MAX, INT32_MIN};
  for (const int x : ends) {
    for (const int y : ends) a.push_back(x), b.push_back(y);
  }
  for (int n = 0; n < 20000; ++n) {
    const auto any = [&] { return static_cast<int>(bits()) >> (bits() & 31); };
    b.push_back(any());
    a.push_back(n % 4 == 0 ? score_mod::wrap(score_mod::bits_of(b.back()) * (bits() >> (bits() & 31)) - (bits() & 1))
                           : any());
  }
  const auto quotient = run(*the_gpu(), "mod_floor_divide(a, b)", a, b),
             rest = run(*the_gpu(), "mod_modulo(a, b)", a, b);
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(quotient[i], score_mod::floor_divide(a[i], b[i])) << a[i] << " // " << b[i];
    ASSERT_EQ(rest[i], score_mod::modulo(a[i], b[i])) << a[i] << " % " << b[i];
  }
}

// Returns floats of all sizes, and the extremes.
std::vector<float> floats(unsigned seed) {
  std::mt19937 bits(seed);
  std::vector<float> all = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1.0f, -1.0f, 0.6f, 0x1.333332p-1f, -0.6f};
  for (int n = 0; n < 20000; ++n) all.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits())));
  for (int n = 0; n < 20000; ++n) {
    const float x = std::ldexp(1.0f + static_cast<float>(bits() >> 9) * 0x1p-23f, static_cast<int>(bits() % 16) - 11);
    all.push_back(n & 1 ? x : -x);
  }
  return all;
}

void expect_within(score_mod::Op op, const std::string& call, const std::function<double(double)>& relative,
                   double least) {
  const std::vector<float> a = floats(3), got = run(*the_gpu(), call, a, a);
  for (size_t i = 0; i < a.size(); ++i) {
    const score_mod::Value<double> operand{.real = a[i]};
    const double exact = score_mod::apply(op, score_mod::Type::real, &operand).real;
    if (std::isnan(exact)) {
      ASSERT_TRUE(std::isnan(got[i])) << call << " of " << a[i] << " is " << got[i];
    } else if (std::fabs(exact) > std::numeric_limits<float>::max()) {
      ASSERT_EQ(got[i], std::copysign(INFINITY, exact)) << call << " of " << a[i];
    } else if (got[i] != exact) {
      ASSERT_LE(std::fabs(got[i] - exact), std::fabs(exact) * relative(a[i]) + least)
          << call << " of " << a[i] << " is " << got[i] << ", not " << exact;
    }
  }
}

TEST(KernelsFunctions, HyperbolicTangentAndSigmoid) {
  expect_within(
      score_mod::Op::tanh, "mod_tanh(a)", [](double) { return 0x1p-21; }, 0x1p-148);
  expect_within(
      score_mod::Op::sigmoid, "mod_sigmoid(a)", [](double a) { return (2 + std::fabs(a)) * 0x1p-23; }, 0x1p-126);
  const float ends[] = {INFINITY, -INFINITY, 20, -20, 0.0f, -0.0f};
  const std::vector<float> a(std::begin(ends), std::end(ends));
  EXPECT_EQ(run(*the_gpu(), "mod_tanh(a)", a, a), (std::vector<float>{1, -1, 1, -1, 0, 0}));
  EXPECT_EQ(std::signbit(run(*the_gpu(), "mod_tanh(a)", a, a)[5]), true);
}

TEST(KernelsFunctions, ExponentialsSinesAndErf) {
  const auto units = [](double ulp) { return [ulp](double) { return ulp * 0x1p-23; }; };
  expect_within(score_mod::Op::expm1, "mod_expm1(a)", units(2), 0x1p-148);
  expect_within(score_mod::Op::log1p, "mod_log1p(a)", units(2), 0x1p-148);
  expect_within(score_mod::Op::sin, "mod_sin(a)", units(3), 0x1p-148);
  expect_within(score_mod::Op::cos, "mod_cos(a)", units(3), 0x1p-148);
  expect_within(score_mod::Op::erf, "mod_erf(a)", units(3), 0x1p-148);
}

// Derivatives need 1 - x. A reciprocal that is off by one unit would make it noise.
TEST(KernelsFunctions, WhatIsLeftToOne) {
  std::vector<float> a;
  for (float x = 0.6f; x < 30; x += 0.01f) a.push_back(x), a.push_back(-x);
  const auto of_tanh = run(*the_gpu(), "1.0f - fabsf(mod_tanh(a))", a, a);
  const auto of_sigmoid = run(*the_gpu(), "1.0f - mod_sigmoid(fabsf(a))", a, a);
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = std::fabs(static_cast<double>(a[i])), e = std::exp(-2 * x), h = std::exp(-x);
    ASSERT_NEAR(of_tanh[i], 2 * e / (1 + e), 2 * e * 0x1p-19 + 0x1p-25) << a[i];
    ASSERT_NEAR(of_sigmoid[i], h / (1 + h), h * 0x1p-19 + 0x1p-25) << a[i];
  }
}

TEST(KernelsFunctions, QuotientsByOneDivisor) {
  std::vector<float> a = floats(5), b = floats(6);
  std::rotate(b.begin(), b.begin() + 3, b.end());
  const std::vector<float> got = run(*the_gpu(), "mod_divide_by(a, b)", a, b);
  for (size_t i = 0; i < a.size(); ++i) {
    const float exact = a[i] / b[i];
    const auto ordinary = [](float x, double least, double most) {
      return std::fabs(x) > least && std::fabs(x) < most;
    };
    const std::string what = str_cat(a[i], " / ", b[i]);
    if (std::isnan(exact)) {
      ASSERT_TRUE(std::isnan(got[i])) << what;
    } else if (a[i] == 0 || b[i] == 0 || std::isinf(a[i]) || std::isinf(b[i]) ||
               (ordinary(a[i], 0x1p-60, 0x1p40) && ordinary(b[i], 0x1p-60, 0x1p60))) {
      ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(exact)) << what;
    } else if (ordinary(exact, 0x1p-120, 0x1p123)) {
      ASSERT_LE(std::fabs(got[i] - exact), std::fabs(exact) * 0x1p-22) << what;
    }
  }
}

}  // namespace
}  // namespace tandem::test
