// The row functions of one CPU target. The file is compiled once per instruction set, with TANDEM_TARGET as its name.
// The file's flags forbid contraction of a * b + c, which not every CPU has (vgpu/src/CMakeLists.txt).
#include "vgpu/src/units/numbers.h"
#include "vgpu/src/units/packed16.h"

#define TANDEM_TEXT_(x) #x
#define TANDEM_TEXT(x) TANDEM_TEXT_(x)
#define TANDEM_TABLE_(target) rows_##target
#define TANDEM_TABLE(target) TANDEM_TABLE_(target)

// All combinations of a function's template arguments, in the order of the table.
#define TANDEM_FTZ(f, ...) \
  { f<__VA_ARGS__, false>, f<__VA_ARGS__, true> }
#define TANDEM_ROUNDED(f) \
  { TANDEM_FTZ(f, Rounding::rn), TANDEM_FTZ(f, Rounding::rz), TANDEM_FTZ(f, Rounding::rm), TANDEM_FTZ(f, Rounding::rp) }

namespace tandem::vgpu::units {

extern const Rows TANDEM_TABLE(TANDEM_TARGET);
const Rows TANDEM_TABLE(TANDEM_TARGET) = {
    .target = TANDEM_TEXT(TANDEM_TARGET),
    .add = TANDEM_ROUNDED(add),
    .mul = TANDEM_ROUNDED(mul),
    .div = TANDEM_ROUNDED(div),
    .fma = TANDEM_ROUNDED(fma),
    .rcp = TANDEM_ROUNDED(rcp),
    .sqrt = TANDEM_ROUNDED(sqrt),
    .saturate = saturate,
    .ex2_approx = {ex2_approx<false>, ex2_approx<true>},
    .lg2_approx = {lg2_approx<false>, lg2_approx<true>},
    .rcp_approx = {rcp_approx<false>, rcp_approx<true>},
    .rsqrt_approx = {rsqrt_approx<false>, rsqrt_approx<true>},
    .sqrt_approx = {sqrt_approx<false>, sqrt_approx<true>},
    .sin_approx = {sin_approx<false>, sin_approx<true>},
    .cos_approx = {cos_approx<false>, cos_approx<true>},
    .tanh_approx = tanh_approx,
    .div_approx = {quotient<false, false>, quotient<true, false>},
    .div_full = {quotient<false, true>, quotient<true, true>},
    .min = {TANDEM_FTZ(choose, false, false), TANDEM_FTZ(choose, false, true)},
    .max = {TANDEM_FTZ(choose, true, false), TANDEM_FTZ(choose, true, true)},
    .encode = encode_row,
    .decode = decode_row,
    .encode_pair = encode_pair,
    .decode_pair = decode_pair,
    .add_pair = add_pair,
    .sub_pair = sub_pair,
    .mul_pair = mul_pair,
    .fma_pair = fma_pair,
    .min_pair = choose_pair<false>,
    .max_pair = choose_pair<true>,
    .ex2_pair = ex2_pair,
    .tanh_pair = tanh_pair,
};

}  // namespace tandem::vgpu::units
