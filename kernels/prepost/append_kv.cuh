// Appends new keys and values to a cache, and rotates keys and queries.
//
// A CTA has a few rows of new keys, or of queries; few rows of many heads are divided among CTAs. One thread per row
// finds the row's place. Then all threads move 16 bytes (or one element, if a tensor is not aligned) at a time. A
// thread that rotates has both elements of each pair, so that q_out may be q.
//
// Keys whose slot a later key has are not written: a CTA compares the slots of all later keys with its own. The result
// therefore does not depend on the order of CTAs.
#pragma once
#include "config/append_kv.h"
#include "device/row.cuh"
#include "ptx/base.cuh"
#include "ptx/warp.cuh"

constexpr int kNoPage = -1;  // the row is not written

struct AppendPlace {
  int batch, row;   // in k, v or q
  int page, place;  // in the caches
  i64 position;
};

struct AppendShared {
  AppendPlace places[AppendKvParams::kMaxRows];
  // Own slots by bucket: a list of rows.
  i64 slots[AppendKvParams::kMaxRows];
  int first_of_bucket[AppendKvParams::kBuckets], next_row[AppendKvParams::kMaxRows];
  int superseded[AppendKvParams::kMaxRows];
};

template <class T>
TANDEM_DEVICE i64 number_at(const Numbers<T>& numbers, i64 i) {
  return numbers.data[i * numbers.stride];
}
template <class T>
TANDEM_DEVICE i64 number_or(const Numbers<T>& numbers, i64 i, i64 otherwise) {
  return numbers.data ? number_at(numbers, i) : otherwise;
}

// The sequence of a row, and the row's index in it. sequence: -1 if the row belongs to no sequence.
struct SequenceRow {
  int sequence, index;

  TANDEM_DEVICE SequenceRow(int sequence, int index) : sequence(sequence), index(index) {}
  TANDEM_DEVICE SequenceRow(const AppendKvParams& p, const AppendRowsParams& rows, int row) {
    if (!rows.cu_seqlens.data) {
      sequence = row / rows.seqlen, index = row % rows.seqlen;
      return;
    }
    // The last sequence that begins at or before the row. Any values end the search.
    int low = 0, high = p.batch;
#pragma unroll 1
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      (number_at(rows.cu_seqlens, middle) <= row ? low : high) = middle;
    }
    const i64 begin = p.batch ? number_at(rows.cu_seqlens, low) : 0,
              end = p.batch ? number_at(rows.cu_seqlens, low + 1) : 0;
    const bool inside = begin >= 0 && begin <= row && row < end;
    sequence = inside ? low : -1, index = inside ? row - static_cast<int>(begin) : 0;
  }
};

TANDEM_DEVICE i64 first_place(const AppendKvParams& p, int sequence) { return number_or(p.cache_seqlens, sequence, 0); }

// Fills in page and place of a new key that has a slot.
TANDEM_DEVICE void set_slot(const AppendKvParams& p, i64 slot, AppendPlace* at) {
  if (slot < 0 || slot >= static_cast<i64>(p.pages) * p.page_size) return;
  at->page = static_cast<int>(slot / p.page_size);
  at->place = static_cast<int>(slot % p.page_size);
}

// Fills in page and place of a new key of a sequence.
TANDEM_DEVICE void set_place(const AppendKvParams& p, const SequenceRow& row, AppendPlace* at) {
  const i64 begin = first_place(p, row.sequence), place = begin + row.index;
  const i64 cache_row = number_or(p.cache_batch_idx, row.sequence, row.sequence);
  const i64 places = static_cast<i64>(p.page_size) * (p.page_table ? p.max_pages : 1);
  if (begin < 0 || place >= places || cache_row < 0 || cache_row >= (p.page_table ? p.table_rows : p.pages)) return;
  i64 page = cache_row, in_page = place;
  if (p.page_table) {
    page = p.page_table[cache_row * p.table_batch + place / p.page_size * p.table_column];
    in_page = place % p.page_size;
    if (page < 0 || page >= p.pages) return;
  }
  at->page = static_cast<int>(page), at->place = static_cast<int>(in_page);
}

TANDEM_DEVICE AppendPlace find_place(const AppendKvParams& p, bool keys, int row) {
  const AppendRowsParams& rows = keys ? p.keys : p.queries;
  AppendPlace at{0, row, kNoPage, 0, 0};
  if (p.slot_mapping.data || p.positions.data) {
    at.position = number_or(p.positions, row, 0);
    if (keys) {
      set_slot(p, number_at(p.slot_mapping, row), &at);
    } else {
      at.page = 0;
    }
    return at;
  }
  const SequenceRow source(p, rows, row);
  if (source.sequence < 0) return at;
  if (!rows.cu_seqlens.data) at.batch = source.sequence, at.row = source.index;
  at.position = number_or(p.rotary_seqlens, source.sequence, first_place(p, source.sequence));
  if (keys || !p.single_q_position) at.position += source.index;
  if (keys) {
    set_place(p, source, &at);
  } else {
    at.page = 0;
  }
  return at;
}

// Finds the rows [first, first + count) whose slot a later key has.
TANDEM_DEVICE void mark_superseded(const AppendKvParams& p, AppendShared& shared, int first, int count) {
  constexpr int kMask = AppendKvParams::kBuckets - 1;
  for (int i = threadIdx.x; i < AppendKvParams::kBuckets; i += AppendKvParams::kThreads) shared.first_of_bucket[i] = -1;
  __syncthreads();
  if (threadIdx.x < count) {
    const i64 slot = number_at(p.slot_mapping, first + threadIdx.x);
    shared.slots[threadIdx.x] = slot;
    shared.superseded[threadIdx.x] = 0;
    if (slot >= 0) shared.next_row[threadIdx.x] = atomicExch(&shared.first_of_bucket[slot & kMask], threadIdx.x);
  }
  __syncthreads();
#pragma unroll 4
  for (int later = first + 1 + threadIdx.x; later < p.keys.total; later += AppendKvParams::kThreads) {
    const i64 slot = number_at(p.slot_mapping, later);
    if (slot < 0) continue;
    for (int row = shared.first_of_bucket[slot & kMask]; row >= 0; row = shared.next_row[row]) {
      if (shared.slots[row] == slot && first + row < later) atomicExch(&shared.superseded[row], 1);
    }
  }
  __syncthreads();
  if (threadIdx.x < count && shared.superseded[threadIdx.x]) shared.places[threadIdx.x].page = kNoPage;
}

// N elements of 16 or 32 bits.
template <class Element, int N>
struct alignas(N * sizeof(Element)) Elements {
  Element x[N];
};

// Each product and sum is rounded, as on the CPU.
TANDEM_DEVICE void rotate_pair(float cos, float sin, float& x, float& y) {
  const float a = x, b = y;
  x = __fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
  y = __fadd_rn(__fmul_rn(a, sin), __fmul_rn(b, cos));
}

struct RotaryTables {
  const void *cos, *sin;
  i64 cos_at, sin_at;  // the first element of the row
  ElementType type;

  TANDEM_DEVICE static float load(const void* from, i64 at, ElementType type) {
    return type == ElementType::f16 ? load_element<true>(from, at, false)
                                    : load_element<false>(from, at, type == ElementType::f32);
  }
  // (x, y) of pair n becomes (x cos - y sin, x sin + y cos).
  TANDEM_DEVICE void rotate(int n, float& x, float& y) const {
    rotate_pair(load(cos, cos_at + n, type), load(sin, sin_at + n, type), x, y);
  }
};

template <class Element>
TANDEM_DEVICE float widen(Element x, bool f16) {
  if constexpr (sizeof(Element) == 4) {
    return x;
  } else {
    return f16 ? to_float<true>(x) : to_float<false>(x);
  }
}
template <class Element>
TANDEM_DEVICE Element narrow(float x, bool f16) {
  if constexpr (sizeof(Element) == 4) {
    return x;
  } else {
    u16 y;
    if (f16) {
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    } else {
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    }
    return y;
  }
}

// Moves the elements of one head from column `column` on. rotary_dim: 0 for values and positions outside the tables.
template <class Element, int N>
TANDEM_DEVICE void move_elements(const AppendKvParams& p, const RotaryTables& tables, int rotary_dim,
                                 const Element* from, Element* to, int column) {
  using Part = Elements<Element, N>;
  const bool f16 = p.type == ElementType::f16;
  const auto load = [&](int c) { return *reinterpret_cast<const Part*>(from + c); };
  const auto store = [&](int c, const Part& part) { *reinterpret_cast<Part*>(to + c) = part; };
  if (column >= rotary_dim) return store(column, load(column));
  if (p.interleaved && N > 1) {
    Part part = load(column);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      float x = widen(part.x[i], f16), y = widen(part.x[i + 1], f16);
      tables.rotate((column + i) / 2, x, y);
      part.x[i] = narrow<Element>(x, f16), part.x[i + 1] = narrow<Element>(y, f16);
    }
    return store(column, part);
  }
  // The first element of a pair moves the second one too.
  const int apart = p.interleaved ? 1 : rotary_dim / 2;
  if (p.interleaved ? column % 2 != 0 : column >= apart) return;
  Part first = load(column), second = load(column + apart);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float x = widen(first.x[i], f16), y = widen(second.x[i], f16);
    tables.rotate(p.interleaved ? column / 2 : column + i, x, y);
    first.x[i] = narrow<Element>(x, f16), second.x[i] = narrow<Element>(y, f16);
  }
  store(column, first);
  store(column + apart, second);
}

struct AppendMove {
  StridedRows from, to;
  int heads, head_dim;
  bool to_cache, rotates;
};

// Moves the CTA's part of its rows from one tensor to another.
template <class Element, int N>
TANDEM_DEVICE void move_rows(const AppendKvParams& p, const AppendShared& shared, int count, const AppendMove& move) {
  const int parts = move.head_dim / N, of_row = move.heads * parts, first = blockIdx.y * AppendKvParams::kThreads;
#pragma unroll 1
  for (int n = first + threadIdx.x; n < count * of_row; n += gridDim.y * AppendKvParams::kThreads) {
    const AppendPlace& at = shared.places[n / of_row];
    if (at.page == kNoPage) continue;
    const int head = n % of_row / parts, column = n % parts * N;
    const i64 source = at.batch * move.from.batch + at.row * move.from.row + head * move.from.head;
    const i64 batch = move.to_cache ? at.page : at.batch, row = move.to_cache ? at.place : at.row;
    const i64 target = batch * move.to.batch + row * move.to.row + head * move.to.head;
    const bool rotates = move.rotates && at.position >= 0 && at.position < p.rotary_rows;
    const RotaryTables tables{p.cos, p.sin, at.position * p.cos_row, at.position * p.sin_row, p.table_type};
    move_elements<Element, N>(p, tables, rotates ? p.rotary_dim : 0,
                              static_cast<const Element*>(move.from.data) + source,
                              static_cast<Element*>(move.to.data) + target, column);
  }
}

template <class Element>
TANDEM_DEVICE void move_block(const AppendKvParams& p, const AppendShared& shared, int count, bool keys) {
  constexpr int kElements = 16 / sizeof(Element);
  const AppendMove moves[] = {{keys ? p.k : p.q, keys ? p.k_cache : p.q_out, keys ? p.keys.heads : p.queries.heads,
                               p.head_dim, keys, p.rotary_dim > 0},
                              {p.v, p.v_cache, keys ? p.keys.heads : 0, p.head_dim_v, true, false}};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if (p.aligned) {
      move_rows<Element, kElements>(p, shared, count, moves[n]);
    } else {
      move_rows<Element, 1>(p, shared, count, moves[n]);
    }
  }
}

// Few rows: a CTA has a row, and a thread 16 bytes of it, or two times 16 bytes that it rotates. All loads are in
// flight together, except that a place and a row of the tables need the length. The code is short, because instructions
// that are not cached cost more time than the moves.
struct ThreadMove {
  bool keys, value;
  bool rotates, is_second;  // part of pairs: first or second
  int sequence, index, head, column, apart;

  // n: the number of the move in the row.
  TANDEM_DEVICE ThreadMove(const AppendKvParams& p, int n) {
    keys = blockIdx.x < p.key_blocks;
    const AppendRowsParams& rows = keys ? p.keys : p.queries;
    const int row = blockIdx.x - (keys ? 0 : p.key_blocks), of_head = p.head_dim / 8;
    sequence = rows.seqlen == 1 ? row : row / rows.seqlen;
    index = row - sequence * rows.seqlen;
    value = n >= rows.heads * of_head;
    const int own = value ? n - rows.heads * of_head : n, parts = value ? p.head_dim_v / 8 : of_head;
    head = own / parts, column = (own - head * parts) * 8;
    if (value && (!keys || head >= rows.heads)) head = -1;
    apart = p.rotary_dim / 2;
    rotates = !value && column < apart;
    is_second = !value && column >= apart && column < p.rotary_dim;
  }
};

// The tables' values of eight pairs from column on.
struct RotaryValues {
  float cos[8], sin[8];

  TANDEM_DEVICE RotaryValues(const AppendKvParams& p, i64 position, int column) {
    const i64 cos_at = position * p.cos_row + column, sin_at = position * p.sin_row + column;
    if (p.table_type == ElementType::f32) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        cos[i] = static_cast<const float*>(p.cos)[cos_at + i];
        sin[i] = static_cast<const float*>(p.sin)[sin_at + i];
      }
    } else {
      const bool f16 = p.table_type == ElementType::f16;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        cos[i] = widen(static_cast<const u16*>(p.cos)[cos_at + i], f16);
        sin[i] = widen(static_cast<const u16*>(p.sin)[sin_at + i], f16);
      }
    }
  }
};

TANDEM_DEVICE void append_by_thread(const AppendKvParams& p) {
  using Part = Elements<u16, 8>;
  const ThreadMove move(p, static_cast<int>(blockIdx.y * AppendKvParams::kThreads + threadIdx.x));
  if (move.head < 0) return;
  const StridedRows& from = move.value ? p.v : move.keys ? p.k : p.q;
  const StridedRows& to = move.value ? p.v_cache : move.keys ? p.k_cache : p.q_out;
  const u16* const source = static_cast<const u16*>(from.data) + move.sequence * from.batch + move.index * from.row +
                            move.head * from.head + move.column;
  Part first, second;
  if (!move.is_second) first = *reinterpret_cast<const Part*>(source);
  if (move.rotates) second = *reinterpret_cast<const Part*>(source + move.apart);
  AppendPlace at{move.sequence, move.index, 0, move.index, 0};
  at.position = number_or(p.rotary_seqlens, move.sequence, first_place(p, move.sequence));
  if (move.keys || !p.single_q_position) at.position += move.index;
  const bool in_tables = !move.value && p.rotary_dim > 0 && at.position >= 0 && at.position < p.rotary_rows;
  // The thread of the first part moves the second one too, if both are rotated.
  if (move.is_second) {
    if (in_tables) return;
    first = *reinterpret_cast<const Part*>(source);
  }
  if (in_tables && move.rotates) {
    const RotaryValues table(p, at.position, move.column);
    const bool f16 = p.type == ElementType::f16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float x = widen(first.x[i], f16), y = widen(second.x[i], f16);
      rotate_pair(table.cos[i], table.sin[i], x, y);
      first.x[i] = narrow<u16>(x, f16), second.x[i] = narrow<u16>(y, f16);
    }
  }
  if (move.keys) {
    at.page = kNoPage;
    set_place(p, {move.sequence, move.index}, &at);
    if (at.page == kNoPage) return;
  }
  const i64 batch = move.keys ? at.page : move.sequence, row = move.keys ? at.place : move.index;
  u16* const target = static_cast<u16*>(to.data) + batch * to.batch + row * to.row + move.head * to.head + move.column;
  *reinterpret_cast<Part*>(target) = first;
  if (in_tables && move.rotates) *reinterpret_cast<Part*>(target + move.apart) = second;
}

TANDEM_DEVICE void append_rows(const AppendKvParams& p) {
  __shared__ AppendShared shared;
  const bool keys = blockIdx.x < p.key_blocks;
  const int total = keys ? p.keys.total : p.queries.total;
  const int first = (blockIdx.x - (keys ? 0 : p.key_blocks)) * p.rows_of_block,
            count = min(p.rows_of_block, total - first);
  grid_dependency_wait();
  if (p.by_thread) return append_by_thread(p);
  if (threadIdx.x < count) shared.places[threadIdx.x] = find_place(p, keys, first + threadIdx.x);
  if (keys && p.slot_mapping.data) mark_superseded(p, shared, first, count);
  __syncthreads();
  if (p.type == ElementType::f32) {
    move_block<float>(p, shared, count, keys);
  } else {
    move_block<u16>(p, shared, count, keys);
  }
}
