// Row functions of one instruction set. The file is compiled once per set, with TANDEM_TARGET as its name and the
// matching flags (vgpu/src/CMakeLists.txt).
#include "vgpu/src/machine/lanes/lanes.h"

#include "vgpu/src/machine/lanes/float.h"

#define TANDEM_TEXT_(x) #x
#define TANDEM_TEXT(x) TANDEM_TEXT_(x)
#define TANDEM_JOIN_(a, b) a##b
#define TANDEM_JOIN(a, b) TANDEM_JOIN_(a, b)

namespace tandem::vgpu::machine {
namespace TANDEM_TARGET {
namespace {

constexpr std::span<const LaneEntry> kFamilies[] = {kInteger, kBits, kCompare, kProperties, kConvert, kReal};

}  // namespace
}  // namespace TANDEM_TARGET

extern const LaneTarget TANDEM_JOIN(lanes_, TANDEM_TARGET);
constinit const LaneTarget TANDEM_JOIN(lanes_, TANDEM_TARGET) = {TANDEM_TEXT(TANDEM_TARGET), TANDEM_TARGET::kFamilies};

}  // namespace tandem::vgpu::machine
