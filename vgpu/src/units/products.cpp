// The products of one CPU target. The file is compiled once per instruction set, with TANDEM_TARGET as its name and the
// matching flags (vgpu/src/CMakeLists.txt).
#include "vgpu/src/units/dense.h"
#include "vgpu/src/units/product.h"

#define TANDEM_TEXT_(x) #x
#define TANDEM_TEXT(x) TANDEM_TEXT_(x)
#define TANDEM_TABLE_(target) products_##target
#define TANDEM_TABLE(target) TANDEM_TABLE_(target)

namespace tandem::vgpu::units {

extern const Products TANDEM_TABLE(TANDEM_TARGET);
const Products TANDEM_TABLE(TANDEM_TARGET) = {
    .target = TANDEM_TEXT(TANDEM_TARGET),
    .f32 = product_f32,
    .s32 = product_s32,
    .unpack_f32 = unpack_f32,
    .unpack_s32 = unpack_s32,
};

}  // namespace tandem::vgpu::units
