// An MMA warpgroup of the Hopper forward: its barriers, its products, and the stores of its rows of the result.
#pragma once
#include "device/chunk.cuh"
#include "device/pack.cuh"
#include "device/pipeline_state.cuh"
#include "device/row.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/forward/smem.cuh"

// Sets rows [begin, T.tile_n) of the values to zero. thread: index among the MMA threads.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void zero_rows(u16* values, int begin, int thread) {
  constexpr int kChunks = 8;  // 16 bytes each, per row of 64 columns
  auto* chunks = reinterpret_cast<Chunk*>(values);
  const int count = (T.tile_n - begin) * kChunks;
#pragma unroll 1
  for (int block = 0; block < T.columns_v() / 64; ++block)
#pragma unroll 1
    for (int i = thread; i < count; i += 128 * T.warpgroups)
      chunks[(block * T.tile_n + begin) * kChunks + i] = {0, 0, 0, 0};
}

// The state of an MMA warpgroup: its rings, its turn on the tensor core, its products.
template <Sm90ForwardConfig T>
struct Warpgroup {
  using QkMma = Wgmma<T.options.f16, T.tile_n>;
  using PvMma = Wgmma<T.options.f16, T.head_dim_v>;
  using QFragments = u32[T.q_in_registers() ? T.head_dim / 16 : 1][4];
  // Named barriers: one per warpgroup (at most four), or a single one for all (kComputeSync).
  static constexpr int kPingpong = 1, kComputeSync = 5, kWarpgroupSync = 8, kOSmem = 12;
  static_assert(T.warpgroups <= 4, "barriers would be shared");
  static constexpr u32 kQBlockBytes = T.tile_m() * 128, kOBlockBytes = T.o_smem_rows() * 128,
                       kKvBlockBytes = T.tile_n * 128;  // bytes of 64 columns

  const ForwardParams& p;
  SharedStorage<T>& s;
  const int index;
  const int warp, lane;
  const u32 q_smem;
  PipelineState<T.stages> k_ring, v_ring;
  [[maybe_unused]] u32 bias_parity = 0;
  u32 tile = ~0u;  // the number of earlier tiles of this CTA

  TANDEM_DEVICE Warpgroup(const ForwardParams& params, SharedStorage<T>& shared, int warpgroup)
      : p(params),
        s(shared),
        index(warpgroup),
        warp(threadIdx.x % 128 / 32),
        lane(threadIdx.x % 32),
        q_smem(shared_address(s.q) + warpgroup * 64 * 128) {}

  TANDEM_DEVICE void pingpong_wait() const {
    if (T.pingpong) named_sync(kPingpong + index, 256);
  }
  TANDEM_DEVICE void pingpong_signal() const {
    if (T.pingpong) named_arrive(kPingpong + (index + 1) % T.warpgroups, 256);
  }
  // Waits for the result's buffer if all warpgroups share one.
  TANDEM_DEVICE void o_smem_acquire() const {
    if (T.o_smem_shared()) named_sync(kOSmem + index, 256);
  }
  TANDEM_DEVICE void o_smem_release() const {
    if (T.o_smem_shared()) named_arrive(kOSmem + (index + 1) % T.warpgroups, 256);
  }
  TANDEM_DEVICE void wait_k() const {
    mbarrier_wait(&s.k_full[k_ring.index], k_ring.phase);
    fence_copies();
  }
  TANDEM_DEVICE void wait_v() const {
    mbarrier_wait(&s.v_full[v_ring.index], v_ring.phase);
    fence_copies();
  }
  // Orders wgmma after the copies of cp.async.
  TANDEM_DEVICE void fence_copies() const {
    if constexpr (T.gathers_pages) fence_proxy_async();
  }
  TANDEM_DEVICE void release_k() {
    release(&s.k_empty[k_ring.index]);
    k_ring.advance();
  }
  TANDEM_DEVICE void release_v() {
    release(&s.v_empty[v_ring.index]);
    v_ring.advance();
  }
  // Arrives in all CTAs that load the data by multicast.
  TANDEM_DEVICE void release(u64* empty) const {
    if (lane != 0) return;
    if constexpr (T.kv_ctas > 1) {
#pragma unroll
      for (int cta = 0; cta < T.kv_ctas; ++cta) mbarrier_arrive_at(empty, cta);
    } else {
      mbarrier_arrive(empty);
    }
  }
  TANDEM_DEVICE void wait_bias() const {
    if constexpr (T.options.bias != Bias::none) mbarrier_wait(&s.bias.full[index], bias_parity);
  }
  TANDEM_DEVICE void release_bias() {
    if constexpr (T.options.bias != Bias::none) {
      // Generic reads and TMA's next writes are of different proxies: without the fence a read could come after the
      // write.
      if constexpr (T.bias_ctas > 0) fence_proxy_async();
      mbarrier_arrive(&s.bias.empty[index]);
      bias_parity ^= 1;
    }
  }
  TANDEM_DEVICE void release_q() const {
    if (lane == 0) mbarrier_arrive(&s.q_empty[index]);
  }
  // Returns the next work tile, after its queries have arrived.
  TANDEM_DEVICE int next_work_tile() {
    ++tile;
    mbarrier_wait(&s.q_full[index], tile & 1);
    return warp_uniform(work().index);
  }
  TANDEM_DEVICE Sm90Work& work() const { return s.work_tiles[tile % SharedStorage<T>::kWorkTiles]; }
  TANDEM_DEVICE MaskShared<T>& mask() const { return s.mask[index]; }
  TANDEM_DEVICE void request_retry() const {  // requests that the tile is repeated
    if (lane == 0) work().request_retry();
  }

  // Zeroes values beyond the sequence, because they are undefined and 0 * NaN is NaN. The last iteration of the tile
  // contains them. All warpgroups must call this function, even if they do not need it: a warpgroup that skipped the
  // barrier could arrive for its next tile. PageGather copies zeros there.
  TANDEM_DEVICE void zero_v_tail(const TileCoords& tile, const NBlockRange& n_blocks, int n_block) const {
    if constexpr (T.options.varlen && !T.gathers_pages) {
      const int left = tile.k_len - n_block * T.tile_n;
      if (warp_any(n_block == n_blocks.end - 1 && left < T.tile_n)) {
        wait_v();
        zero_rows<T>(s.v[v_ring.index], max(0, left), index * 128 + threadIdx.x % 128);
        fence_proxy_async();
        named_sync_from_anywhere(kComputeSync, 128 * T.warpgroups);
      }
    }
  }
  // Skips an n_block that no row of this warpgroup needs.
  TANDEM_DEVICE void skip_n_block(const TileCoords& tile, const NBlockRange& n_blocks, int n_block) {
    wait_k();
    pingpong_wait();
    pingpong_signal();
    release_k();
    zero_v_tail(tile, n_blocks, n_block);
    wait_v();
    release_v();
  }

  // The offset of this lane's 16 bytes of a 16 x 16 fragment in a block of 64 columns, and the row of these bytes. The
  // row is computed again at both ends of a tile, because a register would be live through the main loop.
  TANDEM_DEVICE int fragment_row() const {
    int row = warp * 16 + (lane & 15);
    asm volatile("" : "+r"(row));
    return row;
  }
  TANDEM_DEVICE u32 fragment(u32 base, u32 block, int row, int n) const {
    const int chunk = n % 4 * 2 + (lane >> 4);
    return base + n / 4 * block + row * 128 + ((chunk ^ (row & 7)) << 4);
  }
  TANDEM_DEVICE void load_q(QFragments& queries) const {
    const int row = fragment_row();
#pragma unroll
    for (int c = 0; c < T.head_dim / 16; ++c) ldmatrix(queries[c], fragment(q_smem, kQBlockBytes, row, c));
  }
  // Returns the number of products that are issued in groups of four. At head_dim 64 single products are 2 % faster.
  static constexpr int by_fours(int products) { return T.head_dim > 64 ? products / 4 * 4 : 0; }
  TANDEM_DEVICE void mma_qk(float (&scores)[T.tile_n / 2], const QFragments& queries) const {
    const u64 k = wgmma_smem_desc(shared_address(s.k[k_ring.index]), 16, 1024);
    const u64 q = wgmma_smem_desc(q_smem, 16, 1024);
    discard(scores);
    wgmma_fence();
    constexpr int kProducts = T.head_dim / 16;
    auto keys = [&](int c) { return k + c / 4 * (kKvBlockBytes >> 4) + c % 4 * 2; };
    auto q_desc = [&](int c) { return q + c / 4 * (kQBlockBytes >> 4) + c % 4 * 2; };
    auto multiply_4 = [&](int c) {
      if constexpr (T.q_in_registers()) {
        QkMma::rs_nt_of_4(scores, &queries[c][0], keys(c), c > 0);
      } else {
        QkMma::ss_nt_of_4(scores, q_desc(c), keys(c), c > 0);
      }
    };
    auto multiply = [&](int c) {
      if constexpr (T.q_in_registers()) {
        QkMma::rs_nt(scores, &queries[c][0], keys(c), c > 0);
      } else {
        QkMma::ss_nt(scores, q_desc(c), keys(c), c > 0);
      }
    };
#pragma unroll
    for (int c = 0; c < by_fours(kProducts); c += 4) multiply_4(c);
#pragma unroll
    for (int c = by_fours(kProducts); c < kProducts; ++c) multiply(c);
    wgmma_commit();
  }
  TANDEM_DEVICE void mma_pv(float (&out)[T.head_dim_v / 2], const u32 (&probabilities)[T.tile_n / 4]) const {
    const u64 v = wgmma_smem_desc(shared_address(s.v[v_ring.index]), kKvBlockBytes, 1024);
    fence_operand(out);
    wgmma_fence();
    constexpr int kProducts = T.tile_n / 16, kBytes = 2048;
    auto values = [&](int c) { return v + c * (kBytes >> 4); };
#pragma unroll
    for (int c = 0; c < by_fours(kProducts); c += 4) PvMma::rs_nn_of_4(out, probabilities + 4 * c, values(c), true);
#pragma unroll
    for (int c = by_fours(kProducts); c < kProducts; ++c) PvMma::rs_nn(out, probabilities + 4 * c, values(c), true);
    wgmma_commit();
  }

  // Stores the warpgroup's rows of the result, after their buffer is free. left: the number of rows of the sequence
  // from first_row on.
  TANDEM_DEVICE void store(const float (&out)[T.head_dim_v / 2], const float (&inverse)[2], const TileCoords& tile,
                           int first_row, int left, bool again) const {
    if (T.o_smem_shared()) {
      o_smem_acquire();
    } else if (!T.pingpong) {  // with pingpong compute() has waited
      tma_store_wait_read();
      named_sync(kWarpgroupSync + index, 128);
    }
    const int row = fragment_row();
    u16* const own_out = s.out + (T.o_smem_shared() ? 0 : index * 64 * 64);
#pragma unroll
    for (int c = 0; c < T.head_dim_v / 16; ++c) {
      u32 w[4];
#pragma unroll
      for (int x = 0; x < 4; ++x)
        w[x] = inverse[x & 1] == 0  // a row without visible keys
                   ? 0
                   : pack<T>(out[8 * c + 2 * x] * inverse[x & 1], out[8 * c + 2 * x + 1] * inverse[x & 1]);
      stmatrix(fragment(shared_address(own_out), kOBlockBytes, row, c), w);
    }
    int first_query = tile.q_begin + (first_row >> log2_of(p.pack_gqa));
    asm volatile("" : "+r"(first_query));  // this load after the barrier would delay all threads
    fence_proxy_async();
    named_sync(kWarpgroupSync + index, 128);
    if (T.options.varlen && left < 64) {
      store_rows<T.o_smem_rows(), 2>(p, tile, own_out, {first_row, left, 0, p.head_dim_v});
    } else if (warp == 0 && elect_one()) {
      if (T.lazy_max() && again) tma_store_wait();  // waits for the invalid result's store
#pragma unroll
      for (int c = 0; c < T.head_dim_v; c += 64)
        tma_store(&p.out, own_out + c * T.o_smem_rows(), c, first_row & (p.pack_gqa - 1), first_query, tile.head,
                  tile.batch);
      tma_store_commit();
      if (T.o_smem_shared()) tma_store_wait_read();
    }
    o_smem_release();
  }

  // Stores a float32 result from registers: the four threads of a row fill whole sectors. place: a function that
  // returns the address of this thread's row i, or null. A retry stores with the same threads.
  template <class Place>
  TANDEM_DEVICE void store_f32(const float (&out)[T.head_dim_v / 2], const float (&inverse)[2],
                               const Place& place) const {
    struct alignas(8) Pair {
      float x[2];
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* const row = place(i);
      if (row == nullptr) continue;
      float* const to = row + 2 * (lane & 3);
#pragma unroll
      for (int c = 0; c < T.head_dim_v / 8; ++c) {
        if (8 * c >= p.head_dim_v) break;
        const float *x = &out[4 * c + 2 * i], by = inverse[i];
        // by is 0 in a row without visible keys.
        *reinterpret_cast<Pair*>(to + 8 * c) = by == 0 ? Pair{{0, 0}} : Pair{{x[0] * by, x[1] * by}};
      }
    }
  }
};
