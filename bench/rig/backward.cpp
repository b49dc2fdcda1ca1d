// Prints data from the shared headers for bench/backward.py, as JSON: the Hopper backward kernels with the given
// configurations, and the offsets of their parameter's members.
//
//   backward head_dim=128,head_dim_v=128,tile_m=64 head_dim=64,head_dim_v=64,right=1 ...
#include "shared/backward.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/text.h"
#include "members.h"
#include "plan/fields.h"
#include "plan/kernel.h"

namespace {

using tandem::str_cat;
using tandem::plan::Field;

std::string parameters() {
  Members<BackwardParams> members;
#define ADD(member) members.add(#member, members.p.member)
  ADD(q), ADD(k), ADD(v), ADD(dout), ADD(dk), ADD(dv), ADD(lse), ADD(lse_batch), ADD(lse_row), ADD(lse_head);
  ADD(out_given), ADD(out_batch), ADD(out_row), ADD(out_head), ADD(dout_data), ADD(dout_batch), ADD(dout_row);
  ADD(dout_head), ADD(dq), ADD(dq_batch), ADD(dq_row), ADD(dq_head), ADD(counter), ADD(batch), ADD(heads_q);
  ADD(heads_k), ADD(seqlen_q), ADD(seqlen_k), ADD(pack_gqa), ADD(m_blocks), ADD(sequence_m_blocks), ADD(n_blocks),
      ADD(tiles), ADD(l2_heads);
  ADD(bottom_right), ADD(window_left), ADD(window_right), ADD(scale), ADD(scale_log2), ADD(head_dim), ADD(head_dim_v);
  ADD(has_dk), ADD(has_dv), ADD(stats), ADD(dq_sums), ADD(dq_tickets), ADD(splits), ADD(key_sums);
  ADD(dk_data), ADD(dk_batch), ADD(dk_row), ADD(dk_head), ADD(dv_data), ADD(dv_batch), ADD(dv_row), ADD(dv_head);
#undef ADD
  return members.json;
}

// "tile_m=64,right=1"
Sm90BackwardConfig read(const std::string& text) {
  Sm90BackwardConfig t;
  for (size_t at = 0; at < text.size();) {
    const size_t equals = text.find('=', at), end = std::min(text.find(',', at), text.size());
    bool known = false;
    tandem::plan::fields(t, [&](const Field& field, auto& member) {
      if (text.compare(at, equals - at, field.name) != 0) return;
      member = static_cast<std::remove_cvref_t<decltype(member)>>(std::atoi(text.c_str() + equals + 1));
      known = true;
    });
    if (!known || !tandem::plan::is_valid(t)) {
      std::fprintf(stderr, "%s: no such field, or not such a value\n", text.substr(at, end - at).c_str());
      std::exit(2);
    }
    at = end + 1;
  }
  if (!t.fits()) {
    std::fprintf(stderr, "%s: does not fit\n", text.c_str());
    std::exit(2);
  }
  return t;
}

}  // namespace

int main(int argc, char** argv) {
  std::string kernels;
  for (int n = 1; n < argc; ++n) {
    const Sm90BackwardConfig t = read(argv[n]);
    const std::string check = str_cat("static_assert(sizeof(BackwardParams) == ", sizeof(BackwardParams), ");\n");
    kernels +=
        str_cat(n > 1 ? ",\n" : "", "{\"name\": ", quoted(tandem::plan::name_of(t)),
                ", \"source\": ", quoted(tandem::plan::translation_unit(t) + check), ", \"shared\": ", t.smem_bytes(),
                ", \"threads\": ", t.threads(), ", \"tile_m\": ", t.tile_m, ", \"tile_n\": ", t.tile_n(),
                ", \"warpgroups\": ", t.warpgroups, ", \"dq_floats\": ", t.dq_floats(),
                ", \"dq_tickets\": ", t.dq_tickets(), ", \"key_floats\": ", t.split ? t.key_floats() : 0,
                ", \"key_sums\": ", t.key_sums(), ", \"right\": ", t.right ? "true" : "false", "}");
  }
  std::printf("{\"bytes\": %zu, \"delta_threads\": %d, \"parameters\": {%s}, \"kernels\": [\n%s]}\n",
              sizeof(BackwardParams), Sm90BackwardConfig::kDeltaThreads, parameters().c_str(), kernels.c_str());
}
