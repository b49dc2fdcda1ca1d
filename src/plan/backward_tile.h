// The kernel of a backward plan, on Hopper or Blackwell.
#pragma once

#include <variant>

#include "plan/kernel.h"
#include "shared/sm100_backward.h"
#include "shared/sm90_backward.h"

namespace tandem::plan {

struct BackwardTile {
  BackwardTile() : BackwardTile(Sm90BackwardConfig{}) {}
  BackwardTile(const Sm90BackwardConfig& t)
      : BackwardTile(t, t.ctas(), t.tile_m, t.k_box(), false) {  // NOLINT(google-explicit-constructor)
    key_floats = t.key_floats();
    key_sums = t.key_sums();
    key_tickets = t.key_tickets();
    single = t.single;
    sums_scores = t.sums_scores;
    strips = t.strips;
    few_queries = t.few_queries;
  }
  BackwardTile(const Sm100BackwardConfig& t)  // NOLINT(google-explicit-constructor)
      : BackwardTile(t, t.ctas(), t.q_box_rows(), t.kCtaKeys, t.apart()) {}

  operator const Configuration&() const { return kernel; }  // NOLINT(google-explicit-constructor): it is one

  const Sm90BackwardConfig& for_hopper() const { return std::get<Sm90BackwardConfig>(kernel); }
  const Sm100BackwardConfig& for_blackwell() const { return std::get<Sm100BackwardConfig>(kernel); }

  Configuration kernel;
  int head_dim, head_dim_v;
  int ctas;                                                    // per cluster
  int tile_m, tile_n;                                          // queries per iteration, keys per n_block
  int q_box, k_box;                                            // rows per TMA box
  int threads, delta_threads, convert_threads, score_threads;  // score: kernels that compute scores again
  int smem_bytes, dbias_smem_bytes, captured_smem_bytes;
  int dq_floats;                     // per iteration
  int dq_tickets;                    // per m_block
  int key_floats = 0, key_sums = 0;  // per split: size of the sums, CTAs that convert them
  int key_tickets = 0;               // per n_block and CTA, if heads accumulate into one sum
  bool from_diagonal;                // tile/key_tile.cuh
  bool single = false;               // the main kernel stores dq
  bool strips = false;               // dS goes to global memory
  bool few_queries = false;          // per head
  bool apart;                        // dk and dv use two passes
  bool captured;                     // gradients of score_mod's tensors: this entry and the next
  bool sums_scores = false;          // the main kernel computes them; the entry does nothing
  uint8_t mark_steps_entry;
  bool block_mask;

 private:
  template <class T>
  BackwardTile(const T& t, int ctas_of_cluster, int q_rows, int k_rows, bool sums_apart)
      : kernel(t),
        head_dim(t.head_dim),
        head_dim_v(t.head_dim_v),
        ctas(ctas_of_cluster),
        tile_m(t.tile_m),
        tile_n(t.tile_n()),
        q_box(q_rows),
        k_box(k_rows),
        threads(t.threads()),
        delta_threads(T::kDeltaThreads),
        convert_threads(t.convert_threads()),
        score_threads(t.score_threads()),
        smem_bytes(t.smem_bytes()),
        dbias_smem_bytes(t.dbias_smem_bytes()),
        captured_smem_bytes(t.captured_smem_bytes()),
        dq_floats(t.dq_floats()),
        dq_tickets(t.dq_tickets()),
        from_diagonal(t.from_diagonal),
        apart(sums_apart),
        captured(t.captured),
        mark_steps_entry(plan::mark_steps_entry(t)),
        block_mask(t.block_mask) {}
};

}  // namespace tandem::plan
