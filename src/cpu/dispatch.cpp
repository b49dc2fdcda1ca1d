// Chooses the table of kernels for the machine this process runs on.
#include <cstdlib>
#include <cstring>

#include "cpu/cpu.h"
#include "cpu/kernels.h"

namespace tandem::cpu {

extern const Kernels kernels_generic;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16;
#endif

namespace {

struct Target {
  const Kernels* kernels;
  bool runs_here;
};

std::vector<Target> targets() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // What has AVX2 has F16C too, which Clang 16 cannot ask for.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  return {{&kernels_avx512_bf16, bf16}, {&kernels_avx512, avx512}, {&kernels_avx2, avx2}, {&kernels_generic, true}};
#else
  return {{&kernels_generic, true}};
#endif
}

const Kernels& choose() {
  const char* wanted = std::getenv("TANDEM_CPU_TARGET");
  const Kernels* best = nullptr;
  for (const Target& t : targets()) {
    if (!t.runs_here) continue;
    if (best == nullptr) best = t.kernels;
    if (wanted != nullptr && std::strcmp(wanted, t.kernels->name) == 0) return *t.kernels;
  }
  return *best;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

std::vector<std::string> available_targets() {
  std::vector<std::string> names;
  for (const Target& t : targets())
    if (t.runs_here) names.emplace_back(t.kernels->name);
  return names;
}

std::string target_description() {
  return std::string(kernels().name) + (kernels().bf16_dot ? " with bfloat16 dot products" : "");
}

}  // namespace tandem::cpu
