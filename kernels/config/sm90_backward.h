// The configuration of a Hopper backward kernel, and the sizes, registers and shared memory that follow from it.
#pragma once
#include "config/gradient_order.h"
#include "config/score_options.h"

// The kernel's only template parameter. A CTA or CTA pair keeps the tile_n() keys and values of an n_block. The CTA
// iterates over the m_blocks that see them, tile_m queries each.
struct Sm90BackwardConfig {
  // The main loop: sm90/backward/mainloop_*.cuh.
  enum class Schedule {
    rs,               // P and dS are register operands
    shared_p,         // wide heads: P and dS in shared memory
    cluster2,         // shared_p, two CTAs exchange dS
    warpgroup_roles,  // cluster2, one product per warpgroup
    ds_gmem,          // shared_p, dS to global memory
    ds_gmem_sub_m,    // ds_gmem, 32 queries at a time
  };
  int head_dim = 128, head_dim_v = 128;  // rounded up to multiples of 64
  int warpgroups = 2;                    // MMA warpgroups; each has 64 keys or a role
  int tile_m = 64;                       // queries per iteration: 64, or 64 per warpgroup
  int q_stages = 3, dout_stages = 2;     // iterations in shared memory
  Schedule schedule = Schedule::rs;
  bool spt = false;                   // iterations start at the diagonal: device/n_block_work.cuh
  bool store_from_registers = false;  // dk, dv stored from registers: float32 or accumulated
  bool m_split = false;               // an n_block's iterations split over CTAs; see `convert`
  bool single_n_block = false;        // one n_block: dq is complete and stored directly
  bool short_q = false;               // at most kShortQ queries per head, which alone add to dq
  bool dq_split = false;              // several sums of dq: BackwardParams::dq_splits
  bool wraps = false;                 // n_blocks begin at different iterations: WrappedIterations
  bool split_q_heads = false;         // split by query heads, which accumulate dk and dv in order
  bool captured = false;              // computes gradients of tensors that score_mod reads
  bool captured_per_tile = false;     // also for tiles that read one element per tensor
  bool captured_per_score = false;    // or for elements that every score of a tile reads
  ScoreOptions options = {};

  // For head_dim > 128 registers cannot hold dk and dv of 64 keys per warpgroup. All warpgroups share the same 64 keys;
  // each has some queries for scores and some columns of dk and dv, or a role. P and dS then go through shared memory.
  constexpr bool shared_p() const { return schedule != Schedule::rs && schedule != Schedule::ds_gmem_sub_m; }
  constexpr bool cluster2() const { return schedule == Schedule::cluster2 || warpgroup_roles(); }
  constexpr bool warpgroup_roles() const { return schedule == Schedule::warpgroup_roles; }
  constexpr bool ds_gmem() const { return schedule == Schedule::ds_gmem || q_subtiles(); }
  constexpr bool q_subtiles() const { return schedule == Schedule::ds_gmem_sub_m; }
  constexpr int ctas() const { return cluster2() ? 2 : 1; }
  constexpr int cta_keys() const { return shared_p() ? 64 : 64 * warpgroups; }
  constexpr int tile_n() const { return ctas() * cta_keys(); }
  constexpr int k_box() const { return ds_gmem() ? 64 : cta_keys(); }  // keys or values per TMA box
  constexpr int score_queries() const {
    return q_subtiles() ? tile_m / 2 : shared_p() && !warpgroup_roles() ? tile_m / warpgroups : tile_m;
  }
  constexpr int dk_columns() const { return shared_p() && !warpgroup_roles() ? head_dim / warpgroups : head_dim; }
  constexpr int dv_columns() const { return shared_p() && !warpgroup_roles() ? head_dim_v / warpgroups : head_dim_v; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  // Returns true if scores are more than scaled products and a bias that passes through shared memory.
  constexpr bool has_score_mod() const {
    return options.changes_products() || options.mask_mod || options.block_mask ||
           (options.bias != Bias::none && !stages_bias());
  }
  constexpr bool plain_scores() const { return !has_score_mod() && options.bias == Bias::none && !options.dropout; }
  // Only a bias is added to products. Each warpgroup has a buffer for its keys and an iteration's queries. A separate
  // warp copies the bias.
  constexpr bool stages_bias() const {
    return options.bias != Bias::none && !options.changes_products() && !options.mask_mod && !options.block_mask &&
           !shared_p();
  }
  // The bytes of a staged bias per warpgroup.
  constexpr int bias_bytes() const { return stages_bias() ? 64 * tile_m * bytes_of(options.bias) : 0; }

  // dq of an iteration: each warpgroup that computes it has 64 queries and some of the columns, each warp 16 queries.
  // With few queries only a quarter is added, because additions in the L2 cache limit that kernel.
  static constexpr int kShortQ = 16;
  constexpr int dq_rows() const { return short_q ? kShortQ : tile_m; }
  constexpr int dq_part_threads() const { return short_q ? 32 : 128; }           // per warpgroup
  constexpr int dq_parts() const { return warpgroup_roles() ? 1 : warpgroups; }  // per CTA
  constexpr int dq_threads() const {
    return staged() && !warpgroup_roles() && !stages_bias() ? 3 : 2;
  }  // the threads alternate
  constexpr int dq_row_parts() const { return tile_m / 64; }
  constexpr int dq_columns() const { return head_dim * dq_row_parts() / dq_semaphores(); }
  constexpr int dq_floats() const { return dq_rows() * head_dim; }  // per iteration
  // If true, bulk copies from shared memory add dq. Otherwise threads add dq from registers, and stall if many
  // additions are outstanding. Threads are faster at head_dim 64, where staging takes longer than an iteration. Wide
  // heads have no capacity for staging, and a stored dq needs none.
  constexpr bool staged() const {
    return !ds_gmem() && (warpgroup_roles() || (!shared_p() && !single_n_block && (head_dim > 64 || short_q)));
  }
  // The dq of each warpgroup is added separately.
  constexpr int dq_semaphores() const { return ds_gmem() ? 1 : ctas() * dq_parts(); }
  constexpr int dq_part_floats() const { return dq_floats() / dq_semaphores(); }
  // Fragment order: a thread has two rows and one pair of every 8 columns; three neighbouring threads have the other
  // pairs.
  static constexpr bool kFourHaveRow = true;
  constexpr int postprocess_threads() const {
    return ds_gmem() ? 128 * warpgroups : dq_part_threads() * dq_semaphores();
  }
  constexpr int dq_pairs() const { return dq_columns() / 4; }
  constexpr int postprocess_pairs() const { return dq_split ? 8 : dq_pairs(); }  // pairs per batch
  // Several sums of dq: a thread converts one batch. If the sums are many, groups of threads each add some of them.
  constexpr int dq_sum_groups(int dq_splits) const {
    return dq_split && dq_splits >= 8 && postprocess_threads() >= 128 ? 4 : 1;
  }
  constexpr int postprocess_ctas(int dq_splits) const {  // per m_block
    return dq_pairs() / postprocess_pairs() * dq_sum_groups(dq_splits);
  }
  constexpr int postprocess_sm_threads() const { return dq_split ? 768 : 0; }  // the least that an SM can run at once
  constexpr GradientPair dq_pair(int thread, int n) const {
    const int index = thread / dq_part_threads();
    const GradientPair at = fragment_pair(short_q ? thread % 32 : thread, n);
    if (warpgroup_roles()) return {at.row, warpgroup_role_dq_column(index, at.column)};
    if (dq_row_parts() == 1) return {at.row, index * dq_columns() + at.column};
    return {index * 64 + at.row, at.column};
  }
  // With roles a CTA of a pair computes 96 columns of dq by products of 64 and 32 columns. A product may not cross a
  // block of 64. warpgroup_role_dq_column maps the c-th column. A TMA box holds the keys of the other CTA.
  static constexpr int kDqFirst = 64, kDqRest = 32;
  static constexpr int warpgroup_role_dq_column(int rank, int c) {
    return c < kDqFirst ? (rank == 0 ? 0 : 128) + c : (rank == 0 ? 64 : 96) + c - kDqFirst;
  }
  constexpr int cluster2_columns() const { return warpgroup_roles() ? 128 : head_dim / 2; }
  constexpr int cluster2_column(int rank, int c) const {  // column of the c-th block of 64
    return warpgroup_roles() ? warpgroup_role_dq_column(rank, c) : rank * (head_dim / 2) + c;
  }
  // The n-th pair of a thread in a warpgroup's product of 64 rows.
  static constexpr GradientPair fragment_pair(int thread, int n) {
    return {thread % 128 / 32 * 16 + thread % 32 / 4 + 8 * (n & 1), 8 * (n >> 1) + 2 * (thread & 3)};
  }

  // m_split and spt: DiagonalParts.
  constexpr bool diagonal_parts() const { return m_split && spt && !split_q_heads; }
  // True if a tile may have all iterations of its n_block: without m_split, or before BackwardParams::unsplit_tiles.
  constexpr bool has_unsplit_tiles() const { return !m_split || (schedule == Schedule::rs && !split_q_heads); }
  // m_splits: dk and dv of a part of an n_block's iterations, dk first. bwd_postprocess has one CTA for each kSumFloats
  // of a thread.
  static constexpr int kSumFloats = 16;
  constexpr int dkv_threads() const { return warpgroup_roles() ? 128 : 128 * warpgroups; }
  constexpr int dkv_floats() const { return cta_keys() * (head_dim + head_dim_v); }
  constexpr int dk_sums() const { return dk_columns() / 2 / kSumFloats; }
  constexpr int dkv_accum_ctas() const { return m_split ? dk_sums() + dv_columns() / 2 / kSumFloats : 0; }
  // columns: the columns of dk or dv that a warpgroup has.
  constexpr GradientPair dkv_pair(int thread, int n, int columns) const {
    const int index = thread / 128;
    const GradientPair at = fragment_pair(thread, n);
    if (shared_p()) return {at.row, index * columns + at.column};
    return {index * 64 + at.row, at.column};
  }

  // split_q_heads: one semaphore for dk and one for dv per warpgroup that has a part.
  constexpr int dkv_parts() const { return warpgroup_roles() ? 1 : warpgroups; }
  constexpr int dkv_semaphores() const { return split_q_heads ? 2 * dkv_parts() : 0; }

  // Buffers of dS in shared memory. Wide heads synchronize at two barriers per iteration. With a bias two buffers fit:
  // a warpgroup overwrites a buffer after all warpgroups have computed dq from it (dq_made).
  constexpr int ds_stages() const {
    return warpgroup_roles() || ds_gmem() || (stages_bias() && head_dim > 64) ? 2 : shared_p() ? 1 : 3;
  }
  constexpr int p_stages() const { return ds_gmem() ? 2 : 1; }

  // Registers per thread of the scores role and of the dk and dv roles. Without roles, MMA warpgroups share the
  // registers that the loading warpgroup has released.
  static constexpr int kScoreRegisters = 168, kSumRegisters = 160;
  constexpr int registers() const {
    const int at_launch = 65536 / threads() / 8 * 8;
    const int most = (threads() * at_launch - 128 * load_registers()) / (128 * warpgroups) / 8 * 8;
    return most < 240 ? most : 240;
  }
  constexpr int smem_bytes() const {
    const int keys = cta_keys() * (head_dim + head_dim_v + (cluster2() ? cluster2_columns() : 0));
    const int queries = tile_m * (q_stages * head_dim + dout_stages * head_dim_v);
    const int scores = cta_keys() * tile_m;  // P, if shared, and dS
    return 2 * (keys + queries + ctas() * ds_stages() * scores + (shared_p() ? p_stages() * scores : 512)) +
           (staged() ? 4 * dq_parts() * dq_part_floats() : 0) + warpgroups * bias_bytes() + 8 * dout_stages * tile_m +
           ctas() * 1024;
  }
  // Kernels that compute scores again have the operands of two tiles with the same keys. These kernels also have the
  // sums of a bias's gradient or two numbers per score.
  static constexpr int kScoreStages = 2;
  constexpr int score_threads() const { return 128 * warpgroups; }
  constexpr int score_smem_bytes() const {
    return 2 * (cta_keys() + kScoreStages * tile_m) * (head_dim + head_dim_v) + 1024;
  }
  constexpr int dbias_smem_bytes() const { return score_smem_bytes() + 4 * cta_keys() * tile_m; }
  constexpr int captured_smem_bytes() const { return score_smem_bytes() + 8 * (cta_keys() + 1) * tile_m + 1024; }
  // The kernel that computes dq from dS: an iteration is 64 keys and their dS of a CTA's m_blocks. Two m_blocks per
  // warpgroup halve the reads of keys if registers suffice for both sums. At most max_dq_sum_n_blocks() n_blocks are
  // added in float32, in the order of keys.
  static constexpr int kDqStages = 4;
  constexpr int max_dq_sum_n_blocks() const { return 8192 / cta_keys(); }
  constexpr int dq_m_blocks() const { return head_dim <= 192 ? 2 : 1; }
  constexpr int dq_cta_m_blocks() const { return dq_m_blocks() * warpgroups; }
  constexpr int dq_smem_bytes() const {
    return kDqStages * 2 * k_box() * (head_dim + tile_m * dq_cta_m_blocks()) + 1024;
  }
  static constexpr int kMaxQSubtileDims = 320;  // registers suffice for sums and 32 queries of scores
  // The numbers of column pairs that a warpgroup preloads: LSE before it issues dP, and delta before it waits for dP.
  // Loads of shared memory issued after a product stall until the tensor core has accepted it. Registers limit the
  // numbers.
  constexpr int preloaded_lse() const {
    return q_subtiles()                                                                         ? 1
           : ds_gmem()                                                                          ? 2
           : tile_m == 128 && !options.bounded_right && !options.bounded_left && plain_scores() ? 4
                                                                                                : 0;
  }
  constexpr int preloaded_delta() const { return q_subtiles() ? 1 : !shared_p() && staged() && plain_scores() ? 2 : 0; }
  // Returns true if a warpgroup's columns are whole blocks of 64; otherwise they are half of a block.
  static constexpr bool whole_blocks(int columns) { return columns % 64 == 0 || columns == 32; }
  constexpr bool fits() const {
    if (head_dim % 64 != 0 || head_dim_v % 64 != 0 || smem_bytes() > kMaxSmemBytes) return false;
    const bool is_narrow = head_dim <= 128 && head_dim_v <= 128;
    if (schedule == Schedule::rs ? !is_narrow : is_narrow) return false;
    if (warpgroup_roles())
      return warpgroups == 3 && tile_m == 64 && q_stages > 1 && head_dim == 192 && head_dim_v <= 192 &&
             !has_score_mod() && !options.dropout;
    if (ds_gmem() && (warpgroups != 2 || tile_m != 64)) return false;
    if (q_subtiles() && (head_dim + head_dim_v > kMaxQSubtileDims || options.bias != Bias::none || options.dropout))
      return false;
    if (stages_bias() && tile_m != 64) return false;
    if (short_q && (!staged() || m_split || tile_m != 64)) return false;
    if (diagonal_parts() && (schedule != Schedule::rs || options.varlen || options.block_mask)) return false;
    if (dq_split && (schedule != Schedule::rs || (spt && !diagonal_parts()) || single_n_block || options.block_mask))
      return false;
    if (wraps && (!dq_split || short_q || options.varlen || options.bounded_right || options.bounded_left))
      return false;
    if (single_n_block && (cluster2() || options.block_mask || options.varlen || options.bounded_left || split_q_heads))
      return false;
    return (tile_m == 64 || tile_m == 64 * warpgroups) && whole_blocks(dq_columns()) && whole_blocks(dk_columns()) &&
           whole_blocks(dv_columns()) && (!cluster2() || (dq_columns() == 64 && q_stages > 1));
  }

  constexpr int load_registers() const { return ds_gmem() && !q_subtiles() ? 40 : 24; }  // dS addresses need more
  static constexpr int kPreprocessThreads = 256, kPreprocessQueries = 32;                // bwd_preprocess
  constexpr int preprocess_ctas() const { return tile_m / kPreprocessQueries; }          // per m_block
  static constexpr int kMaxSmemBytes = 232448;                                           // per CTA
};
