// Recognises expressions that equal an option of the call, because the option costs less.
#pragma once

#include <cstdint>
#include <optional>

#include "score_mod/parser.h"
#include "score_mod/values.h"
#include "tandem/tandem.h"

namespace tandem::score_mod {

// The origin of distances. The distance of a query from a key is q - k + offset. If the diagonal ends at the last query
// and key, the distance also includes seqlen_k - seqlen_q.
struct Diagonal {
  bool bottom_right = false;
  int64_t offset = 0;

  bool operator==(const Diagonal&) const = default;
};

// A mask_mod that shows only keys at distances from -right to left.
struct VisibleBand {
  bool whole = false;  // the mask_mod has no other effect
  Diagonal diagonal;
  int64_t left = TANDEM_UNBOUNDED, right = TANDEM_UNBOUNDED;
};

// A score_mod that subtracts slope[head] or slope[batch, head] times the distance. `ahead` uses the negative of the
// distance, and `absolute` its absolute value.
struct Alibi {
  enum class Of : uint8_t { absolute, distance, ahead };
  Of of = Of::absolute;
  Diagonal diagonal;
  int tensor = 0;
};

// The known bounds of positions in a call.
struct Lengths {
  int64_t seqlen_q = 0, seqlen_k = 0;  // maxima
  bool exact = false;                  // every sequence has these lengths
};

// Returns the c of a score_mod c * tanh(score / c), where c is a constant or a float or int scalar of the call. Returns
// 0 for any other score_mod.
double softcap_of(const Mod& mod, const Values& values);

VisibleBand band_of(const Mod& mod, const Values& values, const Lengths& lengths);
std::optional<Alibi> alibi_of(const Mod& mod, const Values& values, const Lengths& lengths);

}  // namespace tandem::score_mod
