// Replaces modifications by options of lower cost.
#pragma once

#include <string>

#include "problem/problem.h"

namespace tandem {

// Replaces expressions by equal options (score_mod/options.h): a softcap, a window, ALiBi. The call must not use these
// options, and must need no gradient of the expression. Engines call this function; the reference evaluates expressions
// as written.
void use_options(Problem* problem);

// Describes the replacements, such as "score_mod is ALiBi, mask_mod is a window". The text is empty without
// replacements.
std::string used_options(const Problem& problem);

}  // namespace tandem
