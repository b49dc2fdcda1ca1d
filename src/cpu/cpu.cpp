#include "cpu/cpu.h"

#include <cstring>
#include <limits>

#include "cpu/schedule.h"
#include "problem/refusals.h"

namespace tandem::cpu {

size_t forward_workspace_size(const Problem& p, int threads);
size_t backward_workspace_size(const Problem& p, int threads);

Status check(const Problem& p) { return refuse_paged_backward(p); }

size_t workspace_size(const Problem& p, int threads) {
  return p.pass == TANDEM_FORWARD ? forward_workspace_size(p, threads) : backward_workspace_size(p, threads);
}

void clear_unused_rows(const Problem& p, const View& view, bool queries, int64_t heads, int64_t dim, bool lse) {
  if (!view || !(queries ? p.seqused_q : p.seqused_k)) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, b);
    const int64_t begin = queries ? s.q_begin : s.k_begin;
    for (int64_t r = queries ? s.q_len : s.k_len; r < (queries ? s.q_rows : s.k_rows); ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        std::byte* row = view.at(s.batch_index, begin + r, h);
        if (lse) {
          *reinterpret_cast<float*>(row) = -std::numeric_limits<float>::infinity();
        } else {
          std::memset(row, 0, static_cast<size_t>(dim * size_of(view.dtype)));
        }
      }
    }
  }
}

}  // namespace tandem::cpu
