// Modifications that options serve for less.
#pragma once

#include <string>

#include "problem/problem.h"

namespace tandem {

// Replaces expressions by equal options (score_mod/options.h): a softcap, a window, ALiBi. It does so if the call does
// not use these options and needs no gradient of the expression. Engines call it; the reference evaluates expressions
// as written.
void use_options(Problem* problem);

// The replacements: "score_mod is ALiBi, mask_mod is a window"; empty without any.
std::string used_options(const Problem& problem);

}  // namespace tandem
