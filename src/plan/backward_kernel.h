// The kernel of a backward plan, on Hopper or Blackwell.
#pragma once

#include <variant>

#include "config/sm100_backward.h"
#include "config/sm90_backward.h"
#include "plan/kernel.h"

namespace tandem::plan {

struct BackwardKernel {
  BackwardKernel() : BackwardKernel(Sm90BackwardConfig{}) {}
  BackwardKernel(const Sm90BackwardConfig& t)
      : BackwardKernel(t, t.ctas(), t.tile_m, t.k_box(), false) {  // NOLINT(google-explicit-constructor)
    dkv_floats = t.dkv_floats();
    dkv_accum_ctas = t.dkv_accum_ctas();
    dkv_semaphores = t.dkv_semaphores();
    single_n_block = t.single_n_block;
    captured_per_score = t.captured_per_score;
    ds_gmem = t.ds_gmem();
    short_q = t.short_q;
  }
  BackwardKernel(const Sm100BackwardConfig& t)  // NOLINT(google-explicit-constructor)
      : BackwardKernel(t, t.ctas(), t.q_box_rows(), t.k_box(), t.two_pass()) {
    stores_dkv_by_tma = true;
    ds_gmem = t.ds_gmem();
    two_cta_ring = t.two_cta_ring();
  }

  operator const Configuration&() const { return kernel; }  // NOLINT(google-explicit-constructor): it is one

  const Sm90BackwardConfig& for_hopper() const { return std::get<Sm90BackwardConfig>(kernel); }
  const Sm100BackwardConfig& for_blackwell() const { return std::get<Sm100BackwardConfig>(kernel); }

  Configuration kernel;
  int head_dim, head_dim_v;
  int ctas;            // per cluster
  int tile_m, tile_n;  // queries per iteration, keys per n_block
  int q_box, k_box;    // rows per TMA box
  // score_threads: kernels that compute scores again
  int threads, preprocess_threads, preprocess_ctas, postprocess_threads, score_threads;
  int smem_bytes, dbias_smem_bytes, captured_smem_bytes;
  int dq_floats;                           // per iteration
  int dq_semaphores;                       // per m_block
  int dkv_floats = 0, dkv_accum_ctas = 0;  // per split: floats of the sums, CTAs that convert them
  int dkv_semaphores = 0;                  // per n_block and CTA, if heads accumulate into one sum
  bool spt;                                // device/m_block_iterator.cuh
  bool single_n_block = false;             // the main kernel stores dq without accumulation
  bool stores_dkv_by_tma = false;          // dk and dv have tensor maps: TMA stores them
  bool ds_gmem = false;                    // dS goes to global memory
  bool short_q = false;                    // few queries per head
  bool two_cta_ring = false;               // q and k also have tensor maps with boxes of 32 columns
  bool two_pass;                           // dk and dv use two passes
  bool captured;                           // has gradients of score_mod's tensors: EntryId::captured
  bool captured_per_score = false;         // the main kernel computes these; the entry does nothing
  bool block_mask;

 private:
  template <class T>
  BackwardKernel(const T& t, int ctas_of_cluster, int q_rows, int k_rows, bool is_two_pass)
      : kernel(t),
        head_dim(t.head_dim),
        head_dim_v(t.head_dim_v),
        ctas(ctas_of_cluster),
        tile_m(t.tile_m),
        tile_n(t.tile_n()),
        q_box(q_rows),
        k_box(k_rows),
        threads(t.threads()),
        preprocess_threads(T::kPreprocessThreads),
        preprocess_ctas(t.preprocess_ctas()),
        postprocess_threads(t.postprocess_threads()),
        score_threads(t.score_threads()),
        smem_bytes(t.smem_bytes()),
        dbias_smem_bytes(t.dbias_smem_bytes()),
        captured_smem_bytes(t.captured_smem_bytes()),
        dq_floats(t.dq_floats()),
        dq_semaphores(t.dq_semaphores()),
        spt(t.spt),
        two_pass(is_two_pass),
        captured(t.captured),
        block_mask(t.options.block_mask) {}
};

}  // namespace tandem::plan
