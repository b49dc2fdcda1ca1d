// Which of the instruction sets that vector code is compiled for this machine has.
#pragma once

#include <string_view>
#include <vector>

namespace tandem {

// Those that run here, best first: "avx512_bf16", "avx512", "avx2", "generic"; on other machines "generic" alone.
const std::vector<std::string_view>& instruction_sets();

// The one to use: the best, or the lesser one that the environment variable TANDEM_CPU_TARGET names, which is read
// once. (Another name is refused where a context is created.)
std::string_view instruction_set();

}  // namespace tandem
