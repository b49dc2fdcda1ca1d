#include "vgpu/src/units/fragments.h"

#include <cstring>

#include "vgpu/src/units/formats.h"
#include "vgpu/src/units/product.h"

namespace tandem::vgpu::units {
namespace {

// A register of an operand is eight chunks of 16 bytes. Four lanes have a chunk: row (or column) i, elements along k.
constexpr uint32_t kChunks[] = {0, 16, 32, 48, 64, 80, 96, 112};
constexpr int kLines = 8;

ChunkList chunks_of(Format format, ConstRow row) {
  return {format, reinterpret_cast<const std::byte*>(row), kChunks, kLines};
}
void unpack(Format format, ConstRow row, bool across, int64_t pitch, float* to) {
  products().unpack_f32(chunks_of(format, row), across, pitch, to);
}
void unpack(Format format, ConstRow row, bool across, int64_t pitch, int32_t* to) {
  products().unpack_s32(chunks_of(format, row), across, pitch, to);
}

int elements_per_chunk(Format format) { return 128 / bits_of(format); }

template <class T>
void rows_of(Format format, int rows, int k, const ConstRow* registers, T* to) {
  const int halves = rows / kLines, elements = elements_per_chunk(format);
  for (int r = 0; r < halves * k / elements; ++r)
    unpack(format, registers[r], false, k, to + r % halves * kLines * k + r / halves * elements);
}
template <class T>
void columns_of(Format format, int k, const ConstRow* registers, T* to) {
  const int elements = elements_per_chunk(format);
  for (int r = 0; r < k / elements; ++r) unpack(format, registers[r], true, kLines, to + r * elements * kLines);
}

// Sums of eight rows and eight columns are two registers whose elements alternate. Four lanes of each are one row.
using Four = uint32_t __attribute__((vector_size(16)));
Four load(const void* from) {
  Four x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
void store(Four x, void* to) { std::memcpy(to, &x, sizeof x); }

// Calls f(first of two registers, lane, place) for each eight sums of a row.
template <class F>
void for_each_row(int rows, int n, F&& f) {
  const int halves = rows / kLines;
  for (int block = 0; block < n / 8; ++block)
    for (int half = 0; half < halves; ++half)
      for (int row = 0; row < kLines; ++row)
        f(2 * (block * halves + half), 4 * row, (row + kLines * half) * n + 8 * block);
}

void read_sums(int rows, int n, const ConstRow* registers, void* to) {
  for_each_row(rows, n, [&](int r, int lane, int place) {
    const Four even = load(registers[r] + lane), odd = load(registers[r + 1] + lane);
    store(__builtin_shufflevector(even, odd, 0, 4, 1, 5), static_cast<uint32_t*>(to) + place);
    store(__builtin_shufflevector(even, odd, 2, 6, 3, 7), static_cast<uint32_t*>(to) + place + 4);
  });
}
void write_sums(int rows, int n, const void* from, const Row* registers) {
  for_each_row(rows, n, [&](int r, int lane, int place) {
    const Four low = load(static_cast<const uint32_t*>(from) + place),
               high = load(static_cast<const uint32_t*>(from) + place + 4);
    store(__builtin_shufflevector(low, high, 0, 2, 4, 6), registers[r] + lane);
    store(__builtin_shufflevector(low, high, 1, 3, 5, 7), registers[r + 1] + lane);
  });
}

}  // namespace

void rows_from_fragment(Format format, int rows, int k, const ConstRow* registers, float* to) {
  rows_of(format, rows, k, registers, to);
}
void rows_from_fragment(Format format, int rows, int k, const ConstRow* registers, int32_t* to) {
  rows_of(format, rows, k, registers, to);
}
void columns_from_fragment(Format format, int k, const ConstRow* registers, float* to) {
  columns_of(format, k, registers, to);
}
void columns_from_fragment(Format format, int k, const ConstRow* registers, int32_t* to) {
  columns_of(format, k, registers, to);
}

// f16: two sums of a register are adjacent in the row.
void sums_from_fragment(Sum sum, int n, const ConstRow* registers, float* to) {
  if (sum != Sum::f16) return read_sums(16, n, registers, to);
  for_each_row(16, n, [&](int r, int lane, int place) {
    for (int q = 0; q < 4; ++q) {
      const uint32_t pair = registers[r / 2][lane + q];
      to[place + 2 * q] = decode_one<Format::f16>(pair & 0xffff);
      to[place + 2 * q + 1] = decode_one<Format::f16>(pair >> 16);
    }
  });
}
void sums_from_fragment(Sum, int n, const ConstRow* registers, int32_t* to, int rows) {
  read_sums(rows, n, registers, to);
}

void sums_to_fragment(Sum sum, int n, const float* from, const Row* registers) {
  if (sum != Sum::f16) return write_sums(16, n, from, registers);
  const FitMasks fit = masks_of({});
  for_each_row(16, n, [&](int r, int lane, int place) {
    for (int q = 0; q < 4; ++q)
      registers[r / 2][lane + q] = encode_one<Format::f16>(from[place + 2 * q + 1], fit) << 16 |
                                   encode_one<Format::f16>(from[place + 2 * q], fit);
  });
}
void sums_to_fragment(Sum, int n, const int32_t* from, const Row* registers, int rows) {
  write_sums(rows, n, from, registers);
}

}  // namespace tandem::vgpu::units
