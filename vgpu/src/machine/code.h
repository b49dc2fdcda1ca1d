// A decoded kernel, as the machine executes it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "vgpu/src/machine/machine.h"
#include "vgpu/src/machine/op.h"

namespace tandem::vgpu::machine {

// Registers with a value when a thread begins.
enum class Special : uint8_t {
  constant,        // value
  shared_address,  // value is an offset, to which the block's rank is added
  tid_x,
  tid_y,
  tid_z,
  ntid_x,
  ntid_y,
  ntid_z,
  ctaid_x,
  ctaid_y,
  ctaid_z,
  nctaid_x,
  nctaid_y,
  nctaid_z,
  laneid,
  warpid,
  nwarpid,
  smid,
  nsmid,
  gridid,
  clusterid_x,
  clusterid_y,
  clusterid_z,
  nclusterid_x,
  nclusterid_y,
  nclusterid_z,
  cluster_ctaid_x,
  cluster_ctaid_y,
  cluster_ctaid_z,
  cluster_nctaid_x,
  cluster_nctaid_y,
  cluster_nctaid_z,
  cluster_ctarank,
  cluster_nctarank,
  is_explicit_cluster,
  lanemask_eq,
  lanemask_le,
  lanemask_lt,
  lanemask_ge,
  lanemask_gt,
  dynamic_smem_size,
  total_smem_size,
  workspace_low,  // address of a cooperative grid's workspace, else 0
  workspace_high,
};

struct Initial {
  Special special = Special::constant;
  uint8_t width = 4;  // bytes per lane; 0: a predicate
  int32_t at = 0;     // in the register file
  uint64_t value = 0;
};

// Global variables of a module, shared by all its kernels.
struct ModuleMemory {
  std::shared_ptr<const ptx::Module> module;
  std::unique_ptr<std::byte[]> bytes;
  size_t size = 0;
  std::vector<std::byte*> address;  // by index of Module::variables; null: another space
};
std::shared_ptr<ModuleMemory> memory_of(const std::shared_ptr<const ptx::Module>& module);

// Operands of an op that may be unwritten registers, by their numbers in Code::may_be_unwritten.
struct RegisterUse {
  std::vector<int32_t> reads, sums, writes;  // sums: read where the op adds to them (Detail::adds_if)
  int32_t guard = -1;
  bool carries = false;  // copies: the result is written if the source is written
  bool partly = false;   // the op also reads registers that are written
};

struct Code {
  std::shared_ptr<const ptx::Module> module;
  std::shared_ptr<ModuleMemory> memory;
  const ptx::Function* function = nullptr;
  std::vector<Op> ops;
  std::vector<std::unique_ptr<Detail>> details;
  std::vector<const ptx::Instruction*> sources;
  std::vector<Initial> initials;
  std::unordered_map<int32_t, RegisterUse> uses;  // by op, for ops with Op::kUnwritten
  std::vector<std::string> may_be_unwritten;      // names of registers, by number
  int32_t register_bytes = 0;                     // size of a warp's register file
  int32_t registers_needed = 0;
  int32_t local_bytes = 0;  // size of a thread's local memory
  int32_t static_shared = 0;
  uint32_t dynamic_shared_at = 0;  // in the shared window
  int32_t parameter_bytes = 0;
  std::vector<int32_t> parameter_offsets;
  bool uses_wgmma = false, uses_tcgen05 = false;
  // The workspace of a cooperative grid. cooperative groups keep its size in the first word and a barrier in the
  // second.
  static constexpr size_t kWorkspaceBytes = 64;
  std::unique_ptr<std::byte[]> workspace;  // null: no instruction reads its address
  bool uses_cp_async_arrive = false;       // cp.async.mbarrier.arrive

  // The source place of an instruction, with the calls that led to it (ptx::place_text).
  std::string place(int32_t source) const;
};

// The implementation of Program.
const Code& code_of(const Program& program);

}  // namespace tandem::vgpu::machine
