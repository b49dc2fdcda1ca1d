// The names of rules, and advice.
#include <array>

#include "vgpu/src/observer/finding.h"

namespace tandem::vgpu {
namespace {

struct About {
  std::string_view name, advice;
  Grade grade = Grade::error;
};

// The order of Rule.
constexpr std::array<About, static_cast<size_t>(Rule::count)> kRules{{
    {"data-race", "Order the two accesses by a barrier, an mbarrier, or a release and an acquire of these threads."},
    {"relaxed-hand-over", "Make the arrival (or the store) a release and the wait (or the load) an acquire.",
     Grade::spec_only},
    {"narrow-release",
     "Release to the cluster in the arrival at the other block's barrier: mbarrier.arrive.release.cluster.",
     Grade::spec_only},
    {"missing-proxy-fence",
     "Execute fence.proxy.async in each thread that wrote or read there, after the access and before the barrier that "
     "the issuing thread waits at."},
    {"missing-wait",
     "Wait for the operation first, on the phase of the mbarrier that it signals, or by wait_group for its committed "
     "group. Other threads need a barrier after that wait."},
    {"out-of-bounds", "Check the index against the extent, the base address and the size of the allocation."},
    {"misaligned",
     "Align the address to the size of the access, or to the alignment that TMA or the matrix descriptor requires."},
    {"uninitialised", "Write the memory first, or wait for the operation that writes it."},
    {"wrong-space", "Compute the address from a variable in the state space that the instruction names."},
    {"pending-register",
     "Execute wgmma.wait_group before registers of a product are read or written, and prevent the compiler from moving "
     "these accesses."},
    {"pending-load", "Execute tcgen05.wait::ld before the registers are read.", Grade::spec_only},
    {"divergent-aligned", "Execute the instruction in all threads of the warp or warpgroup, or reconverge them first."},
    {"exited-lanes", "Exit only after the last .aligned instruction of the warp.", Grade::spec_only},
    {"register-budget",
     "Free registers by setmaxnreg.dec before .inc requests them. The sum over all warps must not exceed the "
     "launch's."},
    {"uneven-registers", "Execute setmaxnreg in all four warps of the warpgroup with the same number.",
     Grade::spec_only},
    {"unwritten-register", "Write the register on every path that leads here."},
    {"shuffle-lane", "Add the source lane to the mask, or clamp the shuffle to lanes in the mask."},
    {"wrong-parity",
     "Flip the parity with each completed phase, and wait for each phase before the next one can complete."},
    {"over-arrival",
     "Set the count of mbarrier.init to the number of arrivals of a phase, and expect_tx to its bytes."},
    {"invalid-barrier", "Initialise the mbarrier before its use, and reserve its 8 bytes for it."},
    {"barrier-count", "Pass the same count, a multiple of 32, in all participants of a named barrier."},
    {"ignored-wait", "Loop until the result is true, because the wait may end before the phase completes."},
    {"missing-init-fence", "Execute fence.mbarrier_init.release.cluster after mbarrier.init.", Grade::spec_only},
    {"deadlock", "Follow the table: each wait needs an arrival or a copy that completes its phase."},
    {"endless-loop",
     "Correct the condition that ends the loop. If the kernel only takes long, raise --max-instructions "
     "(TANDEM_VGPU_MAX_INSTRUCTIONS)."},
    {"missing-wgmma-fence",
     "Execute wgmma.fence before the first product, and whenever registers have been written since."},
    {"late-wgmma-write", "Write the registers before wgmma.fence, or pass scale-d 0 to the first product.",
     Grade::spec_only},
    {"invalid-descriptor",
     "Encode addresses and strides in units of 16 bytes, and a layout that the instruction supports."},
    {"invalid-shape", "Use a shape, type and size that the target supports for this instruction."},
    {"invalid-tensor-map", "Pass the map as a __grid_constant__ parameter, encoded for this tensor and box."},
    {"uncommitted", "Commit the group, and wait for it before the thread exits."},
    {"live-at-exit",
     "Wait before the exit for the operation (a bulk store: until it has read its source). Also wait until other "
     "blocks of the cluster have finished with the memory."},
    {"unstarted-peer", "Execute barrier.cluster.arrive and .wait (relaxed is enough) before a block accesses another."},
    {"unwaited-commit", "Wait for the phase of the barrier that the commit arrives at before the block exits.",
     Grade::spec_only},
    {"unwaited-store", "Commit the group, and execute cp.async.bulk.wait_group.read before the thread exits.",
     Grade::spec_only},
    {"tmem-unallocated", "Use columns between tcgen05.alloc and tcgen05.dealloc only."},
    {"tmem-quadrant", "Access in warp w only lanes 32 (w % 4) to 32 (w % 4) + 31.", Grade::spec_only},
    {"tmem-leak", "Free all columns with tcgen05.dealloc before the block ends."},
    {"mixed-cta-group", "Use one value of .cta_group in all tcgen05 instructions of a kernel."},
    {"missing-tcgen05-fence",
     "Execute tcgen05.fence::before_thread_sync before the barrier and tcgen05.fence::after_thread_sync after it.",
     Grade::spec_only},
    {"pending-store", "Execute tcgen05.wait::st before the warp accesses these cells again.", Grade::spec_only},
    {"device-limit", "Reduce the request to the limits of the device."},
    {"trap", "Check the condition before the trap: the kernel stopped itself."},
}};

const About& about(Rule rule) { return kRules[static_cast<size_t>(rule)]; }

}  // namespace

std::string_view name_of(Rule rule) { return about(rule).name; }
std::string_view advice_of(Rule rule) { return about(rule).advice; }
Grade grade_of(Rule rule) { return about(rule).grade; }
std::string_view name_of(Grade grade) { return grade == Grade::error ? "error" : "letter"; }

}  // namespace tandem::vgpu
