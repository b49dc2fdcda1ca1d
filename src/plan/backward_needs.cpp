#include "plan/backward_needs.h"

#include "problem/bound_expression.h"

namespace tandem::plan {

bool wants_captured(const Problem& p) { return p.score_mod && p.score_mod->cells > 0; }

bool captured_per_tile(const Problem& p) {
  return wants_captured(p) && p.score_mod->program->captured_per_tile && p.score_mod->program->passes() &&
         p.softcap == 0 && (p.dq || p.dk);
}

bool captured_per_score(const Problem& p) {
  return wants_captured(p) && !captured_per_tile(p) && p.score_mod->program->captured_per_score && (p.dq || p.dk);
}

bool stores_from_registers(const Problem& p) {
  return p.accumulate || (p.dk && p.dk.dtype == DType::f32) || (p.dv && p.dv.dtype == DType::f32);
}

}  // namespace tandem::plan
