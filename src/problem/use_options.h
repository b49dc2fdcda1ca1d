// Modifications that options serve for less.
#pragma once

#include <string>

#include "problem/problem.h"

namespace tandem {

// Has options in place of texts that say the same (score_mod/options.h): a softcap, a window, ALiBi, where the call
// leaves these free and no gradient of the text is wanted. For engines; the oracle has texts as they are written.
void use_options(Problem* problem);

// What was done: "score_mod is ALiBi, mask_mod is a window"; empty where nothing was.
std::string used_options(const Problem& problem);

}  // namespace tandem
