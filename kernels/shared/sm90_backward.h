// The configuration of a Hopper backward kernel, and the sizes, registers and shared memory that follow from it.
#pragma once
#include "shared/gradient_order.h"
#include "shared/score_options.h"

// The kernel's only template parameter. A CTA or CTA pair keeps the tile_n() keys and values of an n_block. It iterates
// over the m_blocks that see them, tile_m queries each.
struct Sm90BackwardConfig {
  int head_dim = 128, head_dim_v = 128;  // rounded up to multiples of 64
  int warpgroups = 2;                    // MMA warpgroups; each has 64 keys or a role
  int tile_m = 64;                       // queries per iteration: 64, or 64 per warpgroup
  int q_stages = 3, dout_stages = 2;     // iterations in shared memory
  bool pair = false;                     // two CTAs exchange dS; each computes half of dq's columns
  bool roles = false;                    // warpgroup roles: one scores and dq, one dv, one dk
  bool strips = false;                   // dS goes to global memory: sm90/backward/dq.cuh
  bool halves = false;                   // with strips: two query halves, keys split by warpgroup
  bool from_diagonal = false;            // iterations start at the diagonal: tile/key_tile.cuh
  bool dropout = false;
  bool direct = false;               // dk, dv stored from registers: float32 or accumulated
  bool split = false;                // an n_block's iterations split over CTAs; see `convert`
  bool single = false;               // one n_block: dq is complete and stored directly
  bool few_queries = false;          // at most kFewQueries per head; only these add to dq
  bool by_head = false;              // split by query heads, which accumulate dk and dv in order
  bool captured = false;             // computes gradients of tensors that score_mod reads
  bool sums_tiles = false;           // also for tiles that read one element per tensor
  bool sums_scores = false;          // or for elements that every score of a tile reads
  bool block_mask = false;           // iterations come from a list: tile/key_steps.cuh
  bool f16 = false;                  // elements are float16, else bfloat16
  bool left = false, right = false;  // bounded visibility before, after a query
  bool varlen = false;               // lengths are read on the device
  bool unscaled = false;             // scale <= 0
  bool softcap = false, alibi = false;
  Bias bias = Bias::none;
  bool score_mod = false, mask_mod = false;  // printed functions: tile/mod_functions.cuh

  // Wide heads: registers cannot hold dk and dv of 64 keys per warpgroup. All warpgroups share the same 64 keys; each
  // has some queries for scores and some columns of dk and dv, or a role. P and dS then go through shared memory.
  constexpr bool wide() const { return (head_dim > 128 || head_dim_v > 128) && !halves; }
  constexpr int ctas() const { return pair ? 2 : 1; }
  constexpr int cta_keys() const { return wide() ? 64 : 64 * warpgroups; }
  constexpr int tile_n() const { return ctas() * cta_keys(); }
  constexpr int k_box() const { return strips ? 64 : cta_keys(); }  // keys or values per TMA box
  constexpr int score_queries() const { return halves ? tile_m / 2 : wide() && !roles ? tile_m / warpgroups : tile_m; }
  constexpr int dk_columns() const { return wide() && !roles ? head_dim / warpgroups : head_dim; }
  constexpr int dv_columns() const { return wide() && !roles ? head_dim_v / warpgroups : head_dim_v; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  // Scores are more than scaled products and a bias that comes through shared memory.
  constexpr bool has_score_mod() const {
    return unscaled || softcap || alibi || score_mod || mask_mod || block_mask ||
           (bias != Bias::none && !stages_bias());
  }
  constexpr bool plain_scores() const { return !has_score_mod() && bias == Bias::none && !dropout; }
  // Only a bias is added to products. Each warpgroup has a buffer for its keys and an iteration's queries. A separate
  // warp copies the bias.
  constexpr bool stages_bias() const {
    return bias != Bias::none && !unscaled && !softcap && !alibi && !score_mod && !mask_mod && !block_mask && !wide();
  }
  constexpr int bias_bytes() const { return stages_bias() ? 64 * tile_m * bytes_of(bias) : 0; }  // per warpgroup

  // dq of an iteration: each warpgroup that computes it has 64 queries and some of the columns, each warp 16 queries.
  // With few queries only a quarter is added, because additions in the L2 cache limit that kernel.
  static constexpr int kFewQueries = 16;
  constexpr int dq_rows() const { return few_queries ? kFewQueries : tile_m; }
  constexpr int dq_part_threads() const { return few_queries ? 32 : 128; }                   // per warpgroup
  constexpr int dq_parts() const { return roles ? 1 : warpgroups; }                          // per CTA
  constexpr int dq_threads() const { return staged() && !roles && !stages_bias() ? 3 : 2; }  // they alternate
  constexpr int dq_row_parts() const { return tile_m / 64; }
  constexpr int dq_columns() const { return head_dim * dq_row_parts() / dq_tickets(); }
  constexpr int dq_floats() const { return dq_rows() * head_dim; }  // per iteration
  // Bulk copies from shared memory add dq, or threads from their registers, which stall if many additions are
  // outstanding. Threads are faster at head_dim 64, where staging takes longer than an iteration of many queries. Wide
  // heads have no capacity for staging, and a stored dq needs none.
  constexpr bool staged() const { return !strips && (roles || (!wide() && !single && (head_dim > 64 || few_queries))); }
  // The dq of each warpgroup is added separately.
  constexpr int dq_tickets() const { return strips ? 1 : ctas() * dq_parts(); }
  constexpr int ticket_counts() const { return 1; }  // per n_block
  constexpr int dq_part_floats() const { return dq_floats() / dq_tickets(); }
  // Fragment order: a thread has two rows and one pair of every 8 columns; three neighbouring threads have the other
  // pairs.
  static constexpr bool kFourHaveRow = true;
  constexpr int convert_threads() const { return strips ? 128 * warpgroups : dq_part_threads() * dq_tickets(); }
  constexpr int dq_pairs() const { return dq_columns() / 4; }
  constexpr int convert_pairs() const { return dq_pairs(); }  // pairs per batch
  constexpr GradientPair dq_pair(int thread, int n) const {
    const int index = thread / dq_part_threads();
    const GradientPair at = pair_of_fragment(few_queries ? thread % 32 : thread, n);
    if (roles) return {at.row, role_dq_column(index, at.column)};
    if (dq_row_parts() == 1) return {at.row, index * dq_columns() + at.column};
    return {index * 64 + at.row, at.column};
  }
  // With roles a CTA of a pair computes 96 columns of dq by products of 64 and 32 columns. A product may not cross a
  // block of 64. role_dq_column maps the c-th column. A box holds the loaded keys of the other CTA.
  static constexpr int kDqFirst = 64, kDqRest = 32;
  static constexpr int role_dq_column(int rank, int c) {
    return c < kDqFirst ? (rank == 0 ? 0 : 128) + c : (rank == 0 ? 64 : 96) + c - kDqFirst;
  }
  constexpr int pair_columns() const { return roles ? 128 : head_dim / 2; }
  constexpr int pair_column(int rank, int c) const {  // column of its c-th block of 64
    return roles ? role_dq_column(rank, c) : rank * (head_dim / 2) + c;
  }
  // The n-th pair of a thread in a warpgroup's product of 64 rows.
  static constexpr GradientPair pair_of_fragment(int thread, int n) {
    return {thread % 128 / 32 * 16 + thread % 32 / 4 + 8 * (n & 1), 8 * (n >> 1) + 2 * (thread & 3)};
  }

  // Splits: dk and dv of a part of an n_block's iterations, dk first. `convert` has one CTA for each kSumFloats of a
  // thread.
  static constexpr int kSumFloats = 16;
  constexpr int key_threads() const { return roles ? 128 : 128 * warpgroups; }
  constexpr int key_floats() const { return cta_keys() * (head_dim + head_dim_v); }
  constexpr int dk_sums() const { return dk_columns() / 2 / kSumFloats; }
  constexpr int key_sums() const { return split ? dk_sums() + dv_columns() / 2 / kSumFloats : 0; }
  // columns: the columns of dk or dv that a warpgroup has.
  constexpr GradientPair key_pair(int thread, int n, int columns) const {
    const int index = thread / 128;
    const GradientPair at = pair_of_fragment(thread, n);
    if (wide()) return {at.row, index * columns + at.column};
    return {index * 64 + at.row, at.column};
  }

  // by_head: one semaphore for dk and one for dv per warpgroup that has a part.
  constexpr int key_parts() const { return roles ? 1 : warpgroups; }
  constexpr int key_tickets() const { return by_head ? 2 * key_parts() : 0; }

  // Buffers of dS in shared memory. Wide heads synchronize at two barriers per iteration. With a bias two buffers fit:
  // a warpgroup overwrites one after all have computed dq from it (dq_made).
  constexpr int ds_stages() const { return roles || strips || (stages_bias() && head_dim > 64) ? 2 : wide() ? 1 : 3; }
  constexpr int p_stages() const { return strips ? 2 : 1; }

  // Registers per thread of the scores role and of the dk and dv roles. Without roles, MMA warpgroups share the
  // registers that the loading warpgroup has released.
  static constexpr int kScoreRegisters = 168, kSumRegisters = 160;
  constexpr int registers() const {
    const int at_launch = 65536 / threads() / 8 * 8;
    const int most = (threads() * at_launch - 128 * load_registers()) / (128 * warpgroups) / 8 * 8;
    return most < 240 ? most : 240;
  }
  constexpr int smem_bytes() const {
    const int keys = cta_keys() * (head_dim + head_dim_v + (pair ? pair_columns() : 0));
    const int queries = tile_m * (q_stages * head_dim + dout_stages * head_dim_v);
    const int scores = cta_keys() * tile_m;  // P, if shared, and dS
    return 2 * (keys + queries + ctas() * ds_stages() * scores + (wide() ? p_stages() * scores : 512)) +
           (staged() ? 4 * dq_parts() * dq_part_floats() : 0) + warpgroups * bias_bytes() + 8 * dout_stages * tile_m +
           ctas() * 1024;
  }
  // Kernels that compute scores again have the operands of two tiles with the same keys. They also have the sums of a
  // bias's gradient or two numbers per score.
  static constexpr int kScoreStages = 2;
  constexpr int score_threads() const { return 128 * warpgroups; }
  constexpr int score_smem_bytes() const {
    return 2 * (cta_keys() + kScoreStages * tile_m) * (head_dim + head_dim_v) + 1024;
  }
  constexpr int dbias_smem_bytes() const { return score_smem_bytes() + 4 * cta_keys() * tile_m; }
  constexpr int captured_smem_bytes() const { return score_smem_bytes() + 8 * (cta_keys() + 1) * tile_m + 1024; }
  // The kernel that computes dq from dS: an iteration is 64 keys and their dS of a CTA's m_blocks. Two m_blocks per
  // warpgroup halve the reads of keys if registers suffice for both sums. dq_sum_n_blocks() n_blocks are added in
  // float32, in the order of keys.
  static constexpr int kDqStages = 4;
  constexpr int dq_sum_n_blocks() const { return 8192 / cta_keys(); }
  constexpr int dq_m_blocks() const { return head_dim <= 192 ? 2 : 1; }
  constexpr int dq_cta_m_blocks() const { return dq_m_blocks() * warpgroups; }
  constexpr int dq_smem_bytes() const {
    return kDqStages * 2 * k_box() * (head_dim + tile_m * dq_cta_m_blocks()) + 1024;
  }
  static constexpr int kMostHalvesDims = 320;  // registers suffice for sums and 32 queries of scores
  // The number of column pairs whose LSE a warpgroup preloads before it issues dP, and whose delta before it waits for
  // dP. Loads of shared memory issued after a product stall until the tensor core has accepted it. Limited by
  // registers.
  constexpr int held_lse() const {
    return halves ? 1 : strips ? 2 : tile_m == 128 && !right && !left && plain_scores() ? 4 : 0;
  }
  constexpr int held_delta() const { return halves ? 1 : !wide() && staged() && plain_scores() ? 2 : 0; }
  // A warpgroup's columns are blocks of 64, or half of one.
  static constexpr bool whole_blocks(int columns) { return columns % 64 == 0 || columns == 32; }
  constexpr bool fits() const {
    if (head_dim % 64 != 0 || head_dim_v % 64 != 0 || smem_bytes() > kMaxSmemBytes) return false;
    if (roles)
      return pair && warpgroups == 3 && tile_m == 64 && q_stages > 1 && head_dim == 192 && head_dim_v <= 192 &&
             !has_score_mod() && !dropout;
    if (strips && (wide() == halves || roles || pair || warpgroups != 2 || tile_m != 64)) return false;
    if (halves && (!strips || head_dim + head_dim_v > kMostHalvesDims || bias != Bias::none || dropout)) return false;
    if (stages_bias() && tile_m != 64) return false;
    if (few_queries && (!staged() || roles || split || tile_m != 64)) return false;
    if (single && (pair || block_mask || varlen || left || by_head)) return false;
    return (tile_m == 64 || tile_m == 64 * warpgroups) && whole_blocks(dq_columns()) && whole_blocks(dk_columns()) &&
           whole_blocks(dv_columns()) && (!pair || (wide() && dq_columns() == 64 && q_stages > 1));
  }

  constexpr int load_registers() const { return strips && !halves ? 40 : 24; }  // dS addresses need more
  static constexpr int kDeltaThreads = 256;                                     // the preceding kernel's
  constexpr int delta_queries() const { return tile_m; }                        // unrolled
  static constexpr int kMaxSmemBytes = 232448;                                  // per CTA
};
