// The mask of dropout: Philox4x32 with seven rounds (Salmon et al., SC11) as tandem.h defines it. The forward, the
// backward and the CPU drop the same entries. No mask is stored: each pass draws the words again.
//
// One draw decides 16 neighbouring columns of a row, one byte each. If several lanes share these columns, each lane
// performs a part of the draws, and the lanes exchange bits. A thread finally has one bit for each of 32 registers of a
// fragment, or of 32 neighbouring columns.
#pragma once
#include "config/forward.h"
#include "ptx/base.cuh"

// The third number of a counter: the query head among the heads of all sequences. placed: rows and columns are parts of
// longer sequences.
template <bool placed>
struct DropoutHead {
  u32 number;
  const Place* place;
};
template <auto T>
TANDEM_DEVICE DropoutHead<T.options.placed> dropout_head(const ForwardParams& p, int sequence, int head) {
  if constexpr (!T.options.placed) return {static_cast<u32>(sequence * p.heads_q + head), nullptr};
  const Place* const place = p.places + sequence;
  return {static_cast<u32>(place->document * place->heads_q + place->first_head + head), place};
}

struct Dropout {
  u32 key[2], offset, carry, low_carry;  // low_carry: seven bits of each byte

  Dropout() = default;
  TANDEM_DEVICE explicit Dropout(const DropoutParams& p) : carry(p.carry), low_carry(p.carry & 0x7f7f7f7fu) {
    const u64 seed = p.seed_ptr ? *p.seed_ptr : p.seed, at = p.offset_ptr ? *p.offset_ptr : p.offset;
    key[0] = warp_uniform(static_cast<u32>(seed));
    key[1] = warp_uniform(static_cast<u32>(seed >> 32) + static_cast<u32>(at >> 32));
    offset = warp_uniform(static_cast<u32>(at));
  }

  // Queries in rows: `blocks` times 8 columns from `column` on, up to 32 registers; bit_in_rows() maps them. Four lanes
  // share two rows; each draws every other group of one row. row, head: this row, lane / 2 % 2.
  template <class Head>
  TANDEM_DEVICE u32 by_rows(u32 row, const Head& head, int column, int blocks, int lane) const {
    const u32 group = column / 16 + (lane & 1);
    u32 words[8] = {};
    draw(&words[0], group, row, head);
    if (blocks > 4) draw(&words[4], group + 2, row, head);
    return exchanged<16, 2>(exchanged<8, 1>(gathered(words), lane), lane);
  }
  // r: 4 n + 2 row + column % 2, of the n-th 8 columns.
  static constexpr int bit_in_rows(int r) {
    return 16 * (r >> 1 & 1) + 8 * (r >> 3 & 1) + 4 * (r >> 4 & 1) + 2 * (r >> 2 & 1) + (r & 1);
  }

  // Keys in rows: `blocks` times 8 queries from `query` on and the warp's 16 keys from `first_key` on, one bit per
  // register in their order. Eight lanes at distance four share 16 keys; each lane draws for one or two queries.
  template <class Head>
  TANDEM_DEVICE u32 by_columns(int query, const Head& head, int first_key, int blocks, int lane) const {
    const int of_lane = lane >> 2;
    const u32 row = query + 2 * (lane & 3) + (of_lane & 1) + (of_lane & 2) * 8 + (of_lane & 4) * (blocks > 4 ? 8 : 2);
    u32 words[8] = {};
    draw(&words[0], first_key / 16, row, head);
    if (blocks > 4) draw(&words[4], first_key / 16, row + 8, head);
    u32 bits = exchanged<1, 4>(gathered(words), lane);
    bits = exchanged<16, 16>(exchanged<8, 8>(bits, lane), lane);
    return blocks > 4 ? bits : bits | bits >> 12;
  }

  // One column per thread: lanes have neighbouring keys from a multiple of 16 on, each with 32 queries from `query` on.
  // Sixteen lanes share a group; each lane draws for two queries.
  template <class Head>
  TANDEM_DEVICE u32 of_column(int query, const Head& head, int key, int lane) const {
    const u32 row = query + (lane & 1) + (lane & 6) * 4 + (lane & 8) / 4;
    u32 words[8];
    draw(&words[0], key / 16, row, head);
    draw(&words[4], key / 16, row + 4, head);
    const u32 bits = exchanged<2, 8>(exchanged<1, 1>(gathered(words), lane), lane);
    return exchanged<16, 4>(exchanged<8, 2>(bits, lane), lane);
  }

  // One row per thread: 32 columns from `column` on; bit_in_row() maps them.
  template <class Head>
  TANDEM_DEVICE u32 of_row(u32 row, const Head& head, int column) const {
    u32 words[8];
    draw(&words[0], column / 16, row, head);
    draw(&words[4], column / 16 + 1, row, head);
    return gathered(words);
  }
  static constexpr int bit_in_row(int n) { return 8 * (n >> 1 & 3) + 4 * (n >> 4) + 2 * (n >> 3 & 1) + (n & 1); }

 private:
  // Draws columns [16 group, 16 group + 16). Bit 7 of a byte is set if its column is kept.
  TANDEM_DEVICE void draw(u32* words, u32 group, u32 row, const DropoutHead<true>& head) const {
    const Place& place = *head.place;
    const DropoutHead<false> whole{head.number, nullptr};
    const u32 query = place.first_query + row * place.stride, first = place.first_key + 16 * group * place.stride;
    if (place.stride == 1 && first % 16 == 0) {
      draw(words, first / 16, query, whole);
    } else {
      draw_scattered(words, first, place.stride, query, whole);
    }
  }
  // Draws 16 columns at any positions, by one draw for each of their groups.
  TANDEM_DEVICE void draw_scattered(u32* words, u32 column, u32 stride, u32 query,
                                    const DropoutHead<false>& head) const {
    u32 drawn[4] = {}, kept = 0, group = ~0u;
#pragma unroll 1
    for (int c = 0; c < 16; ++c, column += stride) {
      if (column / 16 != group) draw(drawn, group = column / 16, query, head);
      const u32 low = column & 1 ? drawn[1] : drawn[0], high = column & 1 ? drawn[3] : drawn[2];
      const u32 word = column & 8 ? high : low;
      kept |= (word >> (column / 2 % 4 * 8 + 7) & 1) << c;
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const u32 bits = kept >> (w / 2 * 8 + w % 2);
      words[w] = (bits & 1) << 7 | (bits & 4) << 13 | (bits & 16) << 19 | (bits & 64) << 25;
    }
  }
  TANDEM_DEVICE void draw(u32* words, u32 group, u32 row, const DropoutHead<false>& head) const {
    u32 c[4] = {group, row, head.number, offset}, k0 = key[0], k1 = key[1];
#pragma unroll
    for (int round = 0; round < 7; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      const u64 a = u64{0xD2511F53u} * c[0], b = u64{0xCD9E8D57u} * c[2];
      c[0] = static_cast<u32>(b >> 32) ^ c[1] ^ k0;
      c[1] = static_cast<u32>(b);
      c[2] = static_cast<u32>(a >> 32) ^ c[3] ^ k1;
      c[3] = static_cast<u32>(a);
    }
    // Computes for each byte whether its sum with (256 - threshold) carries into a ninth bit. Seven bits of each are
    // added; the eighth carries if two of three bits are set.
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const u32 sum = (c[w] & 0x7f7f7f7fu) + low_carry;
      words[w] = (c[w] & carry) | ((c[w] | carry) & sum);
    }
  }

  // Moves bit 7 of each byte of the n-th word to bit n of that byte.
  TANDEM_DEVICE static u32 gathered(const u32 (&words)[8]) {
    u32 bits = words[0];
#pragma unroll
    for (int n = 1; n < 8; ++n) bits = (bits >> 1 & 0x7f7f7f7fu) | (words[n] & 0x80808080u);
    return bits;
  }

  // Exchanges bits between lanes at distance kLanes. The lower lane gets the even fields of kBits bits of both lanes,
  // the upper lane the odd fields. Bit kBits of a bit's number then identifies the source lane.
  template <int kBits, int kLanes>
  TANDEM_DEVICE static u32 exchanged(u32 bits, int lane) {
    const u32 others = __shfl_xor_sync(~0u, bits, kLanes);
    const bool upper = lane & kLanes;
    if constexpr (kBits == 16) return __byte_perm(bits, others, upper ? 0x3276 : 0x5410);
    if constexpr (kBits == 8) return __byte_perm(bits, others, upper ? 0x3715 : 0x6240);
    constexpr u32 kEven = kBits == 1 ? 0x55555555u : 0x33333333u;
    const u32 own = upper ? ~kEven : kEven, moved = __funnelshift_l(others, others, upper ? 32 - kBits : kBits);
    return (bits & own) | (moved & ~own);
  }
};

// Returns x, or 0 if the bit is not set.
TANDEM_DEVICE float keep_or_zero(u32 bits, int bit, float x) { return where_bit(bits, bit, x, 0.0f); }
// Returns x times the bit, on the FMA unit instead of a select. x must be finite.
TANDEM_DEVICE float keep_or_times_zero(u32 bits, int n, float x) {
  asm("{.reg .pred p; .reg .b32 bit;\n"
      "and.b32 bit, %1, %2; setp.ne.b32 p, bit, 0; @!p mul.f32 %0, %0, 0f00000000;}"
      : "+f"(x)
      : "r"(bits), "r"(1u << n));
  return x;
}
