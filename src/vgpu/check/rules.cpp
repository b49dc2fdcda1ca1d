// Names and advice.
#include <array>

#include "vgpu/check/finding.h"

namespace tandem::vgpu {
namespace {

struct About {
  std::string_view name, advice;
};

// In the order of Rule.
constexpr std::array<About, static_cast<size_t>(Rule::count)> kRules{{
    {"data-race", "Let a barrier, an mbarrier or a release and an acquire lie between the two, for these threads."},
    {"missing-proxy-fence",
     "Let each thread that wrote execute fence.proxy.async behind its stores, before the barrier that the issuing "
     "thread "
     "waits at."},
    {"missing-wait",
     "Wait for the operation first: on the phase of the mbarrier that it signals, or with wait_group for its committed "
     "group; other threads need a barrier behind that wait."},
    {"out-of-bounds", "Check the index against the extent, the base address and the size of the allocation."},
    {"misaligned", "Align the address to the size of the access (TMA and matrix descriptors: to what they ask for)."},
    {"uninitialised", "Write it first, or wait for the operation that does."},
    {"wrong-space", "Compute the address from a variable of the space that the instruction names."},
    {"pending-register",
     "Execute wgmma.wait_group before registers of a product are read or written, and keep the compiler from moving "
     "them."},
    {"pending-load", "Execute tcgen05.wait::ld before the registers are read."},
    {"divergent-aligned",
     "Let all threads of the warp (the warpgroup) reach the instruction, or reconverge them first."},
    {"register-budget",
     "Let setmaxnreg.dec free registers before .inc asks for them; the sum over warps is what the launch gave."},
    {"uneven-registers", "Let all four warps of the warpgroup execute setmaxnreg, with the same number."},
    {"wrong-parity",
     "Flip the parity with each completed phase, and wait for each phase before the next one can complete."},
    {"over-arrival", "Make the count of mbarrier.init the number of arrivals of a phase, and expect_tx its bytes."},
    {"invalid-barrier", "Initialise the mbarrier before its use, and let nothing else lie in its 8 bytes."},
    {"barrier-count", "Give all participants of a named barrier the same count, a multiple of 32."},
    {"deadlock", "Follow the table: each wait needs someone who still arrives, or copies, for that phase."},
    {"missing-wgmma-fence",
     "Execute wgmma.fence before the first product, and whenever registers have been written since."},
    {"invalid-descriptor", "Encode addresses and strides in units of 16 bytes, and a layout that the instruction has."},
    {"invalid-shape", "Use a shape, type and size that the target has for this instruction."},
    {"invalid-tensor-map", "Pass the map as a __grid_constant__ parameter, encoded for this tensor and box."},
    {"uncommitted", "Commit the group, and wait for it before the thread exits."},
    {"live-at-exit",
     "Wait until the operation is done (a bulk store: has read its source), and until other blocks of the cluster are, "
     "before the thread exits."},
    {"tmem-unallocated", "Use columns between tcgen05.alloc and tcgen05.dealloc only."},
    {"tmem-quadrant", "Let warp w access lanes 32 (w % 4) to 32 (w % 4) + 31 only."},
    {"tmem-leak", "Free all columns with tcgen05.dealloc before the block ends."},
    {"mixed-cta-group", "Use one value of .cta_group in all tcgen05 instructions of a kernel."},
    {"missing-tcgen05-fence",
     "Execute tcgen05.fence::before_thread_sync before the barrier and tcgen05.fence::after_thread_sync behind it."},
    {"device-limit", "Ask for less: the limits are those of the device."},
    {"trap", "The kernel stopped itself: see the condition before the trap."},
}};

const About& about(Rule rule) { return kRules[static_cast<size_t>(rule)]; }

}  // namespace

std::string_view name_of(Rule rule) { return about(rule).name; }
std::string_view advice_of(Rule rule) { return about(rule).advice; }
bool is_warning(Rule rule) {
  return rule == Rule::pending_load || rule == Rule::uneven_registers || rule == Rule::missing_tcgen05_fence;
}

}  // namespace tandem::vgpu
