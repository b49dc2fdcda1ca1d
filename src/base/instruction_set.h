// The instruction sets of this machine, among the sets that vector code is compiled for.
#pragma once

#include <string_view>
#include <vector>

namespace tandem {

// The usable sets, best first: "avx512_bf16", "avx512", "avx2", "generic". Other architectures have "generic" only.
const std::vector<std::string_view>& instruction_sets();

// The set in use: the best one, or the one that TANDEM_CPU_TARGET names. The variable is read once, and the creation of
// a context refuses unknown names.
std::string_view instruction_set();

}  // namespace tandem
