// The kernel of a backward plan, one of Hopper's or one of Blackwell's.
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
  int ctas;                                                    // of a cluster
  int tile_m, tile_n;                                          // queries of a step, keys of an n_block
  int q_box, k_box;                                            // rows that TMA brings at once
  int threads, delta_threads, convert_threads, score_threads;  // score: of kernels that make scores anew
  int smem_bytes, dbias_smem_bytes, captured_smem_bytes;
  int dq_floats;                     // of a step
  int dq_tickets;                    // of an m_block
  int key_floats = 0, key_sums = 0;  // of a split, and CTAs that sum them up: where steps are split
  int key_tickets = 0;               // of a CTA's n_block, where the splits are heads that add to one sum
  bool from_diagonal;                // tile/key_tile.cuh
  bool single = false;               // main stores dq
  bool strips = false;               // dS goes to memory
  bool few_queries = false;          // of a head
  bool apart;                        // dk and dv are summed by tiles of their own
  bool captured;                     // gradients of what a score_mod reads are wanted, by this entry and the next
  bool sums_scores = false;          // main makes them: then this entry has nothing to do
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
