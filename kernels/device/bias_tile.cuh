// Loads of a bias to shared memory, tile by tile, by warps that do not compute. The strides and the address of the bias
// determine the bytes per copy: 16, 4 or one element. Elements beyond a sequence's lengths become zeros and are not
// read.
#pragma once
#include "config/score_options.h"
#include "device/coords.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"

// The layout of a bias in memory: strides in bytes.
template <Bias type>
struct BiasLayout {
  static constexpr int kBytes = bytes_of(type);
  const ForwardParams& p;
  int piece = kBytes;  // bytes per copy: 16, 4 or one element

  TANDEM_DEVICE explicit BiasLayout(const ForwardParams& params) : p(params) {
    if (p.bias_column != 1) return;
    const i64 all = reinterpret_cast<i64>(p.bias) | batch() | head() | row();
    if (all % 16 == 0) {
      piece = 16;
    } else if (all % 4 == 0) {
      piece = 4;
    }
  }
  TANDEM_DEVICE i64 batch() const { return p.bias_batch * kBytes; }
  TANDEM_DEVICE i64 head() const { return p.bias_head * kBytes; }
  TANDEM_DEVICE i64 row() const { return p.bias_row * kBytes; }
  TANDEM_DEVICE i64 column() const { return p.bias_column * kBytes; }
  // The address of an element of a sequence.
  TANDEM_DEVICE const char* at(int sequence, int of_head, int query, int key) const {
    return static_cast<const char*>(p.bias) + sequence * batch() + of_head * head() + query * row() + key * column();
  }
};

// Rows of a tile, of which `left` are used. All rows are queries of one head. In a forward with pack_gqa the rows are
// the heads of each query in turn.
template <Bias type>
struct BiasRows {
  const char* first;
  int left, pack_shift;

  TANDEM_DEVICE const char* at(const BiasLayout<type>& bias, int row) const {
    return first + (row >> pack_shift) * bias.row() + (row & ((1 << pack_shift) - 1)) * bias.head();
  }
  // Returns true if all rows are used and equally spaced.
  TANDEM_DEVICE bool are_whole(int rows) const { return left >= rows && pack_shift == 0; }
};

// The tile that a thread copied last, until its copies have arrived. Each thread signals the tile's barrier after the
// copies of the next tile, or immediately if a warp waits before there is a next tile.
struct BiasUnderWay {
  u64* full = nullptr;  // the tile's barrier; null: all signalled

  TANDEM_DEVICE void begins(u64* next) {
    cp_async_commit();
    tell<1>();
    full = next;
  }
  template <int newer = 0>
  TANDEM_DEVICE void tell() {
    if (full == nullptr) return;
    cp_async_wait<newer>();
    mbarrier_arrive(full);
    full = nullptr;
  }
};

// A tile's rows and columns, the number of copying threads, and Place::at(row, byte), the destination.
template <Bias type, int rows, int columns, int threads, class Place>
struct BiasTile {
  static constexpr int kBytes = bytes_of(type), kRowBytes = columns * kBytes;

  const BiasLayout<type>& bias;
  char* const to;
  const int thread;

  // Copies rows of a BiasRows. columns_left: the number of columns from the first on.
  TANDEM_DEVICE void copy(const BiasRows<type>& from, int columns_left) const {
    if (bias.piece < 4) return copy_elements(from, columns_left);
    if (bias.piece == 4) return copy_pieces<4>(from, columns_left);
    if (!from.are_whole(rows) || columns_left < columns) return copy_pieces<16>(from, columns_left);
    const Pieces<16> own(thread);
    const char* piece = from.first + own.row * bias.row() + own.piece * 16;
#pragma unroll 16
    for (int n = 0; n < own.kCount; ++n, piece += own.kRows * bias.row())
      if (own.has(n)) cp_async_16(shared_address(to) + Place::at(own.row_of(n), own.piece * 16), piece);
  }

 private:
  // The pieces of this thread: one piece of each kRows-th row. If a row has more pieces than there are threads, it is
  // kEach pieces of every row.
  template <int bytes>
  struct Pieces {
    static constexpr int kInRow = kRowBytes / bytes, kRows = kInRow < threads ? threads / kInRow : 1;
    static constexpr int kEach = (kInRow + threads - 1) / threads, kCount = (rows + kRows - 1) / kRows * kEach;
    const int row, piece;

    TANDEM_DEVICE explicit Pieces(int thread) : row(thread / kInRow), piece(thread - row * kInRow) {}
    TANDEM_DEVICE int row_of(int n) const { return row + n / kEach * kRows; }
    TANDEM_DEVICE int piece_of(int n) const { return piece + n % kEach * threads; }
    TANDEM_DEVICE bool has(int n) const {
      return (threads % kInRow == 0 || row < kRows) && (rows % kRows == 0 || row_of(n) < rows) &&
             (kEach == 1 || piece_of(n) < kInRow);
    }
  };

  template <int bytes>
  TANDEM_DEVICE void copy_pieces(const BiasRows<type>& from, int columns_left) const {
    const Pieces<bytes> own(thread);
#pragma unroll 1
    for (int n = 0; n < own.kCount; ++n) {
      if (!own.has(n)) continue;
      const int row = own.row_of(n), byte = own.piece_of(n) * bytes, column = byte / kBytes;
      const int given = row < from.left ? clamp((columns_left - column) * kBytes, 0, bytes) : 0;
      cp_async<bytes>(shared_address(to) + Place::at(row, byte), from.at(bias, row) + column * bias.column(), given);
    }
  }
  // Copies elements of one or two bytes, which cp.async does not support. Several loads are in flight.
  TANDEM_DEVICE void copy_elements(const BiasRows<type>& from, int columns_left) const {
    constexpr int kAtOnce = 8;
    using Element = typename OneOf<kBytes == 1, unsigned char, u16>::Type;
    const Pieces<kBytes> own(thread);
#pragma unroll 1
    for (int first = 0; first < own.kCount; first += kAtOnce) {
      Element x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int n = first + i, row = own.row_of(n), column = own.piece_of(n);
        const bool given = own.has(n) && row < min(rows, from.left) && column < columns_left;
        x[i] = given ? *reinterpret_cast<const Element*>(from.at(bias, row) + column * bias.column()) : 0;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int n = first + i;
        if (own.has(n) && own.row_of(n) < rows)
          *reinterpret_cast<Element*>(to + Place::at(own.row_of(n), own.piece_of(n) * kBytes)) = x[i];
      }
    }
  }
};
