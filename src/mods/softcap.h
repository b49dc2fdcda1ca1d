// A text that says what an option says, and is slower than that.
#pragma once

#include "mods/parser.h"
#include "mods/values.h"

namespace tandem::mods {

// c of a score modification that is c * tanh(score / c), a constant or a float or int scalar of the call; 0 of others.
double softcap_of(const Mod& mod, const Values& values);

}  // namespace tandem::mods
