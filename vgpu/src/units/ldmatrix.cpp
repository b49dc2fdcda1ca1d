// ldmatrix, stmatrix, movmatrix. Lane t holds row t / 4 of an 8 x 8 matrix of 16 bits, columns 2 (t % 4) and 2 (t % 4)
// + 1.
#include <cstring>
#include <utility>

#include "base/text.h"
#include "vgpu/src/units/wgmma.h"

namespace tandem::vgpu::units {
namespace {

using Shape = MatrixAccess::Shape;

constexpr int kRowBytes = 16;

bool is_16x16(Shape shape) {
  return shape == Shape::m16n16_b8 || shape == Shape::m16n16_b8x16_b6x16_p32 || shape == Shape::m16n16_b8x16_b4x16_p64;
}

// A row of 16 elements becomes 16 bytes. Elements of 4 and 6 bits are packed at its beginning, and the rest is padding.
void read_row(Shape shape, const std::byte* from, uint8_t* to) {
  uint8_t packed[kRowBytes];
  std::memcpy(packed, from, kRowBytes);
  const bool four = shape == Shape::m8n16_b8x16_b4x16_p64 || shape == Shape::m16n16_b8x16_b4x16_p64;
  const bool six = shape == Shape::m8n16_b8x16_b6x16_p32 || shape == Shape::m16n16_b8x16_b6x16_p32;
  for (int i = 0; i < kRowBytes; ++i) {
    to[i] = packed[i];
    if (four) to[i] = static_cast<uint8_t>(packed[i / 2] >> (4 * (i % 2)) & 0xf);
    if (six) {
      const int bit = 6 * i;
      to[i] = static_cast<uint8_t>((packed[bit / 8] | packed[bit / 8 + 1] << 8) >> (bit % 8) & 0x3f);
    }
  }
}

// The byte of the matrix that byte e of register r of a lane holds.
struct RowPlace {
  int row, byte;
};
RowPlace place_of(const MatrixAccess& access, int lane, int r, int e) {
  const int q = lane % 4, line = lane / 4;
  switch (access.shape) {
    case Shape::m8n8_b16:
      return access.transpose ? RowPlace{2 * q + e / 2, 2 * line + e % 2} : RowPlace{line, 4 * q + e};
    case Shape::m8n16_b8x16_b6x16_p32:
    case Shape::m8n16_b8x16_b4x16_p64: return {line, 4 * q + e};
    case Shape::m16n8_b8: return {2 * q + e % 2, line + 8 * (e / 2)};
    default: return {4 * q + 2 * r + e % 2, line + 8 * (e / 2)};
  }
}

// A register of an 8 x 8 matrix has its rows, one after the other.
void transpose(uint16_t (&matrix)[8][8]) {
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < i; ++j) std::swap(matrix[i][j], matrix[j][i]);
}
void load_8x8(const MatrixAccess& access, const std::byte* window, const uint32_t* addresses, const Row* d) {
  for (int i = 0; i < access.count; ++i) {
    uint16_t matrix[8][8];
    for (int row = 0; row < 8; ++row) std::memcpy(matrix[row], window + addresses[8 * i + row], kRowBytes);
    if (access.transpose) transpose(matrix);
    std::memcpy(d[i], matrix, sizeof matrix);
  }
}
void store_8x8(const MatrixAccess& access, std::byte* window, const uint32_t* addresses, const ConstRow* a) {
  for (int i = 0; i < access.count; ++i) {
    uint16_t matrix[8][8];
    std::memcpy(matrix, a[i], sizeof matrix);
    if (access.transpose) transpose(matrix);
    for (int row = 0; row < 8; ++row) std::memcpy(window + addresses[8 * i + row], matrix[row], kRowBytes);
  }
}

int rows_of_matrix(const MatrixAccess& access) { return is_16x16(access.shape) ? 16 : 8; }
int registers_of_matrix(const MatrixAccess& access) { return is_16x16(access.shape) ? 2 : 1; }

Status check_count(const MatrixAccess& access, int most) {
  const int n = access.count;
  if ((n == 1 || n == 2 || n == 4) && n <= most) return {};
  return Status::invalid(str_cat("ldmatrix and stmatrix of this shape move 1, 2", most == 4 ? ", or 4" : "",
                                 " matrices, not ", n, ": correct .x", n));
}

}  // namespace

Status check_load(const MatrixAccess& access) {
  if (access.shape == Shape::m16n8_b8) return Status::invalid("ldmatrix has no shape m16n8: use m8n8, m16n16 or m8n16");
  const bool square = is_16x16(access.shape);
  if (square && !access.transpose) return Status::invalid("ldmatrix of shape m16n16 must be transposed: add .trans");
  if (!square && access.shape != Shape::m8n8_b16 && access.transpose)
    return Status::invalid("ldmatrix of shape m8n16 must not be transposed: remove .trans");
  return check_count(access, square ? 2 : 4);
}

Status check_store(const MatrixAccess& access) {
  if (access.shape != Shape::m8n8_b16 && access.shape != Shape::m16n8_b8)
    return Status::invalid("stmatrix must have shape m8n8 of 16 bits or m16n8 of 8 bits: use one of them");
  if (access.shape == Shape::m16n8_b8 && !access.transpose)
    return Status::invalid("stmatrix of shape m16n8 must be transposed: add .trans");
  return check_count(access, 4);
}

int registers(const MatrixAccess& access) { return access.count * registers_of_matrix(access); }
int row_addresses(const MatrixAccess& access) { return access.count * rows_of_matrix(access); }
int row_bytes(const MatrixAccess&) { return kRowBytes; }

void load_matrix(const MatrixAccess& access, const std::byte* window, const uint32_t* addresses, const Row* d) {
  if (access.shape == Shape::m8n8_b16) return load_8x8(access, window, addresses, d);
  const int rows = rows_of_matrix(access), registers_each = registers_of_matrix(access);
  for (int matrix = 0; matrix < access.count; ++matrix) {
    uint8_t bytes[16][kRowBytes];
    for (int row = 0; row < rows; ++row) read_row(access.shape, window + addresses[matrix * rows + row], bytes[row]);
    for (int r = 0; r < registers_each; ++r)
      for (int lane = 0; lane < kLanes; ++lane) {
        uint32_t x = 0;
        for (int e = 0; e < 4; ++e) {
          const RowPlace place = place_of(access, lane, r, e);
          x |= static_cast<uint32_t>(bytes[place.row][place.byte]) << (8 * e);
        }
        d[matrix * registers_each + r][lane] = x;
      }
  }
}

void store_matrix(const MatrixAccess& access, std::byte* window, const uint32_t* addresses, const ConstRow* a) {
  if (access.shape == Shape::m8n8_b16) return store_8x8(access, window, addresses, a);
  for (int matrix = 0; matrix < access.count; ++matrix) {
    uint8_t bytes[8][kRowBytes];
    for (int lane = 0; lane < kLanes; ++lane)
      for (int e = 0; e < 4; ++e) {
        const RowPlace place = place_of(access, lane, 0, e);
        bytes[place.row][place.byte] = static_cast<uint8_t>(a[matrix][lane] >> (8 * e));
      }
    for (int row = 0; row < 8; ++row) std::memcpy(window + addresses[matrix * 8 + row], bytes[row], kRowBytes);
  }
}

void transpose_matrix(ConstRow a, Row d) {
  uint16_t matrix[8][8];
  std::memcpy(matrix, a, sizeof matrix);
  transpose(matrix);
  std::memcpy(d, matrix, sizeof matrix);
}

}  // namespace tandem::vgpu::units
