// tcgen05.mma: the valid instructions.
#include <array>
#include <bit>

#include "base/text.h"
#include "vgpu/src/units/tcgen05.h"
#include "vgpu/src/units/tcgen05_layout.h"

namespace tandem::vgpu::units {
namespace {

constexpr const char* kKindNames[] = {"f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4"};
const char* name_of(TmmaKind kind) { return kKindNames[static_cast<int>(kind)]; }

uint32_t field(uint32_t word, int from, int bits) { return word >> from & ((1u << bits) - 1); }

bool is_scaled(TmmaKind kind) { return kind >= TmmaKind::mxf8f6f4; }
bool is_fp4(TmmaKind kind) { return kind == TmmaKind::mxf4 || kind == TmmaKind::mxf4nvf4; }

// Returns the type of A or B by its code.
Status format_of(TmmaKind kind, uint32_t code, const char* which, Format* format) {
  const auto choose = [&](std::initializer_list<Format> formats, std::initializer_list<uint32_t> codes) {
    for (size_t i = 0; i < formats.size(); ++i) {
      if (codes.begin()[i] != code) continue;
      *format = formats.begin()[i];
      return Status{};
    }
    return Status::invalid(str_cat("type ", code, " of ", which,
                                   " in the instruction descriptor does not exist for kind::", name_of(kind),
                                   ": correct the type"));
  };
  switch (kind) {
    case TmmaKind::f16: return choose({Format::f16, Format::bf16}, {0, 1});
    case TmmaKind::tf32: return choose({Format::tf32}, {2});
    case TmmaKind::i8: return choose({Format::u8, Format::s8}, {0, 1});
    case TmmaKind::f8f6f4:
    case TmmaKind::mxf8f6f4:
      return choose({Format::e4m3, Format::e5m2, Format::e2m3, Format::e3m2, Format::e2m1}, {0, 1, 3, 4, 5});
    default: return choose({Format::e2m1}, {1});
  }
}

Status decode_d(uint32_t word, Tmma* mma) {
  const uint32_t code = field(word, 4, 2);
  const TmmaKind kind = mma->form.kind;
  constexpr std::array sums = {Sum::f16, Sum::f32, Sum::s32};
  bool exists = code < sums.size() && (sums[code] == Sum::s32) == (kind == TmmaKind::i8);
  // f16 sums are valid for f16 (not bf16) and for the 8-bit kinds.
  if (code == 0)
    exists = (kind == TmmaKind::f16 && mma->a == Format::f16 && mma->b == Format::f16) || kind == TmmaKind::f8f6f4;
  if (!exists)
    return Status::invalid(str_cat("type ", code, " of D in the instruction descriptor does not exist for kind::",
                                   name_of(kind), " with A of ", name_of(mma->a), ": correct the type"));
  mma->d = sums[code];
  return {};
}

Status decode_plain(uint32_t word, Tmma* mma) {
  const TmmaForm& form = mma->form;
  TANDEM_TRY(decode_d(word, mma));
  mma->saturate = field(word, 3, 1) != 0;
  mma->m = static_cast<int32_t>(field(word, 24, 5)) * 16;
  if (mma->saturate && form.kind != TmmaKind::i8)
    return Status::invalid(
        "bit 3 of the instruction descriptor (saturate) must be 0 except for kind::i8: clear the bit");
  if (form.kind == TmmaKind::i8 && (mma->negate_a || mma->negate_b))
    return Status::invalid(
        "bits 13 and 14 of the instruction descriptor (negate) must be 0 for kind::i8: clear the bits");
  if (field(word, 6, 1) != 0 || field(word, 23, 1) != 0 || field(word, 29, 1) != 0)
    return Status::invalid("bits 6, 23 and 29 of the instruction descriptor must be 0: clear the bits");
  const uint32_t shift = field(word, 30, 2);
  if (shift != 0 && !form.ws)
    return Status::invalid(
        "bits 30 and 31 of the instruction descriptor (maximum shift of B) must be 0 without .ws: clear the bits");
  constexpr int32_t shifts[] = {0, 8, 16, 32};
  if (mma->b_shift > shifts[shift])
    return Status::invalid(str_cat("the zero-column mask shifts B by ", mma->b_shift,
                                   ", but the instruction descriptor allows ", shifts[shift], ": use equal shifts"));
  return {};
}

Status decode_scaled(uint32_t word, Tmma* mma) {
  const TmmaForm& form = mma->form;
  mma->d = Sum::f32;
  mma->m = static_cast<int32_t>(field(word, 27, 2)) * 128;
  if (field(word, 0, 2) != 0 || field(word, 3, 1) != 0 || field(word, 6, 1) != 0 || field(word, 24, 3) != 0)
    return Status::invalid(str_cat("bits 0, 1, 3, 6 and 24 to 26 of the instruction descriptor must be 0 for kind::",
                                   name_of(form.kind), ": clear the bits"));
  if (field(word, 31, 1) != 0)
    return Status::unsupported("bit 31 of the instruction descriptor (K = 96, of sm_103a) must be 0: use K = 64");
  mma->scale_format = field(word, 23, 1) != 0 ? Format::ue8m0 : Format::ue4m3;
  mma->scale_b_id = static_cast<int32_t>(field(word, 4, 2));
  mma->scale_a_id = static_cast<int32_t>(field(word, 29, 2));
  const int per_row = mma->k / mma->scale_block;
  if (mma->scale_format == Format::ue4m3 && (form.kind != TmmaKind::mxf4nvf4 || per_row != 4))
    return Status::invalid(
        "scale factors of type ue4m3 (bit 23 clear) need kind::mxf4nvf4 with scale_vec::4X: set bit 23 or use this "
        "kind");
  // A word of tensor memory holds four scale factors. The factors of a row must not straddle it.
  if (mma->scale_a_id % per_row != 0 || mma->scale_b_id % per_row != 0)
    return Status::invalid(str_cat("scale factor ids (", mma->scale_a_id, ", ", mma->scale_b_id,
                                   ") must be multiples of ", per_row,
                                   ", the number of factors per row: correct the ids"));
  return {};
}

// Zero-column mask descriptor: alternating runs of columns of B that are used and that count as zero. The mask has as
// many parts as D has column blocks.
Status decode_zero_columns(uint64_t word, Tmma* mma) {
  if (word == 0) return {};
  if (!mma->form.ws) return Status::invalid("only tcgen05.mma.ws has a zero-column mask: remove the mask");
  mma->b_shift = static_cast<int32_t>(word >> 56 & 0x3f);
  if ((word >> 39 & 1) == 0) return {};
  const int parts = mma->m == 128 ? 1 : mma->m == 64 ? 2 : 4;
  const int zeros = static_cast<int>(word >> 40 & 0xff) + 1, used = static_cast<int>(word >> 48 & 0xff) + 1;
  mma->b_zero.assign(static_cast<size_t>(mma->n), false);
  for (int part = 0; part < parts; ++part) {
    bool zero = (word >> (32 + part) & 1) != 0;
    int left = (zero ? zeros : used) - static_cast<int>(word >> (8 * part) & 0xff);
    for (int column = 0; column < mma->n / parts; ++column) {
      for (; left <= 0; left += zero ? zeros : used) zero = !zero;
      const int at = part * mma->n / parts + column;
      mma->b_zero[static_cast<size_t>(at)] = zero;
      --left;
    }
  }
  return {};
}

bool m_exists(const Tmma& mma) {
  const int32_t m = mma.m;
  if (mma.form.group == 2) return m == 128 || m == 256;
  if (mma.form.ws) return m == 32 || m == 64 || m == 128;
  return m == 128 || (m == 64 && !is_scaled(mma.form.kind));
}

// Returns the step of n, or 0 if only 64, 128 and 256 are valid.
int32_t n_step(const Tmma& mma) {
  const bool two = mma.form.group == 2;
  const bool bytes = bits_of(mma.b) == 8;
  if (mma.form.ws) return 0;
  if (mma.form.kind == TmmaKind::i8) return two ? 32 : mma.n > 32 || (mma.b_mn_major && bytes) ? 16 : 8;
  if (mma.b_mn_major && bytes) return two ? 32 : 16;
  return two ? 16 : 8;
}

Status check_shape(const Tmma& mma) {
  const char* const group = mma.form.ws ? ".ws" : mma.form.group == 2 ? "cta_group::2" : "cta_group::1";
  if (!m_exists(mma))
    return Status::invalid(str_cat("M = ", mma.m, " does not exist for tcgen05.mma kind::", name_of(mma.form.kind),
                                   " with ", group, ": use another M"));
  const int32_t step = n_step(mma), n = mma.n;
  const bool exists = step == 0 ? n == 64 || n == 128 || n == 256 : n >= step && n <= 256 && n % step == 0;
  if (!exists)
    return Status::invalid(str_cat(
        "N = ", n, " does not exist for tcgen05.mma kind::", name_of(mma.form.kind), " with ", group,
        step == 0 ? std::string(": use 64, 128 or 256") : str_cat(": use ", step, " to 256 in steps of ", step)));
  if (mma.form.shift_a && mma.m < 128)
    return Status::invalid(str_cat(".ashift needs M = 128 or 256, not ", mma.m, ": remove .ashift"));
  return {};
}

Status check_cells(const char* which, int lane, int column, int columns, int lane_step) {
  if (lane % lane_step != 0 || lane > (lane_step == 16 ? 16 : 0))
    return Status::invalid(str_cat("lane ", lane, " of ", which, " in tensor memory must be 0",
                                   lane_step == 16 ? " or 16" : "", ": correct the address"));
  if (column + columns > kTmemColumns)
    return Status::invalid(str_cat(which, " in columns ", column, " to ", column + columns - 1,
                                   " ends beyond tensor memory of ", kTmemColumns, " columns: correct the address"));
  return {};
}

Status check_tensor_memory(const Tmma& mma) {
  const TmmaOperands& o = mma.operands;
  const int d_lane = static_cast<int>(o.d >> 16), step = is_half_datapath(mma) ? 16 : kTmemLanes;
  TANDEM_TRY(check_cells("D", d_lane, static_cast<int>(o.d & 0xffff), d_columns(mma), step));
  if (mma.form.a_in_tmem) {
    if (o.a >> 32 != 0)
      return Status::invalid("the address of A in tensor memory must fit into 32 bits: clear the upper bits");
    const int a_lane = static_cast<int>(o.a >> 16);
    TANDEM_TRY(check_cells("A", a_lane, static_cast<int>(o.a & 0xffff), kAColumns, step));
    if (a_lane != d_lane)
      return Status::invalid(str_cat("A (lane ", a_lane, ") and D (lane ", d_lane,
                                     ") must begin in the same lane of tensor memory: correct one address"));
  }
  if (mma.scale_block == 0) return {};
  TANDEM_TRY(check_cells("scale factors of A", static_cast<int>(o.scale_a >> 16 & 0x3fff),
                         static_cast<int>(o.scale_a & 0xffff), scale_columns(mma, true), kTmemLanes));
  return check_cells("scale factors of B", static_cast<int>(o.scale_b >> 16 & 0x3fff),
                     static_cast<int>(o.scale_b & 0xffff), scale_columns(mma, false), kTmemLanes);
}

Status decode_tiles(uint32_t window_bytes, Tmma* mma) {
  MatrixTile& b = mma->b_tile;
  TANDEM_TRY(decode_tcgen05(mma->operands.b, &b.descriptor));
  b.format = mma->b;
  b.packed4 = is_fp4(mma->form.kind);
  b.mn_major = mma->b_mn_major;
  b.mn = mma->n / mma->form.group + (mma->b_shift + 15) / 16 * 16;
  b.k = mma->k;
  TANDEM_TRY(check(b, window_bytes));
  if (mma->form.a_in_tmem) {
    if (mma->a_mn_major)
      return Status::invalid("A in tensor memory cannot be transposed: clear bit 15 of the instruction descriptor");
    return {};
  }
  MatrixTile& a = mma->a_tile;
  TANDEM_TRY(decode_tcgen05(mma->operands.a, &a.descriptor));
  a.format = mma->a;
  a.packed4 = b.packed4;
  a.mn_major = mma->a_mn_major;
  a.mn = mma->m / mma->form.group;
  a.k = mma->k;
  return check(a, window_bytes);
}

int32_t scale_block_of(const TmmaForm& form) {
  if (!is_scaled(form.kind)) return 0;
  return form.scale_vector == 4 || form.scale_vector == 16 ? 16 : 32;
}

}  // namespace

Status check(const TmmaForm& form) {
  if (form.group != 1 && form.group != 2)
    return Status::invalid(str_cat("cta_group::", form.group, " does not exist: use 1 or 2"));
  if (form.ws && (form.group != 1 || is_scaled(form.kind)))
    return Status::invalid(
        str_cat("tcgen05.mma.ws exists with cta_group::1 and without block scaling only: remove .ws"));
  if (form.shift_a && (!form.a_in_tmem || form.ws || is_scaled(form.kind)))
    return Status::invalid(".ashift needs A in tensor memory, and neither .ws nor block scaling: remove .ashift");
  const int32_t v = form.scale_vector;
  bool exists = v == 0;
  switch (form.kind) {
    case TmmaKind::mxf8f6f4: exists = v == 0 || v == 1 || v == 32; break;
    case TmmaKind::mxf4: exists = v == 0 || v == 2 || v == 32; break;
    case TmmaKind::mxf4nvf4: exists = v == 2 || v == 32 || v == 4 || v == 16; break;
    default: break;
  }
  if (!exists)
    return Status::invalid(str_cat("scale vector ", v, " does not exist for tcgen05.mma kind::", name_of(form.kind),
                                   ": use another size"));
  return {};
}

Status decode(const TmmaForm& form, const TmmaOperands& operands, uint32_t window_bytes, Tmma* mma) {
  TANDEM_TRY(check(form));
  *mma = {};
  mma->form = form;
  mma->operands = operands;
  const uint32_t word = operands.instruction;
  if (field(word, 2, 1) != 0)
    return Status::unsupported("bit 2 of the instruction descriptor (sparse A) must be 0: use a dense A");
  TANDEM_TRY(format_of(form.kind, field(word, 7, 3), "A", &mma->a));
  TANDEM_TRY(format_of(form.kind, field(word, 10, 3), "B", &mma->b));
  mma->negate_a = field(word, 13, 1) != 0;
  mma->negate_b = field(word, 14, 1) != 0;
  mma->a_mn_major = field(word, 15, 1) != 0;
  mma->b_mn_major = field(word, 16, 1) != 0;
  mma->n = static_cast<int32_t>(field(word, 17, 6)) * 8;
  // Each row has 32 bytes: one element per byte if types of 4, 6 and 8 bits may be mixed.
  const int element_bits = is_fp4(form.kind) ? 4 : bits_of(mma->a) < 8 ? 8 : bits_of(mma->a);
  mma->k = 256 / element_bits;
  mma->scale_block = scale_block_of(form);
  if (is_scaled(form.kind)) {
    TANDEM_TRY(decode_scaled(word, mma));
  } else {
    mma->m = static_cast<int32_t>(field(word, 24, 5)) * 16;
    TANDEM_TRY(decode_zero_columns(operands.zero_columns, mma));
    TANDEM_TRY(decode_plain(word, mma));
  }
  if (operands.scale_d > 15 || (operands.scale_d != 0 && form.kind != TmmaKind::f16 && form.kind != TmmaKind::tf32))
    return Status::invalid(str_cat("scale-input-d (", operands.scale_d,
                                   ") must be 0 to 15, and the kind f16 or tf32: correct one of the two"));
  TANDEM_TRY(check_shape(*mma));
  TANDEM_TRY(decode_tiles(window_bytes, mma));
  return check_tensor_memory(*mma);
}

}  // namespace tandem::vgpu::units
