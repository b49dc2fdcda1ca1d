// Texts that say what options of a call say: the option costs less.
#pragma once

#include <cstdint>
#include <optional>

#include "score_mod/parser.h"
#include "score_mod/values.h"
#include "tandem/tandem.h"

namespace tandem::score_mod {

// Where distances are measured from: a query's distance from a key is q - k + offset and, where the diagonal ends at
// the last query and key, seqlen_k - seqlen_q more.
struct Diagonal {
  bool bottom_right = false;
  int64_t offset = 0;

  bool operator==(const Diagonal&) const = default;
};

// A mask modification that shows keys at distances from -right to left alone.
struct Band {
  bool whole = false;  // all of them: there is no more to it
  Diagonal diagonal;
  int64_t left = TANDEM_UNBOUNDED, right = TANDEM_UNBOUNDED;
};

// A score modification that takes from the score slope[head] or slope[batch, head], times the distance (ahead: times
// its negative) or, where it is absolute, times its absolute value.
struct Alibi {
  enum class Of : uint8_t { absolute, distance, ahead };
  Of of = Of::absolute;
  Diagonal diagonal;
  int tensor = 0;
};

// What is known of positions where a text is asked.
struct Lengths {
  int64_t seqlen_q = 0, seqlen_k = 0;  // at most
  bool exact = false;                  // every sequence is as long
};

// c of a score modification that is c * tanh(score / c), a constant or a float or int scalar of the call; 0 of others.
double softcap_of(const Mod& mod, const Values& values);

Band band_of(const Mod& mod, const Values& values, const Lengths& lengths);
std::optional<Alibi> alibi_of(const Mod& mod, const Values& values, const Lengths& lengths);

}  // namespace tandem::score_mod
