// Attention backward for Hopper: dq, dk and dv from q, k, v, dout, the log-sum-exp and delta (common/delta.cuh).
//
// A CTA takes n_blocks of a key head from a counter. It keeps their keys and values, and goes over the queries of all
// heads that share them, from the last m_block that sees some of them to the first (under a causal mask often from the
// first on, and of one head: tile/key_tile.cuh); dk and dv stay in registers. All
// scores are transposed, keys in rows, so that P and dS are operands from registers of what is summed over queries:
//
//    load       | order_dq, three       | each warpgroup, of its 64 keys
//    Q', dO     | threads in turns:     | dS = P (dP - delta), to shared memory
//               | adds dq to what is in | dQ of the step before = dS' K, dV += P dO, dK += dS Q
//               | memory, when it is    | under dK: next S = K Q', dQ to shared memory
//               | this n_block's turn   | next dP = V dO', under it P = exp(S - lse)
//
// dQ comes a step late, so that warpgroups, each of which needs the dS of all, do not wait for each other: they may be
// almost a step apart. It is summed in float32 in memory, by bulk additions in the order of n_blocks (order_dq), as
// threads hold it; common/convert.cuh rounds it. At head_dim 64 threads add it from registers, when they are told.
// Registers of a computing thread at head_dim 128: dK 64, dV 64, S 32, dP or dQ 32, P 16, dS 16. dk and dv are stored
// from registers while the next tile's keys come; so is dq where one n_block has all keys (`single`). A bias has a
// place and a warp of its own (bias.cuh). Heads wider than 128 (Sm90BackwardConfig::wide) have 64 keys for all
// warpgroups, P goes through shared memory as dS does, and dQ is that of the step. Up to 192 each warpgroup may have a
// role instead: roles.cuh.
//
// Adding dq in memory is what binds at head_dim 256: a CTA with 64 keys adds 64 KB in a step. Two of them (a cluster,
// `pair`) take an n_block of 128 keys, 64 each, and go over the same steps; each sends its dS to the other, and makes
// dq of half of the columns over the keys of both, so that 64 KB are added for 128 keys:
//
//    CTA 0        keys 0..63,   dS ->  | dq[:, :128] = dS' K[:64, :128] + (dS of CTA 1)' K[64:, :128]
//    CTA 1        keys 64..127, dS ->  | dq[:, 128:] = (dS of CTA 0)' K[:64, 128:] + dS' K[64:, 128:]
//
// Where the host knows all lengths nothing is added to dq (`strips`): a thread stores dS of each step, a ninth of
// the bytes, and a kernel of its own makes dq of that (dq.cuh), one strip of keys or heads after the other, so that dS
// takes no more than float32 gradients would:
//
//    launches     backward, strip 0 | dq, strip 0 | backward, strip 1 | dq, strip 1 | ...
//
// Without dQ registers suffice for dK and dV of up to 320 columns (192 and 128) beside the scores of 32 queries: then
// each warpgroup has 64 keys of its own, goes over a step's 64 queries in two halves (`halves`), and waits for nobody:
//
//    queue of a half  | dV += P dO, next S, next dP, dK += dS Q
//    meanwhile        |    dS, to shared memory     |  next P
#pragma once
#include "common/convert.cuh"
#include "common/delta.cuh"
#include "common/dsink.cuh"
#include "sm90/backward/captured.cuh"
#include "sm90/backward/compute.cuh"
#include "sm90/backward/dbias.cuh"
#include "sm90/backward/dq.cuh"
#include "sm90/backward/load.cuh"
#include "sm90/backward/roles.cuh"

template <Sm90BackwardConfig T>
TANDEM_DEVICE void backward(const BackwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<BackwardShared<T>*>(memory);
  static_assert(sizeof(BackwardShared<T>) <= T.smem_bytes());
  static_assert(T.fits());
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&p.k, &p.v}) prefetch_tensor_map(map);
    constexpr int kWarps = T.roles ? 8 : 4 * T.warpgroups;  // that read a step's queries, or dout
    mbarrier_init(&s.k_full, 1);
    mbarrier_init(&s.v_full, 1);
    mbarrier_init(&s.kv_empty, T.warpgroups + (T.strips ? 1 : T.dq_threads()) + (T.roles || T.stages_bias() ? 1 : 0));
    if constexpr (T.stages_bias()) {
      for (u64& full : s.bias.full) mbarrier_init(&full, 32);
      for (u64& empty : s.bias.empty) mbarrier_init(&empty, 128);
      mbarrier_init(&s.bias.dq_made, kWarps);
    }
    for (int i = 0; i < T.q_stages; ++i) {
      mbarrier_init(&s.q_full[i], 1);
      mbarrier_init(&s.q_empty[i], kWarps);
    }
    for (int i = 0; i < T.dout_stages; ++i) {
      mbarrier_init(&s.dout_full[i], 1);
      mbarrier_init(&s.dout_empty[i], kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&s.ds_full[i], T.roles ? 4 : kWarps);
      mbarrier_init(&s.ds_empty[i], T.strips ? 1 : 12);
    }
    mbarrier_init(&s.p_full, 4);
    mbarrier_init(&s.p_empty, 4);
    for (int i = 0; i < T.dq_parts(); ++i) {
      mbarrier_init(&s.dq_turn[i], 1);
      for (u64& added : s.dq_added[i]) mbarrier_init(&added, 4);
    }
    if constexpr (T.pair) {
      for (u64& landed : s.pair.ds_landed) mbarrier_init(&landed, 1);
      mbarrier_init(&s.pair.ds_taken, kWarps);
      mbarrier_init(&s.pair.tile_told, 1);
      mbarrier_init(&s.pair.tile_taken, 1);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }
  // dS of the step before the first one, whose dq nobody uses.
  if constexpr (!T.wide() && !T.strips) {
    for (int i = threadIdx.x; i < T.cta_keys() * T.tile_m / 8; i += blockDim.x)
      reinterpret_cast<uint4*>(s.ds[0])[i] = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
  }
  if constexpr (T.pair) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  grid_dependency_wait();
  launch_dependents();  // now tickets count from zero
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    setmaxnreg_dec<T.load_registers()>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) {
      if (elect_one()) load<T>(p, s);
    } else if constexpr (T.strips) {
      if (warp == 1 && elect_one()) store_ds<T>(p, s);
    } else if (warp <= T.dq_threads()) {
      if (elect_one()) order_dq<T>(p, s, warp - 1);
    } else if constexpr (T.roles) {
      if (elect_one()) send_ds<T>(p, s);
    } else if constexpr (T.stages_bias()) {
      if (warp == 3) load_bias<T>(p, s);
    }
  } else if constexpr (!T.roles) {
    setmaxnreg_inc<T.registers()>();
    compute<T>(p, s, warpgroup - 1);
  } else if (warpgroup == 3) {
    setmaxnreg_inc<T.kScoreRegisters>();
    make_scores<T>(p, s);
  } else {
    setmaxnreg_inc<T.kSumRegisters>();
    if (warpgroup == 1) {
      sum_steps<T, false>(p, s, 0);
    } else {
      sum_steps<T, true>(p, s, 1);
    }
  }
  if constexpr (T.pair) {  // the other CTA may still write here
    __syncwarp();
    cluster_sync();
  }
}
