// Expressions of sequences that are parts of longer sequences: their names mean the longer sequences.
#pragma once

#include <string>
#include <string_view>

namespace tandem::score_mod {

struct PlacedText {
  std::string text;
  std::string places;  // name of the tensor of places; empty: not read
};

// Replaces batch, head, q, k, seqlen_q and seqlen_k by their values in the longer sequence. Names of the result differ
// from all names of the text. An expression without tokens of the language is returned unchanged.
PlacedText placed_text(std::string_view text);

}  // namespace tandem::score_mod
