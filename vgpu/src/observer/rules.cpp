// Names and advice.
#include <array>

#include "vgpu/src/observer/finding.h"

namespace tandem::vgpu {
namespace {

struct About {
  std::string_view name, advice;
  Grade grade = Grade::error;
};

// In the order of Rule.
constexpr std::array<About, static_cast<size_t>(Rule::count)> kRules{{
    {"data-race", "Let a barrier, an mbarrier or a release and an acquire lie between the two, for these threads."},
    {"relaxed-hand-over", "Make the arrival (or the store) a release and the wait (or the load) an acquire.",
     Grade::spec_only},
    {"narrow-release",
     "Let the arrival at the other block's barrier release to the cluster: mbarrier.arrive.release.cluster.",
     Grade::spec_only},
    {"missing-proxy-fence",
     "Let each thread that wrote or read there execute fence.proxy.async behind it, before the barrier that the "
     "issuing thread waits at."},
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
    {"pending-load", "Execute tcgen05.wait::ld before the registers are read.", Grade::spec_only},
    {"divergent-aligned",
     "Let all threads of the warp (the warpgroup) reach the instruction, or reconverge them first."},
    {"exited-lanes", "Let no thread of a warp exit before the last .aligned instruction of the warp.",
     Grade::spec_only},
    {"register-budget",
     "Let setmaxnreg.dec free registers before .inc asks for them; the sum over warps is what the launch gave."},
    {"uneven-registers", "Let all four warps of the warpgroup execute setmaxnreg, with the same number.",
     Grade::spec_only},
    {"unwritten-register", "Write the register on every path that leads here."},
    {"shuffle-lane", "Put the lane that is read into the mask, or clamp the shuffle to lanes that are in it."},
    {"wrong-parity",
     "Flip the parity with each completed phase, and wait for each phase before the next one can complete."},
    {"over-arrival", "Make the count of mbarrier.init the number of arrivals of a phase, and expect_tx its bytes."},
    {"invalid-barrier", "Initialise the mbarrier before its use, and let nothing else lie in its 8 bytes."},
    {"barrier-count", "Give all participants of a named barrier the same count, a multiple of 32."},
    {"ignored-wait", "Loop until the answer is true: the wait may end before the phase does."},
    {"missing-init-fence", "Execute fence.mbarrier_init.release.cluster behind mbarrier.init.", Grade::spec_only},
    {"deadlock", "Follow the table: each wait needs someone who still arrives, or copies, for that phase."},
    {"missing-wgmma-fence",
     "Execute wgmma.fence before the first product, and whenever registers have been written since."},
    {"late-wgmma-write",
     "Write the registers before wgmma.fence, or let the first product not add to them (scale-d 0).", Grade::spec_only},
    {"invalid-descriptor", "Encode addresses and strides in units of 16 bytes, and a layout that the instruction has."},
    {"invalid-shape", "Use a shape, type and size that the target has for this instruction."},
    {"invalid-tensor-map", "Pass the map as a __grid_constant__ parameter, encoded for this tensor and box."},
    {"uncommitted", "Commit the group, and wait for it before the thread exits."},
    {"live-at-exit",
     "Wait until the operation is done (a bulk store: has read its source), and until other blocks of the cluster are, "
     "before the thread exits."},
    {"unstarted-peer",
     "Let the cluster meet at barrier.cluster.arrive and .wait (relaxed will do) before a block reaches for another."},
    {"unwaited-commit", "Wait for the phase of the barrier that the commit arrives at before the block exits.",
     Grade::spec_only},
    {"unwaited-store", "Commit the group, and execute cp.async.bulk.wait_group.read before the thread exits.",
     Grade::spec_only},
    {"tmem-unallocated", "Use columns between tcgen05.alloc and tcgen05.dealloc only."},
    {"tmem-quadrant", "Let warp w access lanes 32 (w % 4) to 32 (w % 4) + 31 only.", Grade::spec_only},
    {"tmem-leak", "Free all columns with tcgen05.dealloc before the block ends."},
    {"mixed-cta-group", "Use one value of .cta_group in all tcgen05 instructions of a kernel."},
    {"missing-tcgen05-fence",
     "Execute tcgen05.fence::before_thread_sync before the barrier and tcgen05.fence::after_thread_sync behind it.",
     Grade::spec_only},
    {"pending-store", "Execute tcgen05.wait::st before the warp comes back to these cells.", Grade::spec_only},
    {"device-limit", "Ask for less: the limits are those of the device."},
    {"trap", "The kernel stopped itself: see the condition before the trap."},
}};

const About& about(Rule rule) { return kRules[static_cast<size_t>(rule)]; }

}  // namespace

std::string_view name_of(Rule rule) { return about(rule).name; }
std::string_view advice_of(Rule rule) { return about(rule).advice; }
Grade grade_of(Rule rule) { return about(rule).grade; }
std::string_view name_of(Grade grade) { return grade == Grade::error ? "error" : "letter"; }

}  // namespace tandem::vgpu
