#include "base/instruction_set.h"

#include <algorithm>

#include "base/env.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tandem {
namespace {

#if defined(__x86_64__)
struct Features {
  bool avx2 = false, avx512 = false, avx512_bf16 = false;
};

bool has(unsigned bits, unsigned all) { return (bits & all) == all; }

// The register states that the system saves (XCR0). The caller has checked OSXSAVE.
unsigned saved_states() {
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// CPUID instead of __builtin_cpu_supports, because the runtime library of Zig's Clang answers false for every feature.
Features read_features() {
  constexpr unsigned kYmmStates = 0x06, kZmmStates = 0xe6;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || !has(ecx, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C)) return {};
  const unsigned states = saved_states();
  if (!has(states, kYmmStates) || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return {};
  const unsigned last_subleaf = eax;
  Features features{.avx2 = has(ebx, bit_AVX2 | bit_BMI2)};
  features.avx512 = features.avx2 && has(states, kZmmStates) &&
                    has(ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL | bit_AVX512CD);
  features.avx512_bf16 = features.avx512 && last_subleaf >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 &&
                         has(eax, bit_AVX512BF16);
  return features;
}
#endif

std::vector<std::string_view> find_all() {
  std::vector<std::string_view> found = {"generic"};
#if defined(__x86_64__)
  const Features features = read_features();
  if (features.avx2) found.emplace_back("avx2");
  if (features.avx512) found.emplace_back("avx512");
  if (features.avx512_bf16) found.emplace_back("avx512_bf16");
#endif
  std::ranges::reverse(found);
  return found;
}

std::string_view choose() {
  const std::vector<std::string_view>& all = instruction_sets();
  const auto named = std::ranges::find(all, std::string_view(Env::get().cpu_target));
  return named == all.end() ? all.front() : *named;
}

}  // namespace

const std::vector<std::string_view>& instruction_sets() {
  static const std::vector<std::string_view> all = find_all();
  return all;
}

std::string_view instruction_set() {
  static const std::string_view chosen = choose();
  return chosen;
}

}  // namespace tandem
