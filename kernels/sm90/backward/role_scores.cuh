// An iteration of the scores role (mainloop_warpgroup_roles.cuh): products with queries in rows, P, dS, and the dq
// columns of its CTA.
//
// As in warpgroup_tile.cuh, these structs hold only numbers and references. The arrays that products write are locals
// of make_scores(), which has the loop.
#pragma once
#include "ptx/cluster.cuh"
#include "sm90/backward/operands.cuh"

// State that continues over tiles, and constants of all tiles.
template <Sm90BackwardConfig T>
struct RoleState {
  static constexpr int kIndex = 2;  // warpgroup index
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, row0 = warp * 16 + lane / 4;
  const int rank = cta_rank<T>();
  PipelineState<T.q_stages> q_ring;
  PipelineState<T.dout_stages> dout_ring;
  u32 steps = 0;
};

template <Sm90BackwardConfig T>
struct RoleTile {
  static constexpr int kScores = T.cta_keys() / 2;  // per thread
  using ScoreMma = Wgmma<T.options.f16, T.cta_keys()>;
  using DqFirst = Wgmma<T.options.f16, T.kDqFirst>;
  using DqRest = Wgmma<T.options.f16, T.kDqRest>;

  const BackwardParams& p;
  SharedStorage<T>& s;
  RoleState<T>& state;
  const SequenceCoords sequence;
  const decltype(band_of<T>(p, sequence)) band;
  const int first_key, last_key;
  const QueryRange unmasked;

  TANDEM_DEVICE RoleTile(const BackwardParams& params, SharedStorage<T>& shared, RoleState<T>& of, int n_block)
      : p(params),
        s(shared),
        state(of),
        sequence(sequence_coords<T>(params, T.options.varlen ? warp_uniform(shared.tile.sequence) : 0)),
        band(band_of<T>(params, sequence)),
        first_key(n_block * T.cta_keys()),
        last_key(first_key + T.cta_keys() - 1),
        unmasked(band.unmasked_queries(first_key, last_key)) {
    clear(s.k, T.cta_keys(), T.head_dim, sequence.k_len - first_key);
    clear(s.v, T.cta_keys(), T.head_dim_v, sequence.k_len - first_key);
    clear(s.cluster2.k, T.cta_keys(), T.cluster2_columns(), sequence.k_len - (n_block ^ 1) * T.cta_keys());
  }
  TANDEM_DEVICE void clear(u16* block, int rows, int columns, int used) const {
    zero_tail<T>(block, rows, columns, used, kBarOwnWarpgroup + RoleState<T>::kIndex, 128);
  }

  // The dS slot of an iteration, and the parity of its barriers.
  TANDEM_DEVICE static u32 slot_of(u32 step) { return step & 1; }
  TANDEM_DEVICE static u32 parity_of(u32 step) { return step >> 1 & 1; }
  // -lse in log2 units, or delta, of this thread's i-th row.
  TANDEM_DEVICE float stat(int which, int i) const {
    return s.lse_delta[state.dout_ring.index][which * T.tile_m + state.row0 + 8 * i];
  }

  // Issues rows of queries or dout times keys or values.
  TANDEM_DEVICE void multiply(float (&to)[kScores], u16* rows, const u16* keys, int columns, int m_block) const {
    clear(rows, T.tile_m, columns, sequence.q_len - m_block * T.tile_m);
    multiply_rows<ScoreMma, kQueryBlockBytes<T>, kKeyBlockBytes<T>>(to, shared_address(rows), shared_address(keys),
                                                                    columns);
  }
  TANDEM_DEVICE void mma_s(float (&scores)[kScores], int m_block) const {
    const PipelineState<T.q_stages>& q_ring = state.q_ring;
    mbarrier_wait(&s.q_full[q_ring.index], q_ring.phase);
    multiply(scores, s.q[q_ring.index], s.k, T.head_dim, m_block);
  }
  TANDEM_DEVICE void mma_dp(float (&dp)[kScores], int m_block) const {
    const PipelineState<T.dout_stages>& dout_ring = state.dout_ring;
    mbarrier_wait(&s.dout_full[dout_ring.index], dout_ring.phase);
    multiply(dp, s.dout[dout_ring.index], s.v, T.head_dim_v, m_block);
  }

  // Sets scores of hidden keys to -infinity.
  TANDEM_DEVICE void apply_mask(float (&scores)[kScores], int m_block) const {
    const int first = m_block * T.tile_m, last = first + T.tile_m - 1;
    if (!warp_any((T.options.bounded_right && first < unmasked.begin) ||
                  (T.options.bounded_left && last >= unmasked.end) || last_key >= sequence.k_len))
      return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const KeyRange seen = band.visible_keys(first + state.row0 + 8 * i, first + state.row0 + 8 * i);
#pragma unroll
      for (int r = 2 * i; r < kScores; r += 4) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int key = first_key + 2 * (state.lane & 3) + 2 * (r - 2 * i) + n;
          if (key >= seen.end || (T.options.bounded_left && key < seen.begin)) scores[r + n] = -kInfinity;
        }
      }
    }
  }

  // Stores 16 x 16 fragments rounded to shared memory and signals `full`.
  TANDEM_DEVICE void store_rounded(u16* to, const float (&x)[kScores], u64* full) const {
#pragma unroll
    for (int n = 0; n < T.cta_keys() / 16; ++n) {
      u32 w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = pack<T>(x[8 * n + 2 * i], x[8 * n + 2 * i + 1]);
      stmatrix(fragment_at<T>(shared_address(to), n), w);
    }
    fence_proxy_async();
    __syncwarp();
    arrive(full);
  }
  // Computes P for dv. On entry S is complete, and dP is in flight.
  TANDEM_DEVICE void make_probabilities(float (&scores)[kScores], float (&dp)[kScores], int m_block) const {
    fence_operand(scores);
    arrive(&s.q_empty[state.q_ring.index]);
    state.q_ring.advance();
    apply_mask(scores, m_block);
    const float minus_lse[2] = {stat(0, 0), stat(0, 1)};
#pragma unroll
    for (int r = 0; r < kScores; ++r) scores[r] = exp2_approx(fmaf(scores[r], p.scale_log2, minus_lse[r / 2 % 2]));
    mbarrier_wait(&s.p_empty, (state.steps & 1) ^ 1);
    store_rounded(s.p[0], scores, &s.p_full);
    wgmma_wait<0>();
    fence_operand(dp);
  }
  // Computes dS = P (dP - delta), for dk and for dq, and sends it to the other CTA.
  TANDEM_DEVICE void make_ds(const float (&scores)[kScores], float (&dp)[kScores]) const {
    const u32 slot = slot_of(state.steps);
    const float delta[2] = {stat(1, 0), stat(1, 1)};
#pragma unroll
    for (int r = 0; r < kScores; ++r) dp[r] = scores[r] * (dp[r] - delta[r / 2 % 2]);
    fence_proxy_async();  // TMA may overwrite the delta that was read
    __syncwarp();
    arrive(&s.dout_empty[state.dout_ring.index]);
    state.dout_ring.advance();
    mbarrier_wait(&s.ds_empty[slot], parity_of(state.steps) ^ 1);
    store_rounded(s.ds[slot], dp, &s.ds_full[slot]);
    ++state.steps;
  }

  // Issues dq of an iteration over the keys of both CTAs, in two parts: Sm90BackwardConfig::warpgroup_role_dq_column.
  TANDEM_DEVICE void mma_dq(float (&dq_first)[T.kDqFirst / 2], float (&dq_rest)[T.kDqRest / 2], u32 step) const {
    const u32 slot = slot_of(step);
    mbarrier_wait(&s.ds_full[slot], parity_of(step));
    mbarrier_wait(&s.cluster2.ds_peer_full[slot], parity_of(step));
    discard(dq_first);
    discard(dq_rest);
    wgmma_fence();
    auto multiply_dq = [&](const u16* ds, u32 first, u32 rest, bool adds) {
      const u64 a = wgmma_smem_desc(shared_address(ds), 16, 1024);
      const u64 b_first = wgmma_smem_desc(first, kKeyBlockBytes<T>, 1024);
      const u64 b_rest = wgmma_smem_desc(rest, kKeyBlockBytes<T>, 1024);
#pragma unroll
      for (int c = 0; c < T.cta_keys() / 16; ++c) {
        DqFirst::ss_nn(dq_first, a + in_row(c, kKeyBlockBytes<T>), b_first + rows_16(c), adds || c > 0);
        DqRest::ss_nn(dq_rest, a + in_row(c, kKeyBlockBytes<T>), b_rest + rows_16(c), adds || c > 0);
      }
    };
    const int first = T.warpgroup_role_dq_column(state.rank, 0),
              rest = T.warpgroup_role_dq_column(state.rank, T.kDqFirst);
    multiply_dq(s.ds[slot], shared_address(s.k) + first / 64 * kKeyBlockBytes<T>,
                shared_address(s.k) + rest / 64 * kKeyBlockBytes<T> + rest % 64 * 2, false);
    multiply_dq(s.cluster2.ds[slot], shared_address(s.cluster2.k), shared_address(s.cluster2.k) + kKeyBlockBytes<T>,
                true);
    wgmma_commit();
  }
  TANDEM_DEVICE void accumulate_dq(float (&dq_first)[T.kDqFirst / 2], float (&dq_rest)[T.kDqRest / 2], u32 step) const {
    fence_operand(dq_first);
    fence_operand(dq_rest);
    arrive(&s.ds_empty[slot_of(step)]);
    if (state.lane == 0) mbarrier_arrive_at(&s.ds_empty[slot_of(step)], state.rank ^ 1);
    mbarrier_wait(&s.dq_slot_free[0], step & 1);
    store_sums(s.dq[0], 0, dq_first);
    store_sums(s.dq[0] + T.kDqFirst / 8 * 128, 0, dq_rest);
    fence_proxy_async();
    __syncwarp();
    arrive(&s.dq_slot_full[0][step % T.dq_threads()]);
  }
};
