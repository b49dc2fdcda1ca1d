#include "problem/use_options.h"

#include <algorithm>
#include <cfloat>

#include "base/text.h"
#include "problem/bound_expression.h"
#include "score_mod/options.h"

namespace tandem {
namespace {

score_mod::Lengths lengths_of(const Problem& p) {
  const bool own = p.packed_q() || p.packed_k() || p.seqused_q || p.seqused_k;  // each sequence has its own lengths
  return {p.seqlen_q, p.seqlen_k, !own};
}

// Measures all distances from this diagonal. Returns false and changes nothing if no options can express that.
bool measure_from(const score_mod::Diagonal& to, Problem* p) {
  const bool known = lengths_of(*p).exact;
  const auto offset = [&](const score_mod::Diagonal& d) {
    return d.offset + (d.bottom_right && known ? p->seqlen_k - p->seqlen_q : 0);
  };
  const score_mod::Diagonal from{p->bottom_right, p->bottom_right ? 0 : clamp_diagonal(p->diagonal_offset)};
  const bool comparable = !p->diagonal_offsets && (known || from.bottom_right == to.bottom_right);
  const int64_t further = offset(to) - offset(from);
  if (comparable && further == 0) return true;
  if (p->alibi_slopes || (p->banded() && !comparable)) return false;
  if (to.bottom_right && to.offset != 0 && !known) return false;
  if (p->window_left != TANDEM_UNBOUNDED) p->window_left += further;
  if (p->window_right != TANDEM_UNBOUNDED) p->window_right -= further;
  p->bottom_right = to.bottom_right && to.offset == 0;
  p->diagonal_offset = p->bottom_right ? 0 : offset(to);
  p->diagonal_offsets = {};
  return true;
}

void use_softcap(Problem* p) {
  if (!p->score_mod || p->score_mod->cells > 0 || p->softcap != 0 || p->bias || p->alibi_slopes) return;
  const double cap = score_mod::softcap_of(p->score_mod->program->mod, p->score_mod->values);
  if (!(cap >= FLT_MIN && cap <= FLT_MAX)) return;
  p->softcap = cap;
  p->score_mod = {};
  p->taken.softcap = true;
}

// Evaluates a mask within a window if the mask hides all keys outside it. Changes nothing if lists omit blocks.
void use_window(Problem* p) {
  if (!p->mask_mod) return;
  const score_mod::VisibleBand band =
      score_mod::band_of(p->mask_mod->program->mod, p->mask_mod->values, lengths_of(*p));
  if (p->block_mask && !(p->block_mask.of_mask_mod && band.whole)) return;
  const bool bounded = band.left != TANDEM_UNBOUNDED || band.right != TANDEM_UNBOUNDED;
  if (bounded ? !measure_from(band.diagonal, p) : !band.whole) return;
  const int64_t left = std::min(p->window_left, band.left), right = std::min(p->window_right, band.right);
  if (left != TANDEM_UNBOUNDED && right != TANDEM_UNBOUNDED && left + right < 0) return;  // such a window shows no key
  p->window_left = left;
  p->window_right = right;
  p->taken.window = true;
  if (!band.whole) return;
  p->mask_mod = {};
  p->block_mask = {};
}

// Without the absolute value the text equals ALiBi if no key lies after the diagonal. A forward with lists has larger
// tiles with a text than with ALiBi.
void use_alibi(Problem* p) {
  if (p->pass == TANDEM_FORWARD && p->block_mask) return;
  if (!p->score_mod || p->score_mod->cells > 0 || p->bias || p->alibi_slopes) return;
  const auto alibi = score_mod::alibi_of(p->score_mod->program->mod, p->score_mod->values, lengths_of(*p));
  if (!alibi) return;
  const score_mod::TensorView slopes = p->score_mod->values.tensors[static_cast<size_t>(alibi->tensor)];
  const int head = slopes.rank - 1;
  const auto has_all = [&](int dim, int64_t count) { return slopes.size[dim] == 1 || slopes.size[dim] >= count; };
  if (slopes.element != score_mod::Element::f32 || !has_all(head, p->heads_q) || (head > 0 && !has_all(0, p->batch)))
    return;
  if (!measure_from(alibi->diagonal, p)) return;
  const bool ahead = alibi->of == score_mod::Alibi::Of::ahead;
  if (alibi->of != score_mod::Alibi::Of::absolute && (ahead ? p->window_left : p->window_right) > 0) return;
  p->alibi_slopes = {.data = const_cast<std::byte*>(slopes.data),
                     .batch = head > 0 ? slopes.stride[0] : 0,
                     .head = slopes.stride[head],
                     .present = true};
  p->score_mod = {};
  p->taken.alibi = true;
}

}  // namespace

void use_options(Problem* problem) {
  use_softcap(problem);
  use_window(problem);
  use_alibi(problem);
}

std::string used_options(const Problem& p) {
  std::string text = p.taken.softcap ? "score_mod is softcap" : p.taken.alibi ? "score_mod is ALiBi" : "";
  if (!p.taken.window) return text;
  return str_cat(text, text.empty() ? "" : ", ",
                 p.mask_mod ? "mask_mod hides keys within the window" : "mask_mod is a window");
}

}  // namespace tandem
