// The instruction sets of this machine for which vector code was compiled.
#pragma once

#include <string_view>
#include <vector>

namespace tandem {

// The usable sets, best first: "avx512_bf16", "avx512", "avx2", "generic". Other architectures have "generic" only.
const std::vector<std::string_view>& instruction_sets();

// The selected set: the best set, or the set that TANDEM_CPU_TARGET names. The variable is read once, and the creation
// of a context refuses unknown names.
std::string_view instruction_set();

}  // namespace tandem
