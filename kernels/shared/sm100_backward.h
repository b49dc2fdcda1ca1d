// How a Blackwell backward kernel is cut, and what follows from that: sizes, registers, shared and tensor memory.
#pragma once
#include "shared/dq_order.h"
#include "shared/score_options.h"

// A value of this type is the kernel's only template parameter. A CTA keeps the 128 keys and values of an n_block and
// goes over the m_blocks that see them, 128 queries each. Scores are transposed: keys in the lanes of tensor memory.
struct Sm100BackwardConfig {
  int head_dim = 128, head_dim_v = 128;  // the problem's, rounded up to multiples of 64: at most 128
  int q_stages = 2, dout_stages = 1;     // steps of queries, and of dout, that are in shared memory at once
  int dq_stages = 2;                     // 32 columns of a step's dq each, on their way to memory
  bool pair = false;                     // two CTAs multiply together, 128 of an n_block's keys each
  bool dropout = false;
  bool direct = false;               // dk and dv go from registers to memory: float32, or added to what is there
  bool f16 = false;                  // elements are float16, else bfloat16
  bool left = false, right = false;  // a query may not see all keys before, after it (causal: right)
  bool varlen = false;               // lengths are read on the device: cu_seqlens or seqused
  bool unscaled = false;             // scale <= 0
  bool softcap = false, alibi = false;
  Bias bias = Bias::none;
  bool score_mod = false, mask_mod = false;  // functions that were printed for this kernel: tile/mod_functions.cuh

  static constexpr int tile_m = 128;
  static constexpr int kCtaKeys = 128;
  constexpr int ctas() const { return pair ? 2 : 1; }
  constexpr int tile_n() const { return ctas() * kCtaKeys; }
  static constexpr int threads() { return 512; }
  constexpr bool has_score_mod() const {
    return unscaled || softcap || alibi || bias != Bias::none || score_mod || mask_mod;
  }

  // Keys and values beyond a sequence, queries and dout too, have to be cleared before they are multiplied.
  constexpr bool relays() const { return varlen || pair; }

  // Two warpgroups compute, each half of a step's queries for all keys.
  static constexpr int kComputing = 2;
  static constexpr int queries_of_warpgroup() { return tile_m / kComputing; }

  // 128 rows of 64 columns.
  static constexpr int kBlockBytes = 16384;

  // dq of a step is added to memory in parts of 32 columns, a row in each thread.
  static constexpr int kDqColumns = 32, kDqPartFloats = tile_m * kDqColumns;
  constexpr int dq_columns() const { return head_dim / ctas(); }  // of a thread
  constexpr int dq_parts() const { return dq_columns() / kDqColumns; }
  constexpr int dq_floats() const { return tile_m * head_dim; }  // of a step
  constexpr int dq_tickets() const { return 1; }                 // of an m_block
  constexpr int convert_threads() const { return 128 * ctas(); }
  constexpr int dq_pairs() const { return dq_columns() / 2; }
  // Of a pair each CTA has 64 queries: in lanes 64 to 127 again, the other half of their columns.
  constexpr DqPair dq_pair(int thread, int n) const {
    if (!pair) return {thread, 2 * n};
    return {thread / 128 * q_box_rows() + thread % 64, thread % 128 / 64 * dq_columns() + 2 * n};
  }

  // Columns of tensor memory. P and dS, two elements in a column, take the places of the S and dP that they are made
  // from, each warpgroup's half in that of its own: it may still read the other half. dQ takes the place of dP where
  // there is no other (d128):
  //
  //    0    S, P          [128]
  //    128  dP, dS, dQ    [128]
  //    256  dV            [head_dim_v]
  //    ...  dK            [head_dim]
  //    ...  dQ            [head_dim], where 512 columns suffice
  static constexpr int kTmemColumns = 512;
  static constexpr unsigned tmem_s() { return 0; }
  static constexpr unsigned tmem_dp() { return tile_m; }
  static constexpr unsigned tmem_dv() { return 2 * tile_m; }
  constexpr unsigned tmem_dk() const { return tmem_dv() + head_dim_v; }
  constexpr bool dq_has_place() const { return tmem_dk() + 2 * head_dim <= kTmemColumns; }
  constexpr unsigned tmem_dq() const { return dq_has_place() ? tmem_dk() + head_dim : tmem_dp(); }
  constexpr bool tmem_fits() const { return tmem_dk() + head_dim <= kTmemColumns && head_dim <= tile_m; }
  // The 16 queries with number n of P, or of dS.
  static constexpr unsigned tmem_operand(unsigned at, int n) {
    const int per_warpgroup = queries_of_warpgroup() / 16;
    return at + n / per_warpgroup * queries_of_warpgroup() + n % per_warpgroup * 8;
  }

  // Of a pair each CTA keeps what it gives to products, of a step's queries and dout: half of the rows for S and dP,
  // half of the columns for dK and dV; and for dQ half of the columns of all keys, and half of the queries of dS of all
  // keys, besides the half that it sends to the other CTA.
  constexpr int q_box_rows() const { return tile_m / ctas(); }
  static constexpr int kPairBlocks = 2 + 2 + 2 + 4 + 2 + 1;  // k, v, kt; q, qt, dout, doutt; ds; ds_sent

  // Beside the blocks: -lse and delta of each step of queries, the tile at hand, barriers.
  constexpr int stats_slots() const { return pair ? 2 : q_stages; }
  constexpr int stats_bytes() const { return stats_slots() * 2 * tile_m * 4; }
  static constexpr int kSmallBytes = 1024;
  constexpr int smem_bytes() const {
    if (pair) return (kPairBlocks + dq_stages) * kBlockBytes + stats_bytes() + kSmallBytes;
    const int blocks = (1 + q_stages) * (head_dim / 64) + (1 + dout_stages) * (head_dim_v / 64) + tile_m / 64;
    return (blocks + dq_stages) * kBlockBytes + stats_bytes() + kSmallBytes;
  }

  // Registers of a thread, by role.
  static constexpr int kComputeRegisters = 192, kDqRegisters = 72, kOtherRegisters = 56;
  static_assert(kComputing * kComputeRegisters + kDqRegisters + kOtherRegisters <= 65536 / 128);

  constexpr bool fits() const {
    if (pair && (head_dim != 128 || head_dim_v != 128 || q_stages + dout_stages > 2)) return false;
    return head_dim % 64 == 0 && head_dim_v % 64 == 0 && tmem_fits() && smem_bytes() <= kMaxSmemBytes;
  }

  static constexpr int kDeltaThreads = 256;     // of the kernel that comes before
  static constexpr int kMaxSmemBytes = 232448;  // of a block
};
