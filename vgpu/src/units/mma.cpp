// mma.sync.
#include <cmath>
#include <cstring>

#include "base/text.h"
#include "vgpu/src/units/fragments.h"
#include "vgpu/src/units/product.h"
#include "vgpu/src/units/wgmma.h"

namespace tandem::vgpu::units {
namespace {

constexpr int kMaxM = 16, kN = 8, kMaxK = 32;

bool is_integer(const MmaForm& f) { return f.d == Sum::s32; }

// Lanes hold doubles: element e of an operand is row (or column) t / 4 + 8 (e % halves) and k = t % 4 + 4 (e / halves).
double element_f64(const ConstRow* registers, int e, int lane) {
  double x;
  std::memcpy(&x, reinterpret_cast<const std::byte*>(registers[e]) + 8 * lane, sizeof x);
  return x;
}

void mma_f64(const MmaForm& form, const ConstRow* a, const ConstRow* b, const ConstRow* c, const Row* d) {
  const int halves = form.m / 8;
  double matrix_a[kMaxM][kMaxK], matrix_b[kMaxK][kN];
  for (int t = 0; t < kLanes; ++t) {
    for (int e = 0; e < a_registers(form); ++e)
      matrix_a[t / 4 + 8 * (e % halves)][t % 4 + 4 * (e / halves)] = element_f64(a, e, t);
    for (int e = 0; e < b_registers(form); ++e) matrix_b[t % 4 + 4 * e][t / 4] = element_f64(b, e, t);
  }
  for (int e = 0; e < d_registers(form); ++e)
    for (int t = 0; t < kLanes; ++t) {
      double sum = element_f64(c, e, t);
      for (int k = 0; k < form.k; ++k)
        sum = std::fma(matrix_a[t / 4 + 8 * (e / 2)][k], matrix_b[k][2 * (t % 4) + e % 2], sum);
      std::memcpy(reinterpret_cast<std::byte*>(d[e]) + 8 * t, &sum, sizeof sum);
    }
}

bool shape_exists(const MmaForm& f) {
  if (f.d == Sum::f64)
    return f.c == Sum::f64 && ((f.m == 8 && f.k == 4) || (f.m == 16 && (f.k == 4 || f.k == 8 || f.k == 16)));
  if (is_integer(f) && f.m == 8) return f.k == 16;
  const int bits = bits_of(f.a);
  return f.m == 16 && (f.k == 256 / bits || f.k == 128 / bits);
}

bool types_exist(const MmaForm& f) {
  if (f.d == Sum::f64) return true;
  if (f.c != f.d) return false;
  const auto fp8 = [](Format x) { return x == Format::e4m3 || x == Format::e5m2; };
  const auto integer = [](Format x) { return x == Format::s8 || x == Format::u8; };
  if (integer(f.a)) return integer(f.b) && is_integer(f);
  if (fp8(f.a)) return fp8(f.b) && (f.d == Sum::f32 || f.d == Sum::f16);
  if (f.a != f.b) return false;
  if (f.a == Format::f16) return f.d == Sum::f32 || f.d == Sum::f16;
  return (f.a == Format::bf16 || f.a == Format::tf32) && f.d == Sum::f32;
}

template <class T>
DenseProduct<T> product_of(const MmaForm& form, const T* rows, const T* columns, T* sums) {
  return {.m = form.m,
          .n = kN,
          .k = form.k,
          .a = rows,
          .a_pitch = form.k,
          .b = columns,
          .b_pitch = kN,
          .d = sums,
          .d_pitch = kN,
          .accumulate = true};
}

int sum_registers(const MmaForm& form, Sum sum) {
  const int values = form.m * kN / kLanes;
  return sum == Sum::f16 ? values / 2 : values;
}

}  // namespace

Status check(const MmaForm& form) {
  if (!types_exist(form))
    return Status::unsupported(str_cat("mma of ", name_of(form.a), " and ", name_of(form.b),
                                       " does not exist with these types of C and D: use other types"));
  if (form.n != kN || !shape_exists(form))
    return Status::unsupported(str_cat("mma of shape m", form.m, "n", form.n, "k", form.k,
                                       " does not exist with these types: use another shape"));
  if (form.saturate && !is_integer(form)) return Status::invalid("mma saturates integers only: remove .satfinite");
  return {};
}

int a_registers(const MmaForm& form) {
  const int bits = form.d == Sum::f64 ? 32 : bits_of(form.a);
  return form.m * form.k * bits / (32 * kLanes);
}
int b_registers(const MmaForm& form) {
  const int bits = form.d == Sum::f64 ? 32 : bits_of(form.b);
  return kN * form.k * bits / (32 * kLanes);
}
int c_registers(const MmaForm& form) { return sum_registers(form, form.c); }
int d_registers(const MmaForm& form) { return sum_registers(form, form.d); }

void mma(const MmaForm& form, const ConstRow* a, const ConstRow* b, const ConstRow* c, const Row* d) {
  if (form.d == Sum::f64) return mma_f64(form, a, b, c, d);
  if (is_integer(form)) {
    int32_t rows[kMaxM * kMaxK], columns[kMaxK * kN], sums[kMaxM * kN];
    rows_from_fragment(form.a, form.m, form.k, a, rows);
    columns_from_fragment(form.b, form.k, b, columns);
    sums_from_fragment(form.c, kN, c, sums, form.m);
    products().s32(product_of<int32_t>(form, rows, columns, sums), form.saturate);
    return sums_to_fragment(form.d, kN, sums, d, form.m);
  }
  float rows[kMaxM * kMaxK], columns[kMaxK * kN], sums[kMaxM * kN];
  rows_from_fragment(form.a, form.m, form.k, a, rows);
  columns_from_fragment(form.b, form.k, b, columns);
  sums_from_fragment(form.c, kN, c, sums);
  products().f32(product_of<float>(form, rows, columns, sums));
  sums_to_fragment(form.d, kN, sums, d);
}

}  // namespace tandem::vgpu::units
