// How a Hopper backward kernel is cut, and what follows from that: sizes, registers, shared memory.
#pragma once
#include "shared/gradient_order.h"
#include "shared/score_options.h"

// A value of this type is the kernel's only template parameter. A CTA, or pair of CTAs, keeps the keys and values of an
// n_block, tile_n() of them, and goes over the m_blocks that see them, tile_m queries each.
struct Sm90BackwardConfig {
  int head_dim = 128, head_dim_v = 128;  // the problem's, rounded up to multiples of 64
  int warpgroups = 2;                    // that compute; each has 64 keys, or a role
  int tile_m = 64;                       // queries of a step: 64, or 64 for each warpgroup
  int q_stages = 3, dout_stages = 2;     // steps of queries, and of dout, that are in shared memory at once
  bool pair = false;           // two CTAs, each with keys of its own, exchange dS: each makes dq of half of the columns
  bool roles = false;          // of warpgroups: one makes scores and dq, one sums dv, one dk
  bool strips = false;         // dS goes to memory, a strip of n_blocks at a time: sm90/backward/dq.cuh makes dq of it
  bool halves = false;         // then a step's queries are gone over in two halves, and warpgroups have their own keys
  bool from_diagonal = false;  // steps begin where the mask does: tile/key_tile.cuh
  bool dropout = false;
  bool direct = false;       // dk and dv are float32, or added to what is there: stored in pairs of columns
  bool split = false;        // the steps of an n_block are split over CTAs, whose dk and dv `convert` sums
  bool single = false;       // there is one n_block: dq of a step is all of it, and stored as it is
  bool few_queries = false;  // there are no more than kFewQueries of a head: dq of others is not added
  bool by_head = false;   // split by query heads: what each sums of dk and dv is added to what the heads before it have
  bool captured = false;  // gradients of what score_mod reads are wanted
  bool sums_tiles = false;           // and main adds those of tiles that read one element of each tensor
  bool sums_scores = false;          // or all of them, which are elements that all of a tile read
  bool block_mask = false;           // steps are those that lists name: tile/key_steps.cuh
  bool f16 = false;                  // elements are float16, else bfloat16
  bool left = false, right = false;  // a query may not see all keys before, after it (causal: right)
  bool varlen = false;               // lengths are read on the device: cu_seqlens or seqused
  bool unscaled = false;             // scale <= 0
  bool softcap = false, alibi = false;
  Bias bias = Bias::none;
  bool score_mod = false, mask_mod = false;  // functions that were printed for this kernel: tile/mod_functions.cuh

  // Wide heads leave no room for dk and dv of 64 keys in a warpgroup: all have the same 64, each has some of the
  // queries of a step for scores, and some of the columns of dk and dv; or all of either, and one the scores (roles). P
  // and dS then go through shared memory.
  constexpr bool wide() const { return (head_dim > 128 || head_dim_v > 128) && !halves; }
  constexpr int ctas() const { return pair ? 2 : 1; }
  constexpr int cta_keys() const { return wide() ? 64 : 64 * warpgroups; }
  constexpr int tile_n() const { return ctas() * cta_keys(); }
  constexpr int k_box() const { return strips ? 64 : cta_keys(); }  // of keys or values, that TMA brings at once
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
  // A bias that alone is added to products. Each warpgroup has a place for its keys and a step's queries; a warp beside
  // those that load and add all else copies it.
  constexpr bool stages_bias() const {
    return bias != Bias::none && !unscaled && !softcap && !alibi && !score_mod && !mask_mod && !block_mask && !wide();
  }
  constexpr int bias_bytes() const { return stages_bias() ? 64 * tile_m * bytes_of(bias) : 0; }  // of a warpgroup

  // dq of a step: each warpgroup that makes it has 64 queries of it and some of the columns, a warp 16 of them. Beside
  // few queries what is added is a quarter, and it is what the L2 cache adds that binds there.
  static constexpr int kFewQueries = 16;
  constexpr int dq_rows() const { return few_queries ? kFewQueries : tile_m; }
  constexpr int dq_part_threads() const { return few_queries ? 32 : 128; }  // of a warpgroup, that have some
  constexpr int dq_parts() const { return roles ? 1 : warpgroups; }         // of a CTA
  constexpr int dq_threads() const { return staged() && !roles && !stages_bias() ? 3 : 2; }  // take turns to add them
  constexpr int dq_row_parts() const { return tile_m / 64; }
  constexpr int dq_columns() const { return head_dim * dq_row_parts() / dq_tickets(); }
  constexpr int dq_floats() const { return dq_rows() * head_dim; }  // of a step
  // Bulk copies of shared memory add it, else threads from their registers: those stall where many are under way. At
  // head_dim 64, where the way through shared memory takes longer than a step of many queries leaves, threads are the
  // faster; wide heads have no room. Where dq is stored it needs none.
  constexpr bool staged() const { return !strips && (roles || (!wide() && !single && (head_dim > 64 || few_queries))); }
  // Each warpgroup's is added by itself.
  constexpr int dq_tickets() const { return strips ? 1 : ctas() * dq_parts(); }
  constexpr int ticket_counts() const { return 1; }  // of an n_block
  constexpr int dq_part_floats() const { return dq_floats() / dq_tickets(); }
  // In the order of fragments: a thread has two rows, of 8 columns the pair that the other three of four have not.
  static constexpr bool kFourHaveRow = true;
  constexpr int convert_threads() const { return strips ? 128 * warpgroups : dq_part_threads() * dq_tickets(); }
  constexpr int dq_pairs() const { return dq_columns() / 4; }
  constexpr int convert_pairs() const { return dq_pairs(); }  // that are converted at once
  constexpr GradientPair dq_pair(int thread, int n) const {
    const int index = thread / dq_part_threads();
    const GradientPair at = pair_of_fragment(few_queries ? thread % 32 : thread, n);
    if (roles) return {at.row, role_dq_column(index, at.column)};
    if (dq_row_parts() == 1) return {at.row, index * dq_columns() + at.column};
    return {index * 64 + at.row, at.column};
  }
  // With roles a CTA of a pair makes dq of 96 columns by products of 64 and 32, neither of which may cross from one
  // block of 64 columns to the next: the c-th of them is column ... of dq. A box is what is loaded of the other's keys.
  static constexpr int kDqFirst = 64, kDqRest = 32;
  static constexpr int role_dq_column(int rank, int c) {
    return c < kDqFirst ? (rank == 0 ? 0 : 128) + c : (rank == 0 ? 64 : 96) + c - kDqFirst;
  }
  constexpr int pair_columns() const { return roles ? 128 : head_dim / 2; }
  constexpr int pair_column(int rank, int c) const {  // of its c-th, in steps of 64
    return roles ? role_dq_column(rank, c) : rank * (head_dim / 2) + c;
  }
  // The n-th pair of a thread of a warpgroup's product of 64 rows.
  static constexpr GradientPair pair_of_fragment(int thread, int n) {
    return {thread % 128 / 32 * 16 + thread % 32 / 4 + 8 * (n & 1), 8 * (n >> 1) + 2 * (thread & 3)};
  }

  // dk and dv of a part of an n_block's steps, dk first, where they are split; `convert` has a CTA for each kSumFloats
  // of a thread.
  static constexpr int kSumFloats = 16;
  constexpr int key_threads() const { return roles ? 128 : 128 * warpgroups; }
  constexpr int key_floats() const { return cta_keys() * (head_dim + head_dim_v); }
  constexpr int dk_sums() const { return dk_columns() / 2 / kSumFloats; }
  constexpr int key_sums() const { return split ? dk_sums() + dv_columns() / 2 / kSumFloats : 0; }
  // columns: of dk, or dv, that a warpgroup has.
  constexpr GradientPair key_pair(int thread, int n, int columns) const {
    const int index = thread / 128;
    const GradientPair at = pair_of_fragment(thread, n);
    if (wide()) return {at.row, index * columns + at.column};
    return {index * 64 + at.row, at.column};
  }

  // by_head: for dk, and for dv, of each warpgroup that has some.
  constexpr int key_parts() const { return roles ? 1 : warpgroups; }
  constexpr int key_tickets() const { return by_head ? 2 * key_parts() : 0; }

  // Steps of dS that are in shared memory at once: wide ones meet at two barriers in a step. Beside a bias there is
  // room for two, and a warpgroup writes one when all have made dq of what was in its place (dq_made).
  constexpr int ds_stages() const { return roles || strips || (stages_bias() && head_dim > 64) ? 2 : wide() ? 1 : 3; }
  constexpr int p_stages() const { return strips ? 2 : 1; }

  // Of a thread that makes scores, or sums, and of a computing one where there are no roles, after the loading
  // warpgroup has given its own away.
  static constexpr int kScoreRegisters = 168, kSumRegisters = 160;
  constexpr int registers() const {
    const int at_launch = 65536 / threads() / 8 * 8;
    const int most = (threads() * at_launch - 128 * load_registers()) / (128 * warpgroups) / 8 * 8;
    return most < 240 ? most : 240;
  }
  constexpr int smem_bytes() const {
    const int keys = cta_keys() * (head_dim + head_dim_v + (pair ? pair_columns() : 0));
    const int queries = tile_m * (q_stages * head_dim + dout_stages * head_dim_v);
    const int scores = cta_keys() * tile_m;  // P, where it is shared, and dS
    return 2 * (keys + queries + ctas() * ds_stages() * scores + (wide() ? p_stages() * scores : 512)) +
           (staged() ? 4 * dq_parts() * dq_part_floats() : 0) + warpgroups * bias_bytes() + 8 * dout_stages * tile_m +
           ctas() * 1024;
  }
  // Of kernels that make scores anew: the operands of two tiles with the same keys; and the sums of a bias's gradient,
  // or two numbers of each score.
  static constexpr int kScoreStages = 2;
  constexpr int score_threads() const { return 128 * warpgroups; }
  constexpr int score_smem_bytes() const {
    return 2 * (cta_keys() + kScoreStages * tile_m) * (head_dim + head_dim_v) + 1024;
  }
  constexpr int dbias_smem_bytes() const { return score_smem_bytes() + 4 * cta_keys() * tile_m; }
  constexpr int captured_smem_bytes() const { return score_smem_bytes() + 8 * (cta_keys() + 1) * tile_m + 1024; }
  // Of the kernel that makes dq of dS: a step is 64 keys, and their dS of a CTA's m_blocks. Two for each warpgroup read
  // keys half as often, where registers suffice for both sums. Sums of so many n_blocks are added in float32, in the
  // order of keys.
  static constexpr int kDqStages = 4;
  constexpr int dq_sum_n_blocks() const { return 8192 / cta_keys(); }
  constexpr int dq_m_blocks() const { return head_dim <= 192 ? 2 : 1; }
  constexpr int dq_cta_m_blocks() const { return dq_m_blocks() * warpgroups; }
  constexpr int dq_smem_bytes() const {
    return kDqStages * 2 * k_box() * (head_dim + tile_m * dq_cta_m_blocks()) + 1024;
  }
  static constexpr int kMostHalvesDims = 320;  // whose sums leave registers for the scores of 32 queries
  // Of how many pairs of columns a warpgroup reads the log-sum-exp before it issues dP, and delta before it waits for
  // that: what reads shared memory behind products waits until the tensor core has taken them. By the clock, as far as
  // registers go.
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

  constexpr int load_registers() const { return strips && !halves ? 40 : 24; }  // where dS goes is much to know
  static constexpr int kDeltaThreads = 256;                                     // of the kernel that comes before
  constexpr int delta_queries() const { return tile_m; }                        // whose code is written out
  static constexpr int kMaxSmemBytes = 232448;                                  // of a block
};
