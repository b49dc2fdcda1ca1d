// The limits of one Hopper GPU for an attention kernel: each entry point keeps a single unit busy.
// bench/limits/measure.py compiles, launches and times them.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"

struct Record {
  u64 clocks, nanoseconds;
};

struct Args {
  const char* from;  // random bfloat16, or memory to read
  char* to;          // memory to write
  u64 bytes;         // size of from
  u64 turns;         // iterations of the loop
  Record* records;   // one per block
  u32 zero;          // 0, but unknown to the compiler: prevents dead code removal
};

TANDEM_DEVICE u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
TANDEM_DEVICE Record now() { return {static_cast<u64>(clock64()), nanoseconds()}; }
TANDEM_DEVICE void write_record(const Args& a, const Record& begin) {
  const Record end = now();
  a.records[blockIdx.x] = {end.clocks - begin.clocks, end.nanoseconds - begin.nanoseconds};
}

// Returns numbers in [1, 2), different for every thread and index.
TANDEM_DEVICE u32 noise(u32 x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}
TANDEM_DEVICE float number(u32 i) { return __uint_as_float(0x3f800000u | noise(threadIdx.x * 4096 + i) >> 9); }

// ---- The tensor core, in the shape of attention: S = Q K, O += P V, of each warpgroup -------------------------------
// Shared memory: Q | K0 V0 | K1 V1, as wgmma reads them; their contents are random, so that power is that of real data.
template <int dim_, int keys_, int groups_, bool registers_>
struct Shape {
  static constexpr int dim = dim_, keys = keys_, groups = groups_;
  static constexpr bool registers = registers_;  // Q in registers, else in shared memory
  static constexpr u32 q_bytes = groups * 64 * dim * 2, tile_bytes = keys * dim * 2;
  static constexpr int threads = 128 * (groups + 1);
};

struct Barriers {
  u64 full[4], empty[4];  // K0, V0, K1, V1
};

// One thread calls this function. size and both addresses must be multiples of 16. PTX ISA "cp.async.bulk".
TANDEM_DEVICE void bulk_load(u32 to, const void* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

template <class S>
TANDEM_DEVICE void stream(const Args& a, u32 shared, Barriers& b) {
  const u64 tiles = (a.bytes - S::q_bytes) / S::tile_bytes;
  u64 tile = blockIdx.x % tiles;
  for (u64 n = 0; n < 4 * a.turns; ++n) {
    const u32 place = n % 4, parity = n / 4 & 1;
    mbarrier_wait(&b.empty[place], parity ^ 1);
    mbarrier_expect_tx(&b.full[place], S::tile_bytes);
    bulk_load(shared + S::q_bytes + place * S::tile_bytes, a.from + S::q_bytes + tile * S::tile_bytes, S::tile_bytes,
              &b.full[place]);
    tile = tile + 1 < tiles ? tile + 1 : 0;
  }
}

template <class S, bool streamed>
TANDEM_DEVICE void multiply(const Args& a, u32 shared, Barriers& b, int group) {
  using Scores = Wgmma<false, S::keys>;
  using Values = Wgmma<false, S::dim>;
  constexpr u32 q_block = S::groups * 64 * 128, k_block = S::keys * 128;  // bytes of 64 columns
  const u64 q = wgmma_smem_desc(shared + group * 64 * 128, 16, 1024);
  const bool keep = a.zero != 0;
  float scores[S::keys / 2], out[S::dim / 2];
  u32 probabilities[S::keys / 4], queries[S::registers ? S::dim / 4 : 4];
#pragma unroll
  for (int i = 0; i < S::keys / 2; ++i) scores[i] = 0;
#pragma unroll
  for (int i = 0; i < S::dim / 2; ++i) out[i] = 0;
#pragma unroll
  for (int i = 0; i < S::keys / 4; ++i)  // two numbers in (0, 1)
    probabilities[i] = (noise(threadIdx.x * 64 + i) & 0x007f007fu) | 0x3f003f00u;
  if constexpr (S::registers) {
#pragma unroll
    for (int i = 0; i < S::dim / 4; ++i) queries[i] = (noise(threadIdx.x * 77 + i) & 0x80ff80ffu) | 0x3f003f00u;
  }
#pragma unroll 1
  for (u64 turn = 0; turn < a.turns; ++turn) {
#pragma unroll
    for (int stage = 0; stage < 2; ++stage) {
      const u32 k_address = shared + S::q_bytes + 2 * stage * S::tile_bytes;
      const u64 k = wgmma_smem_desc(k_address, 16, 1024), v = wgmma_smem_desc(k_address + S::tile_bytes, k_block, 1024);
      if constexpr (streamed) mbarrier_wait(&b.full[2 * stage], turn & 1);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < S::dim / 16; ++c) {
        const u64 k_c = k + c / 4 * (k_block >> 4) + c % 4 * 2;
        if constexpr (S::registers) {
          Scores::rs_nt(scores, queries + 4 * c, k_c, c > 0 || keep);
        } else {
          Scores::ss_nt(scores, q + c / 4 * (q_block >> 4) + c % 4 * 2, k_c, c > 0 || keep);
        }
      }
      wgmma_commit();
      if constexpr (streamed) mbarrier_wait(&b.full[2 * stage + 1], turn & 1);
#pragma unroll
      for (int c = 0; c < S::keys / 16; ++c)  // O restarts every 32 tiles, as in a real kernel
        Values::rs_nn(out, probabilities + 4 * c, v + c * (2048 >> 4), c > 0 || stage > 0 || turn % 16 > 0);
      wgmma_commit();
      wgmma_wait<1>();  // S, and the previous tile's O
      if (streamed && threadIdx.x % 32 == 0) {
        mbarrier_arrive(&b.empty[2 * stage]);
        if (stage > 0 || turn > 0) mbarrier_arrive(&b.empty[2 * (stage ^ 1) + 1]);
      }
      __syncwarp();
    }
  }
  wgmma_wait<0>();
  fence_operand(scores);
  fence_operand(out);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < S::keys / 2; ++i) sum += scores[i];
#pragma unroll
  for (int i = 0; i < S::dim / 2; ++i) sum += out[i];
  if (keep) reinterpret_cast<float*>(a.to)[threadIdx.x] = sum;
}

template <class S, bool streamed>
TANDEM_DEVICE void tensor_core(const Args& a) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ Barriers b;
  const u32 shared = (shared_address(memory) + 1023) & ~1023u;
  const u32 filled = S::q_bytes + (streamed ? 0 : 4 * S::tile_bytes);
  for (u32 i = threadIdx.x * 16; i < filled; i += blockDim.x * 16)
    *reinterpret_cast<uint4*>(memory + (shared - shared_address(memory)) + i) =
        *reinterpret_cast<const uint4*>(a.from + i);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; ++i) {
      mbarrier_init(&b.full[i], 1);
      mbarrier_init(&b.empty[i], 4 * S::groups);
    }
    fence_mbarrier_init();
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const Record begin = now();
  const int group = uniform(threadIdx.x / 128);
  if (group == 0) {
    setmaxnreg_dec<S::groups == 3 ? 32 : 24>();
    if (streamed && threadIdx.x == 0) stream<S>(a, shared, b);
  } else {
    setmaxnreg_inc<S::groups == 3 ? 160 : 240>();
    multiply<S, streamed>(a, shared, b, group - 1);
    named_sync(1, 128 * S::groups);
    if (threadIdx.x == 128) write_record(a, begin);
  }
}

// ---- Other units: blocks of 1024 threads ---------------------------------------------------------------------------
constexpr int kChains = 8;     // independent chains per thread
constexpr int kUnrolled = 16;  // operations between branches: times kChains

template <class F>
TANDEM_DEVICE void arithmetic(const Args& a, F step) {
  float x[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) x[i] = number(i) - 1.0f;
  __syncthreads();
  const Record begin = now();
#pragma unroll 1
  for (u64 turn = 0; turn < a.turns; ++turn) {
#pragma unroll
    for (int n = 0; n < kUnrolled; ++n) {
#pragma unroll
      for (int i = 0; i < kChains; ++i) step(x[i]);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) write_record(a, begin);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kChains; ++i) sum += x[i];
  if (a.zero) reinterpret_cast<float*>(a.to)[threadIdx.x] = sum;
}

TANDEM_DEVICE void shared_reads(const Args& a) {
  extern __shared__ __align__(1024) char memory[];
  const u32 at = shared_address(memory) + threadIdx.x * 16;
  u32 sum = 0;
  __syncthreads();
  const Record begin = now();
#pragma unroll 1
  for (u64 turn = 0; turn < a.turns; ++turn) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {  // new addresses in each turn, else one read would suffice
      u32 x, y, z, w;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                   : "r"((at ^ (static_cast<u32>(turn) & 7) << 4) + n * 16384));
      sum ^= x ^ y ^ z ^ w;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) write_record(a, begin);
  if (a.zero) reinterpret_cast<u32*>(a.to)[threadIdx.x] = sum;
}

// All blocks together read `from` in each turn, and copy it to `to` if `copy`. A block has another part in each turn,
// so that no data stays in one SM.
template <bool copy>
TANDEM_DEVICE void memory_traffic(const Args& a) {
  constexpr u64 kPart = 65536;  // bytes: 4 x 16 per thread
  uint4 x[4];
  u32 sum = 0;
  const Record begin = now();
  for (u64 turn = 0; turn < a.turns; ++turn) {
    for (u64 part = (blockIdx.x + 5 * turn) % gridDim.x; part < a.bytes / kPart; part += gridDim.x) {
      const u64 at = part * kPart + threadIdx.x * 16;
#pragma unroll
      for (int n = 0; n < 4; ++n)
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[n].x), "=r"(x[n].y), "=r"(x[n].z), "=r"(x[n].w)
                     : "l"(a.from + at + n * 16384));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if constexpr (copy) {
          *reinterpret_cast<uint4*>(a.to + at + n * 16384) = x[n];
        } else {
          sum ^= x[n].x ^ x[n].y ^ x[n].z ^ x[n].w;
        }
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) write_record(a, begin);
  if (a.zero) reinterpret_cast<u32*>(a.to)[threadIdx.x] = sum;
}
