// The choices that differ between GPU architectures. Shared plan code calls these functions and names no architecture.
#pragma once

#include <cstdint>
#include <string>

#include "gpu/device.h"
#include "plan/backward_schedule.h"
#include "plan/forward_kernel.h"
#include "plan/forward_time.h"
#include "plan/tuning.h"
#include "problem/problem.h"

namespace tandem::plan {

class ArchPlanner {
 public:
  // The forward kernel for a problem whose tiles pack rows of `pack_gqa` query heads.
  virtual ForwardKernel select_forward(const Problem& p, const gpu::Properties& device, int pack_gqa,
                                       const Tuning& tuning) const = 0;
  // The kernel that stores the float32 results of splits of the keys.
  virtual ForwardKernel split_keys(const ForwardKernel& kernel) const = 0;
  // The kernel whose schedule() splits the keys of sequences with few queries.
  virtual ForwardKernel device_splits(const ForwardKernel& kernel) const = 0;
  // The most query heads of a key head whose rows share a tile, a power of two.
  virtual int max_pack_gqa() const = 0;
  virtual const ForwardOrderTuning& forward_order(const Tuning& tuning) const = 0;
  virtual ForwardTimes forward_times(const ForwardKernel& kernel) const = 0;
  // The forward's block masks must have blocks of a multiple of this number of queries and of keys.
  virtual int64_t block_mask_queries() const = 0;
  virtual int64_t block_mask_keys() const = 0;

  // Sets the kernel and m_splits of a backward's schedule, and the chunk if the kernel depends on it.
  virtual void select_backward(const Problem& p, const Tuning& tuning, BackwardSchedule* schedule) const = 0;
  // Sets the chunk and the members that follow from it, for a kernel with ds_gmem. The other members are set.
  virtual void set_ds_chunks(const Problem& p, const Tuning& tuning, BackwardSchedule* schedule) const = 0;
  virtual const BackwardOrderTuning& backward_order(const Tuning& tuning) const = 0;
  // Returns false if no launch may begin before the previous one has ended.
  virtual bool overlaps_launches(const Tuning&) const { return true; }

  // For `tandem explain`: the description of a tile, and the bytes of shared memory traffic per query-key pair.
  virtual std::string explain_tile(const Problem& p, const ForwardKernel& kernel) const = 0;
  virtual std::string explain_tile(const BackwardKernel& kernel) const = 0;
  virtual double pair_smem_bytes(const ForwardKernel& kernel) const = 0;
  virtual double iteration_smem_bytes(const BackwardKernel& kernel) const = 0;
  // Columns of q and dout that one backward iteration loads.
  virtual double iteration_columns(const BackwardKernel& kernel) const = 0;
  virtual double flops_per_clock() const = 0;
  virtual double exp_per_clock(const gpu::Properties& device) const = 0;

 protected:
  ~ArchPlanner() = default;
};

extern const ArchPlanner& kSm90Planner;
extern const ArchPlanner& kSm100Planner;

inline const ArchPlanner& planner_for(const gpu::Properties& device) {
  return device.compute_major == 10 ? kSm100Planner : kSm90Planner;
}

}  // namespace tandem::plan
