// How a Blackwell backward kernel is cut, and what follows from that: sizes, registers, shared and tensor memory.
#pragma once
#include "shared/gradient_order.h"
#include "shared/score_options.h"

// What a tile sums: dk, with dq, and dv. Wide heads leave no room for both in tensor memory: theirs are apart, those of
// dk first; what sums dv is of the kernel alone (for_dv).
enum class Sums { both, dk, dv };

// A value of this type is the kernel's only template parameter. A CTA keeps the 128 keys and values of an n_block and
// goes over the m_blocks that see them, 128 queries each. Scores are transposed: keys in the lanes of tensor memory.
struct Sm100BackwardConfig {
  int head_dim = 128, head_dim_v = 128;  // the problem's, rounded up to multiples of 16; apart, or in a pair, of 64
  int q_stages = 2, dout_stages = 1;     // steps of queries, and of dout, that are in shared memory at once
  int dq_stages = 2;                     // 32 columns of a step's dq each, on their way to memory
  bool pair = false;                     // two CTAs multiply together, 128 of an n_block's keys each
  Sums sums = Sums::both;
  bool from_diagonal = false;  // steps begin where the mask does: tile/key_tile.cuh
  bool dropout = false;
  bool direct = false;               // dk and dv go from registers to memory: float32, or added to what is there
  bool captured = false;             // gradients of what score_mod reads are wanted
  bool sums_tiles = false;           // and main adds those of tiles that read one element of each tensor
  bool block_mask = false;           // steps are those that lists name: tile/key_steps.cuh
  bool f16 = false;                  // elements are float16, else bfloat16
  bool left = false, right = false;  // a query may not see all keys before, after it (causal: right)
  bool varlen = false;               // lengths are read on the device: cu_seqlens or seqused
  bool unscaled = false;             // scale <= 0
  bool softcap = false, alibi = false;
  Bias bias = Bias::none;
  bool score_mod = false, mask_mod = false;  // functions that were printed for this kernel: tile/mod_functions.cuh

  static constexpr bool split = false;  // no n_block's steps are split over CTAs

  static constexpr int tile_m = 128;
  static constexpr int kCtaKeys = 128;
  constexpr int ctas() const { return pair ? 2 : 1; }
  constexpr int tile_n() const { return ctas() * kCtaKeys; }
  static constexpr int threads() { return 512; }
  constexpr bool apart() const { return sums != Sums::both; }
  constexpr bool makes_dk() const { return sums != Sums::dv; }
  constexpr bool makes_dv() const { return sums != Sums::dk; }
  constexpr Sm100BackwardConfig for_dv() const {
    Sm100BackwardConfig t = *this;
    t.sums = Sums::dv;
    return t;
  }
  constexpr bool has_score_mod() const {
    return unscaled || softcap || alibi || bias != Bias::none || score_mod || mask_mod || block_mask;
  }

  // Whether scores that a mask hides from all keys of a warp are passed over. What counts is the branch: ptxas makes
  // addresses of a bias ahead of their use, as far as one, and beside dropout that spilled.
  constexpr bool branches_at_scores() const { return pair && dropout && bias != Bias::none; }

  // Keys and values beyond a sequence, queries and dout too, have to be cleared before they are multiplied.
  constexpr bool relays() const { return varlen || pair; }

  // Two warpgroups compute, each half of a step's queries for all keys.
  static constexpr int kComputing = 2;
  static constexpr int queries_of_warpgroup() { return tile_m / kComputing; }
  // These are two runs of 32, the first queries of which are given here: of a pair every other run, so that the second
  // halves of S and of dP are free when all scores have been read.
  static constexpr int kRun = 32;
  constexpr int run_begin(int warpgroup, int run) const {
    return kRun * (pair ? run * kComputing + warpgroup : warpgroup * kComputing + run);
  }

  // 128 rows of 64 columns. In shared memory there are whole ones.
  static constexpr int kBlockBytes = 16384;
  constexpr int k_blocks() const { return (head_dim + 63) / 64; }
  constexpr int v_blocks() const { return (head_dim_v + 63) / 64; }
  constexpr int k_columns() const { return 64 * k_blocks(); }
  constexpr int v_columns() const { return 64 * v_blocks(); }

  // A thread stores so many columns of dk or dv at once.
  constexpr int stored_columns() const { return head_dim % 32 == 0 && head_dim_v % 32 == 0 ? 32 : 16; }

  // dq of a step is added to memory in parts, a row in each thread.
  constexpr int dq_part_columns() const { return apart() || head_dim % 32 != 0 ? 16 : 32; }
  constexpr int dq_part_floats() const { return tile_m * dq_part_columns(); }
  constexpr int dq_stages_bytes() const { return dq_stages * dq_part_floats() * 4; }
  constexpr int dq_columns() const { return head_dim / ctas(); }  // of a thread
  constexpr int dq_floats() const { return tile_m * head_dim; }   // of a step
  constexpr int dq_tickets() const { return 1; }                  // of an m_block
  constexpr int ticket_counts() const { return ctas(); }          // of an n_block
  constexpr int convert_threads() const { return pair || head_dim > 128 ? 256 : 128; }
  constexpr int dq_pairs() const { return dq_floats() / convert_threads() / 2; }
  static constexpr int convert_pairs() { return 8; }  // that are converted at once: more take longer to compile
  static constexpr int dq_part_threads() { return 128; }
  static constexpr bool kFourHaveRow = false;  // each thread its own
  // Of a pair each CTA has the 64 queries of one warpgroup: in lanes 64 to 127 again, the other half of their columns.
  constexpr GradientPair dq_pair(int thread, int n) const {
    if (!pair) return {thread % 128, 2 * (thread / 128 * dq_pairs() + n)};
    const int run = thread % q_box_rows() / kRun;
    return {run_begin(thread / 128, run) + thread % kRun, thread % 128 / 64 * dq_columns() + 2 * n};
  }

  // Columns of tensor memory. P and dS, two elements in a column, take the places of the S and dP that they are made
  // from, each warpgroup's in that of its own: it may still read the other's. dQ takes the place of dP where there is
  // no other (d128), of a pair the second half of S, when all of S has been read:
  //
  //    0    S, P          [128]              S, P           [64]
  //    64                                    S, dQ          [64]
  //    128  dP, dS, dQ    [128]              dP, dS         [128]
  //    256  dV            [head_dim_v]       dV             [128]
  //    ...  dK            [head_dim]         dK             [128]
  //    ...  dQ            [head_dim], where 512 columns suffice
  //
  // Apart, dQ takes the places of both, the columns that are over 128 that of dP, the last 128 that of S, which is free
  // as soon as scores have been read. What sums dv has two places for S, of even and odd steps:
  //
  //    0    S, dQ         [128]           S, P   [128]
  //    128  dP, dS, dQ    [128]           S, P   [128]
  //    256  dK            [head_dim]      dV     [head_dim_v]
  static constexpr int kTmemColumns = 512;
  static constexpr unsigned tmem_s() { return 0; }
  static constexpr unsigned tmem_dp() { return tile_m; }
  static constexpr unsigned tmem_dv() { return 2 * tile_m; }
  constexpr int s_slots() const { return sums == Sums::dv ? 2 : 1; }
  // Signals of a step's P: of a pair one for each run, so that dV is begun with the first.
  constexpr int p_parts() const { return pair ? 2 : s_slots(); }
  constexpr unsigned tmem_dk() const { return tmem_dv() + (apart() ? 0 : head_dim_v); }
  constexpr bool dq_has_place() const { return !apart() && tmem_dk() + 2 * head_dim <= kTmemColumns; }
  // Pieces of dQ that are multiplied and taken one after the other, each with a place of its own.
  constexpr int dq_pieces() const { return apart() && head_dim > tile_m ? 2 : 1; }
  constexpr int dq_piece_begin(int piece) const {
    if (piece == dq_pieces()) return dq_columns();
    return piece > 0 ? head_dim - tile_m : 0;
  }
  constexpr unsigned tmem_dq(int piece = 0) const {
    if (apart()) return piece == dq_pieces() - 1 ? tmem_s() : tmem_dp();
    if (pair) return tmem_s() + tile_m / 2;
    return dq_has_place() ? tmem_dk() + head_dim : tmem_dp();
  }
  // All scores of a step are read before the first is used: dQ waits for their place.
  constexpr bool reads_scores_ahead() const { return sums == Sums::dk || pair; }
  constexpr bool tmem_fits() const {
    if (apart()) return tmem_dv() + (head_dim > head_dim_v ? head_dim : head_dim_v) <= kTmemColumns;
    return tmem_dk() + head_dim <= kTmemColumns && head_dim <= tile_m;
  }
  // Where a warpgroup's run of P, or of dS, is: in the place of its first.
  constexpr unsigned tmem_rounded(unsigned at, int warpgroup, int run) const {
    return at + run_begin(warpgroup, 0) + run * (kRun / 2);
  }
  // The 16 queries with number n of P, or of dS.
  constexpr unsigned tmem_operand(unsigned at, int n) const {
    const int runs = n * 16 / kRun, warpgroup = pair ? runs % kComputing : runs / kComputing;
    const int run = pair ? runs / kComputing : runs % kComputing;
    return tmem_rounded(at, warpgroup, run) + n * 16 % kRun / 2;
  }

  // Of a pair each CTA keeps what it gives to products, of a step's queries and dout: half of the rows for S and dP,
  // half of the columns for dK and dV; and for dQ half of the columns of all keys, and half of the queries of dS of all
  // keys, besides the half that it sends to the other CTA.
  constexpr int q_box_rows() const { return tile_m / ctas(); }
  static constexpr int kPairBlocks = 2 + 2 + 2 + 4 + 2 + 1;  // k, v, kt; q, qt, dout, doutt; ds; ds_sent

  // Apart, queries and dout come in blocks of 64 columns, each once for every product that wants it: as many at once as
  // there is room for beside keys and, for dk, values, dS and dq. What sums dv leaves a block's place free, for its
  // barriers: those of dk may still get their last arrivals.
  static constexpr int kBlocksApart = 14;
  constexpr int ring_blocks() const {
    if (!apart()) return 1;
    const int for_dk = v_blocks() + tile_m / 64 + dq_stages_bytes() / kBlockBytes;
    return kBlocksApart - k_blocks() - (makes_dk() ? for_dk : 1);
  }

  // Beside the blocks: -lse and delta of each step of queries, the tile at hand, barriers.
  constexpr bool stats_alone() const { return pair || apart(); }  // with barriers of their own
  constexpr int stats_slots() const { return stats_alone() ? 2 : q_stages; }
  constexpr int stats_bytes() const { return stats_slots() * 2 * tile_m * 4; }
  static constexpr int kSmallBytes = 1024;
  constexpr int smem_bytes() const {
    if (pair) return (kPairBlocks + dq_stages) * kBlockBytes + stats_bytes() + kSmallBytes;
    if (apart()) return kBlocksApart * kBlockBytes + stats_bytes() + kSmallBytes;
    const int blocks = (1 + q_stages) * k_blocks() + (1 + dout_stages) * v_blocks() + tile_m / 64;
    return blocks * kBlockBytes + dq_stages_bytes() + stats_bytes() + kSmallBytes;
  }

  // Kernels that make scores anew, two warpgroups each: a tile's operands, of both products where there is room; and
  // the sums of a bias's gradient, or two numbers of each score of half of a tile.
  static constexpr int kScoreWarpgroups = 2;
  static constexpr int score_threads() { return 128 * kScoreWarpgroups; }
  constexpr int score_columns() const { return k_columns() > v_columns() ? k_columns() : v_columns(); }
  constexpr int score_places() const { return score_columns() > 128 ? 1 : 2; }
  constexpr int score_smem_bytes() const {
    return score_places() * 2 * (kCtaKeys + tile_m) * score_columns() + 8 * tile_m + 1024;
  }
  constexpr int dbias_smem_bytes() const { return score_smem_bytes() + 4 * kCtaKeys * tile_m; }
  constexpr int captured_smem_bytes() const { return score_smem_bytes() + 8 * (kCtaKeys + 1) * (tile_m / 2) + 1024; }

  // Registers of a thread, by role.
  constexpr int compute_registers() const { return pair ? 184 : 192; }
  constexpr int dq_registers() const { return pair ? 88 : 72; }
  static constexpr int kOtherRegisters = 56;
  constexpr bool registers_fit() const {
    return kComputing * compute_registers() + dq_registers() + kOtherRegisters <= 65536 / 128;
  }

  constexpr bool fits() const {
    if (pair && (head_dim != 128 || head_dim_v != 128 || q_stages + dout_stages > 2)) return false;
    const int step = pair || apart() ? 64 : 16;
    return !(pair && apart()) && head_dim % step == 0 && head_dim_v % step == 0 && tmem_fits() && ring_blocks() > 0 &&
           smem_bytes() <= kMaxSmemBytes;
  }

  static constexpr int kDeltaThreads = 256;            // of the kernel that comes before
  static constexpr int delta_queries() { return 32; }  // whose code is written out: more take longer to compile
  static constexpr int kMaxSmemBytes = 232448;         // of a block
};
