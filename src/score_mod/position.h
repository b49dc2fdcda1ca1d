// The position of an element: query q and key k.
#pragma once

#include <cstdint>

#include "score_mod/op.h"

namespace tandem::score_mod {

// Number: one element, or a range of several elements.
template <class Number>
struct PositionOf {
  Number batch = {}, head = {}, q = {}, k = {}, seqlen_q = {}, seqlen_k = {};

  Number of(Input input) const {  // any input except score
    switch (input) {
      case Input::score: break;
      case Input::batch: return batch;
      case Input::head: return head;
      case Input::q: return q;
      case Input::k: return k;
      case Input::seqlen_q: return seqlen_q;
      case Input::seqlen_k: return seqlen_k;
    }
    return {};
  }
};
using Position = PositionOf<int32_t>;

}  // namespace tandem::score_mod
