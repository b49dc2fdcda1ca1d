// The configuration of a Blackwell backward kernel, and the sizes, registers, shared and tensor memory that follow from
// it.
#pragma once
#include "config/gradient_order.h"
#include "config/score_options.h"

// The accumulators of a tile: dk and dv. Tensor memory has no capacity for both with wide heads. Wide heads use two
// passes: dk tiles first, whose dS goes to global memory, then dv tiles (for_dv in the kernel).
enum class Accumulators { both, dk, dv };

// The kernel's only template parameter. A CTA keeps the 128 keys and values of an n_block and iterates over the
// m_blocks that see them, 128 queries each. Scores are transposed: keys are in the lanes of tensor memory.
struct Sm100BackwardConfig {
  int head_dim = 128, head_dim_v = 128;  // rounded up to 16; two passes or CTA pair: to 64
  int q_stages = 2, dout_stages = 1;     // iterations in shared memory
  int dq_stages = 2;                     // staging slots for parts of dq; not with two_pass()
  bool two_cta = false;                  // two-CTA products: each CTA has 128 keys of an n_block
  Accumulators accumulators = Accumulators::both;
  bool spt = false;                   // iterations start at the diagonal: device/n_block_work.cuh
  bool store_from_registers = false;  // dk, dv stored from registers: float32 or accumulated
  bool captured = false;              // computes gradients of tensors that score_mod reads
  bool captured_per_tile = false;     // also for tiles that read one element per tensor
  bool exact_n = false;               // products have multiples of 16 columns, else of 64
  bool wait_products = false;         // waits for products whose operands are overwritten
  ScoreOptions options = {};

  static constexpr bool m_split = false;  // no split over CTAs

  static constexpr int tile_m = 128;
  static constexpr int kCtaKeys = 128;
  constexpr int ctas() const { return two_cta ? 2 : 1; }
  constexpr int tile_n() const { return ctas() * kCtaKeys; }
  static constexpr int cta_keys() { return kCtaKeys; }
  constexpr int k_box() const { return two_pass() ? kDqKeys : kCtaKeys; }  // keys or values per TMA box
  constexpr int threads() const { return 128 * (kComputing + 1 + !two_pass()); }
  constexpr bool two_pass() const { return accumulators != Accumulators::both; }
  // The main kernel stores dS, in chunks of heads of all sequences. Another kernel computes dq (dq_kernel.cuh).
  constexpr bool ds_gmem() const { return two_pass(); }
  constexpr bool chunks_span_batch() const { return ds_gmem(); }
  // A CTA pair with wide keys. S and dP share columns, and queries and dout share a ring.
  constexpr bool two_cta_ring() const { return two_cta && head_dim > kCtaKeys; }
  constexpr bool makes_dk() const { return accumulators != Accumulators::dv; }
  constexpr bool makes_dv() const { return accumulators != Accumulators::dk; }
  constexpr Sm100BackwardConfig for_dv() const {
    Sm100BackwardConfig t = *this;
    t.accumulators = Accumulators::dv;
    return t;
  }
  constexpr bool has_score_mod() const {
    return options.changes_products() || options.bias != Bias::none || options.mask_mod || options.block_mask;
  }

  // Skips scores that a mask hides from all keys of a warp. The branch keeps ptxas from computing bias addresses early,
  // because with dropout they spilled.
  constexpr bool branches_at_scores() const { return two_cta && options.dropout && options.bias != Bias::none; }

  // Keys, values, queries and dout beyond a sequence must be zeroed before they are multiplied.
  constexpr bool has_relay_warp() const { return options.varlen; }
  // The *_peer_full barriers of the first CTA of a pair count the bytes of both CTAs.
  constexpr bool leader_counts() const { return two_cta && !has_relay_warp(); }

  // Two warpgroups compute P and dS. Each has half of an iteration's queries and all keys.
  static constexpr int kComputing = 2;
  static constexpr int queries_of_warpgroup() { return tile_m / kComputing; }
  // Each half is two runs of 32 queries, given by their first query. In a CTA pair the runs alternate, so that the
  // second halves of S and dP become free when all scores have been read.
  static constexpr int kRun = 32;
  constexpr int run_begin(int warpgroup, int run) const {
    return kRun * (two_cta ? run * kComputing + warpgroup : warpgroup * kComputing + run);
  }

  // 128 rows of 64 columns. Shared memory has only whole blocks.
  static constexpr int kBlockBytes = 16384;
  constexpr int k_blocks() const { return (head_dim + 63) / 64; }
  constexpr int v_blocks() const { return (head_dim_v + 63) / 64; }
  constexpr int k_columns() const { return 64 * k_blocks(); }
  constexpr int v_columns() const { return 64 * v_blocks(); }

  // Columns of the products dK and dQ, and of dV.
  constexpr int dk_columns() const { return exact_n ? head_dim : k_columns(); }
  constexpr int dv_columns() const { return exact_n ? head_dim_v : v_columns(); }

  // The number of dk or dv columns that a thread stores at once.
  constexpr int stored_columns() const { return head_dim % 32 == 0 && head_dim_v % 32 == 0 ? 32 : 16; }

  // dq of an iteration is added to global memory in parts, one row per thread.
  constexpr int dq_part_columns() const { return two_cta || head_dim % 32 != 0 ? 16 : 32; }
  // The maximum number of dq columns that a thread loads at once; more spill. Dropout needs the registers elsewhere.
  constexpr bool loads_dq_at_once() const { return two_cta_ring() && !options.dropout && !kSm103; }
  constexpr int dq_loaded_columns() const { return loads_dq_at_once() ? dq_columns() : 64; }
  constexpr int dq_part_floats() const { return tile_m * dq_part_columns(); }
  constexpr int dq_stages_bytes() const { return dq_stages * dq_part_floats() * 4; }
  constexpr int dq_columns() const { return head_dim / ctas(); }          // per thread
  constexpr int dq_floats() const { return tile_m * head_dim; }           // per iteration
  constexpr int dq_semaphores() const { return ds_gmem() ? 0 : ctas(); }  // per m_block
  constexpr int postprocess_threads() const { return two_cta || head_dim > 128 ? 256 : 128; }
  constexpr int dq_pairs() const { return dq_floats() / postprocess_threads() / 2; }
  static constexpr int postprocess_ctas(int) { return 1; }  // per m_block
  static constexpr int postprocess_sm_threads() { return 0; }
  static constexpr int postprocess_pairs() { return 8; }  // pairs per batch; a larger batch compiles slower
  static constexpr int dq_part_threads() { return 128; }
  static constexpr bool kFourHaveRow = false;  // each thread has its own row
  // In a CTA pair each CTA has the 64 queries of one warpgroup. Lanes 64 to 127 have the other half of their columns.
  constexpr GradientPair dq_pair(int thread, int n) const {
    if (!two_cta) return {thread % 128, 2 * (thread / 128 * dq_pairs() + n)};
    const int run = thread % q_box_rows() / kRun;
    return {run_begin(thread / 128, run) + thread % kRun, thread % 128 / 64 * dq_columns() + 2 * n};
  }

  // Columns of tensor memory. P and dS, two elements per column, overwrite the S and dP of the same warpgroup. The
  // other warpgroup may still read its S and dP. dQ overwrites dP if 512 columns are not enough (d128). With a CTA pair
  // dQ overwrites the second half of S, after all of S has been read:
  //
  //    0    S, P          [128]              S, P           [64]
  //    64                                    S, dQ          [64]
  //    128  dP, dS, dQ    [128]              dP, dS         [128]
  //    256  dV            [dv_columns]       dV             [128]
  //    ...  dK            [dk_columns]       dK             [128]
  //    ...  dQ            [dk_columns], if 512 columns suffice
  //
  // The first of two passes keeps P in registers. The dv pass has two buffers for S, for even and odd iterations:
  //
  //    0    S             [128]           S, P   [128]
  //    128  dP, dS        [128]           S, P   [128]
  //    256  dK            [head_dim]      dV     [head_dim_v]
  static constexpr int kTmemColumns = 512;
  // With two_cta_ring() S and dP overlap by a half. The next S follows when the first half of dP has been read:
  //
  //    0    S, P          [64]
  //    64   S, dP, dQ     [64]; dQ has the 96 columns before dV
  //    128  dP, dS, dQ    [64]
  //    192  dV            [128]
  //    320  dK            [192]
  static constexpr unsigned tmem_s() { return 0; }
  constexpr unsigned tmem_dp() const { return two_cta_ring() ? tile_m / 2 : tile_m; }
  constexpr unsigned tmem_ds() const { return two_cta_ring() ? tile_m : tmem_dp(); }
  constexpr unsigned tmem_dv() const { return tmem_dp() + tile_m; }
  constexpr int s_slots() const { return accumulators == Accumulators::dv ? 2 : 1; }
  // Signals per iteration for P. A CTA pair signals each run, so that dV begins with the first run.
  constexpr int p_parts() const { return two_cta ? 2 : s_slots(); }
  constexpr unsigned tmem_dk() const { return tmem_dv() + (two_pass() ? 0 : dv_columns()); }
  constexpr bool dq_has_place() const { return !two_pass() && tmem_dk() + 2 * dk_columns() <= kTmemColumns; }
  constexpr unsigned tmem_dq() const {
    if (two_cta_ring()) return tmem_dv() - dq_columns();
    if (two_cta) return tmem_s() + tile_m / 2;
    return dq_has_place() ? tmem_dk() + dk_columns() : tmem_dp();
  }
  // All scores of an iteration are read before the first is used, because dQ or the next S overwrites them.
  constexpr bool reads_scores_ahead() const { return accumulators == Accumulators::dk || two_cta; }
  constexpr bool tmem_fits() const {
    if (two_pass()) return tmem_dv() + (head_dim > head_dim_v ? head_dim : head_dim_v) <= kTmemColumns;
    return tmem_dk() + dk_columns() <= kTmemColumns && (head_dim <= tile_m || two_cta_ring());
  }
  // The column of P or dS of a warpgroup's run of 32 queries. P and dS overwrite a run of S or dP of the warpgroup.
  constexpr unsigned tmem_rounded(unsigned at, int warpgroup, int run) const {
    return at + run_begin(warpgroup, 0) + run * (kRun / 2);
  }
  // The column of the n-th 16 queries of P or dS.
  constexpr unsigned tmem_operand(unsigned at, int n) const {
    const int runs = n * 16 / kRun, warpgroup = two_cta ? runs % kComputing : runs / kComputing;
    const int run = two_cta ? runs / kComputing : runs % kComputing;
    return tmem_rounded(at, warpgroup, run) + n * 16 % kRun / 2;
  }

  // In a CTA pair each CTA keeps the operands of its products. For S and dP a CTA keeps half of the rows of queries and
  // dout, for dK and dV half of their columns. For dQ a CTA keeps half of the columns of all keys and half of the
  // queries of dS; it sends the other half.
  constexpr int q_box_rows() const { return tile_m / ctas(); }
  static constexpr int kTwoCtaBlocks = 2 + 2 + 2 + 4 + 2 + 1;  // k, v, kt; q, qt, dout, doutt; ds; ds_sent

  // In two passes queries and dout are loaded in blocks of 64 columns, once for every product that reads them. Shared
  // memory holds kTwoPassBlocks of these blocks. The dv pass leaves one block unused: barriers of the dk pass may still
  // receive arrivals there. A CTA pair's blocks have half of the bytes: 64 rows of 64 columns or 128 rows of 32.
  static constexpr int kTwoPassBlocks = 14;
  constexpr bool has_ring() const { return two_pass() || two_cta_ring(); }
  constexpr int ring_block_bytes() const { return kBlockBytes / ctas(); }
  constexpr int ring_blocks() const {
    if (two_cta_ring()) return ctas() * (kTwoCtaBlocks - 2 * k_blocks() - v_blocks() - tile_m / 64 - 1);
    if (!two_pass()) return 1;
    return kTwoPassBlocks - k_blocks() - (makes_dk() ? v_blocks() + tile_m / 64 : 1);
  }

  // Shared memory besides the blocks: -lse and delta of each iteration, the current tile, barriers.
  constexpr bool lse_delta_alone() const { return two_cta || two_pass(); }  // separate barriers
  constexpr int lse_delta_slots() const { return lse_delta_alone() ? 2 : q_stages; }
  constexpr int lse_delta_bytes() const { return lse_delta_slots() * 2 * tile_m * 4; }
  static constexpr int kSmallBytes = 1024;
  constexpr int smem_bytes() const {
    if (two_cta) return kTwoCtaBlocks * kBlockBytes + dq_stages_bytes() + lse_delta_bytes() + kSmallBytes;
    if (two_pass()) return kTwoPassBlocks * kBlockBytes + lse_delta_bytes() + kSmallBytes;
    const int blocks = (1 + q_stages) * k_blocks() + (1 + dout_stages) * v_blocks() + tile_m / 64;
    return blocks * kBlockBytes + dq_stages_bytes() + lse_delta_bytes() + kSmallBytes;
  }

  // Kernels that compute scores again use two warpgroups. Shared memory has the operands of a tile and either the sums
  // of a bias's gradient or two numbers per score of half a tile.
  static constexpr int kScoreWarpgroups = 2;
  static constexpr int score_threads() { return 128 * kScoreWarpgroups; }
  constexpr int score_columns() const { return k_columns() > v_columns() ? k_columns() : v_columns(); }
  constexpr int score_places() const { return score_columns() > 128 ? 1 : 2; }
  constexpr int score_smem_bytes() const {
    return score_places() * 2 * (kCtaKeys + tile_m) * score_columns() + 8 * tile_m + 1024;
  }
  constexpr int dbias_smem_bytes() const { return score_smem_bytes() + 4 * kCtaKeys * tile_m; }
  constexpr int captured_smem_bytes() const { return score_smem_bytes() + 8 * (kCtaKeys + 1) * (tile_m / 2) + 1024; }

  // The kernel of dq (dq_kernel.cuh): a CTA has two m_blocks, a stage 64 keys and their dS. 8 warps store dq.
  static constexpr int kDqMBlocks = 2, kDqRows = kDqMBlocks * tile_m;
  static constexpr int kDqKeys = 64, kDqKernelStages = 3;
  constexpr int dq_smem_bytes() const { return kDqKernelStages * 2 * kDqKeys * (k_columns() + kDqRows) + kSmallBytes; }

  // Registers per thread, by role. The compiler needs more for the products of sm_103a.
  constexpr int compute_registers() const {
    if (two_pass()) return 208;
    if (!kSm103) return loads_dq_at_once() ? 168 : 184;
    return two_cta && !has_ring() ? 160 : 168;
  }
  constexpr int dq_registers() const { return loads_dq_at_once() ? 120 : kSm103 && !two_cta_ring() ? 72 : 88; }
  constexpr int other_registers() const {
    return two_pass() ? 88 : !kSm103 ? 56 : has_ring() ? 88 : two_cta ? 120 : 104;
  }
  constexpr bool registers_fit() const {
    const int of_threads = 65536 / threads() / 8 * 8;  // registers of a thread at launch
    return kComputing * compute_registers() + (two_pass() ? 0 : dq_registers()) + other_registers() <=
           threads() / 128 * of_threads;
  }

  constexpr bool fits() const {
    if (two_cta && (head_dim < 128 || head_dim_v != 128 || q_stages + dout_stages > 2)) return false;
    const int step = two_cta || two_pass() ? 64 : 16;
    return !(two_cta && two_pass()) && head_dim % step == 0 && head_dim_v % step == 0 && tmem_fits() &&
           ring_blocks() > 0 && smem_bytes() <= kMaxSmemBytes;
  }

  static constexpr int kPreprocessThreads = 256, kPreprocessQueries = 32;         // bwd_preprocess
  static constexpr int preprocess_ctas() { return tile_m / kPreprocessQueries; }  // per m_block
  static constexpr int kMaxSmemBytes = 232448;                                    // per CTA
};
