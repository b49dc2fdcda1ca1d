#include "base/instruction_set.h"

#include <algorithm>

#include "base/env.h"

namespace tandem {
namespace {

std::vector<std::string_view> find_all() {
  std::vector<std::string_view> found = {"generic"};
#if defined(__x86_64__)
  __builtin_cpu_init();
  // CPUs with AVX2 also have F16C, which Clang 16 cannot test.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  if (avx2) found.emplace_back("avx2");
  if (avx512) found.emplace_back("avx512");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) found.emplace_back("avx512_bf16");
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
