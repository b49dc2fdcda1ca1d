// Which probabilities dropout keeps: Philox4x32-10 (Salmon et al., SC11) as tandem.h states it, the same entries in the
// forward, in the backward and on a CPU. Nothing is stored: each pass draws the words again.
//
// A call gives the words of four neighbouring columns. Where these are not one thread's, lanes that share them draw a
// part each, for all of them, and exchange a bit of each word, so that no word is drawn twice.
#pragma once
#include "ptx/base.cuh"
#include "shared/forward.h"

// Of 32 registers of a fragment, or 32 neighbouring columns: number 4 n + b is kept where bit 8 b + n is set.
TANDEM_DEVICE bool is_kept(u32 bits, int r) { return bits & 1u << (8 * (r & 3) + (r >> 2)); }

struct Dropout {
  u32 key[2], offset, threshold;

  Dropout() = default;
  TANDEM_DEVICE explicit Dropout(const DropoutParams& p) : threshold(p.threshold) {
    const u64 seed = p.seed_ptr ? *p.seed_ptr : p.seed, at = p.offset_ptr ? *p.offset_ptr : p.offset;
    key[0] = static_cast<u32>(seed);
    key[1] = static_cast<u32>(seed >> 32) + static_cast<u32>(at >> 32);
    offset = static_cast<u32>(at);
  }

  // Of columns [4 quad, 4 quad + 4): bit 8 w is set where column 4 quad + w is kept.
  TANDEM_DEVICE u32 draw(u32 quad, u32 row, u32 head) const {
    u32 c[4] = {quad, row, head, offset}, k0 = key[0], k1 = key[1];
#pragma unroll
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      const u64 a = u64{0xD2511F53u} * c[0], b = u64{0xCD9E8D57u} * c[2];
      c[0] = static_cast<u32>(b >> 32) ^ c[1] ^ k0;
      c[1] = static_cast<u32>(b);
      c[2] = static_cast<u32>(a >> 32) ^ c[3] ^ k1;
      c[3] = static_cast<u32>(a);
    }
    u32 bits = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) bits |= c[w] >= threshold ? 1u << 8 * w : 0;
    return bits;
  }

  // What is_kept() asks, of `blocks` times 8 columns from `column` on, queries in rows. Two neighbouring lanes share
  // four columns: each draws for one of the two rows that both have. row, head: of that one, row lane % 2.
  TANDEM_DEVICE u32 by_rows(u32 row, u32 head, int column, int blocks, int lane) const {
    u32 bits = 0;
    const u32 quad = column / 4 + (lane >> 1 & 1);
#pragma unroll 2
    for (int n = 0; n < blocks; ++n) bits |= draw(quad + 2 * n, row, head) << n;
    const u32 other = __shfl_xor_sync(~0u, bits, 1);
    return __byte_perm(bits, other, lane & 1 ? 0x3276 : 0x5410);
  }

  // The same with keys in rows, of `blocks` times 8 queries from `query` on and the warp's 16 keys from `first_key` on.
  // Four lanes that are four apart share four keys: the b-th draws for register 4 n + b of each, and then they
  // transpose.
  TANDEM_DEVICE u32 by_columns(int query, u32 head, int first_key, int blocks, int lane) const {
    u32 bits = 0;
    const int b = lane >> 2 & 3;
    const u32 quad = first_key / 4 + (lane >> 4) + (b >> 1) * 2, row = query + 2 * (lane & 3) + (b & 1);
#pragma unroll 2
    for (int n = 0; n < blocks; ++n) bits |= draw(quad, row + 8 * n, head) << n;
    return transposed<4>(bits, b);
  }

  // Where a thread has a column, `key`, and the lanes of a warp neighbouring ones, from a multiple of four on: of 32
  // queries from `query` on, as is_kept() asks. Four neighbouring lanes share four keys.
  TANDEM_DEVICE u32 of_column(int query, u32 head, int key, int lane) const {
    u32 bits = 0;
#pragma unroll 2
    for (int n = 0; n < 8; ++n) bits |= draw(key / 4, query + 4 * n + (lane & 3), head) << n;
    return transposed<1>(bits, lane & 3);
  }

  // Where a thread has a row: of 32 columns from `column` on, as is_kept() asks.
  TANDEM_DEVICE u32 of_row(u32 row, u32 head, int column) const {
    u32 bits = 0;
#pragma unroll 2
    for (int n = 0; n < 8; ++n) bits |= draw(column / 4 + n, row, head) << n;
    return bits;
  }

 private:
  // Byte i of the b-th of four lanes, which are kLanes apart, becomes byte b of the i-th.
  template <int kLanes>
  TANDEM_DEVICE static u32 transposed(u32 bytes, int b) {
    const u32 near = __shfl_xor_sync(~0u, bytes, kLanes);
    bytes = __byte_perm(bytes, near, b & 1 ? 0x3715 : 0x6240);
    const u32 far = __shfl_xor_sync(~0u, bytes, 2 * kLanes);
    return __byte_perm(bytes, far, b & 2 ? 0x3276 : 0x5410);
  }
};
