#include "vgpu/src/units/wgmma.h"

#include <algorithm>

#include "base/text.h"
#include "vgpu/src/units/fragments.h"
#include "vgpu/src/units/product.h"

namespace tandem::vgpu::units {
namespace {

constexpr int kMaxN = 256, kMaxK = 32, kRowsOfWarp = 16;

bool is_integer(Format format) { return format == Format::s8 || format == Format::u8; }
bool is_fp8(Format format) { return format == Format::e4m3 || format == Format::e5m2; }

bool types_exist(const WgmmaForm& f) {
  switch (f.a) {
    case Format::f16: return f.b == Format::f16 && (f.d == Sum::f32 || f.d == Sum::f16);
    case Format::bf16: return f.b == Format::bf16 && f.d == Sum::f32;
    case Format::tf32: return f.b == Format::tf32 && f.d == Sum::f32;
    case Format::e4m3:
    case Format::e5m2: return is_fp8(f.b) && (f.d == Sum::f32 || f.d == Sum::f16);
    case Format::s8:
    case Format::u8: return is_integer(f.b) && f.d == Sum::s32;
    default: return false;
  }
}

Status tile_of(const WgmmaForm& form, bool is_a, uint64_t descriptor, uint32_t window_bytes, MatrixTile* tile) {
  TANDEM_TRY(decode_wgmma(descriptor, &tile->descriptor));
  tile->format = is_a ? form.a : form.b;
  tile->packed4 = false;
  tile->mn_major = is_a ? form.transpose_a : form.transpose_b;
  tile->mn = is_a ? 64 : form.n;
  tile->k = form.k;
  return check(*tile, window_bytes);
}

// Both operands as rows of float or int32_t: a[row][k] and b[k][column].
template <class T>
struct UnpackedOperands {
  T a[64 * kMaxK];
  T b[kMaxK * kMaxN];
};

void read_tile(const MatrixTile& tile, const std::byte* window, bool k_rows, int64_t pitch, float* to) {
  gather(tile, window, k_rows, pitch, to);
}
void read_tile(const MatrixTile& tile, const std::byte* window, bool k_rows, int64_t pitch, int32_t* to) {
  gather_s32(tile, window, k_rows, pitch, to);
}

template <class T>
void read_operands(const WgmmaForm& form, const WgmmaOperands& operands, UnpackedOperands<T>* to) {
  read_tile(operands.b, operands.window, true, form.n, to->b);
  if (!form.a_in_registers) {
    read_tile(operands.a, operands.window, false, form.k, to->a);
  } else {
    for (int warp = 0; warp < 4; ++warp)
      rows_from_fragment(form.a, kRowsOfWarp, form.k, operands.a_registers[warp], to->a + warp * kRowsOfWarp * form.k);
  }
  if (form.negate_a) std::transform(to->a, to->a + 64 * form.k, to->a, [](T x) { return -x; });
  if (form.negate_b) std::transform(to->b, to->b + form.k * form.n, to->b, [](T x) { return -x; });
}

// Rows of D from `row` on.
template <class T>
DenseProduct<T> product_of(const WgmmaForm& form, const UnpackedOperands<T>& operands, int row, int rows, T* sums) {
  return {.m = rows,
          .n = form.n,
          .k = form.k,
          .a = operands.a + row * form.k,
          .a_pitch = form.k,
          .b = operands.b,
          .b_pitch = form.n,
          .d = sums,
          .d_pitch = form.n};
}

void wgmma_s32(const WgmmaForm& form, const WgmmaOperands& operands, bool accumulate, Row* const* d) {
  UnpackedOperands<int32_t> unpacked;
  read_operands(form, operands, &unpacked);
  int32_t sums[kRowsOfWarp * kMaxN];
  for (int warp = 0; warp < 4; ++warp) {
    if (accumulate) sums_from_fragment(Sum::s32, form.n, d[warp], sums);
    DenseProduct<int32_t> product = product_of(form, unpacked, warp * kRowsOfWarp, kRowsOfWarp, sums);
    product.accumulate = accumulate;
    products().s32(product, form.saturate);
    sums_to_fragment(Sum::s32, form.n, sums, d[warp]);
  }
}

}  // namespace

Status check(const WgmmaForm& form) {
  if (!types_exist(form))
    return Status::invalid(str_cat("wgmma has no product of ", name_of(form.a), " and ", name_of(form.b),
                                   " with this type of D: use other types"));
  const bool integers = is_integer(form.a);
  const int step = integers && form.n > 32 ? 16 : 8;
  if (form.n < 8 || form.n > 256 || form.n % step != 0)
    return Status::invalid(str_cat("n of wgmma (", form.n, ") must be 8 to 256 in steps of ",
                                   integers ? "8, of 16 beyond 32, for integers" : "8", ": correct n"));
  const int k = 256 / bits_of(form.a);
  if (form.k != k)
    return Status::invalid(str_cat("k of wgmma (", form.k, ") must be ", k, " for ", name_of(form.a), ": correct k"));
  if ((form.transpose_a || form.transpose_b) && bits_of(form.a) != 16)
    return Status::invalid(
        str_cat("wgmma transposes operands of 16 bits only, not ", name_of(form.a), ": remove the transposition"));
  if (form.transpose_a && form.a_in_registers)
    return Status::invalid("wgmma cannot transpose A in registers: set imm-trans-a to 0");
  if (integers && (form.negate_a || form.negate_b))
    return Status::invalid("wgmma cannot negate integers: set the scale to 1");
  if (form.saturate && !integers) return Status::invalid("wgmma saturates integers only: remove .satfinite");
  return {};
}

int d_registers(const WgmmaForm& form) { return form.d == Sum::f16 ? form.n / 4 : form.n / 2; }

Status a_tile(const WgmmaForm& form, uint64_t descriptor, uint32_t window_bytes, MatrixTile* tile) {
  return tile_of(form, true, descriptor, window_bytes, tile);
}
Status b_tile(const WgmmaForm& form, uint64_t descriptor, uint32_t window_bytes, MatrixTile* tile) {
  return tile_of(form, false, descriptor, window_bytes, tile);
}

void wgmma(const WgmmaForm& form, const WgmmaOperands& operands, bool accumulate, Row* const* d) {
  if (form.d == Sum::s32) return wgmma_s32(form, operands, accumulate, d);
  float sums[kWgmmaSums];
  if (accumulate) load_sums(form, d, sums);
  wgmma_sums(form, operands, accumulate, sums);
  store_sums(form, sums, d);
}

void load_sums(const WgmmaForm& form, Row* const* d, float* sums) {
  for (int warp = 0; warp < 4; ++warp) sums_from_fragment(form.d, form.n, d[warp], sums + warp * kRowsOfWarp * form.n);
}

void store_sums(const WgmmaForm& form, const float* sums, Row* const* d) {
  for (int warp = 0; warp < 4; ++warp) sums_to_fragment(form.d, form.n, sums + warp * kRowsOfWarp * form.n, d[warp]);
}

void wgmma_sums(const WgmmaForm& form, const WgmmaOperands& operands, bool accumulate, float* sums) {
  UnpackedOperands<float> unpacked;
  read_operands(form, operands, &unpacked);
  DenseProduct<float> product = product_of(form, unpacked, 0, 4 * kRowsOfWarp, sums);
  product.accumulate = accumulate;
  products().f32(product);
}

}  // namespace tandem::vgpu::units
