// Chooses the table of kernels for the machine that runs this process.
#include <initializer_list>

#include "base/instruction_set.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"

namespace tandem::cpu {

extern const Kernels kernels_generic;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16;
#endif

namespace {

const Kernels& choose() {
#if defined(__x86_64__)
#if defined(TANDEM_FEW_INSTRUCTION_SETS)
  const auto compiled = {&kernels_avx512_bf16};
#else
  const auto compiled = {&kernels_avx2, &kernels_avx512, &kernels_avx512_bf16};
#endif
  for (const Kernels* kernels : compiled)
    if (kernels->name == instruction_set()) return *kernels;
#endif
  return kernels_generic;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

std::string target_description() {
  return std::string(kernels().name) + (kernels().bf16_dot ? " with bfloat16 dot products" : "");
}

}  // namespace tandem::cpu
