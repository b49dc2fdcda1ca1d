// Four warps and the wgmmas that they have issued.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "vgpu/src/machine/run/async.h"
#include "vgpu/src/units/matrix.h"

namespace tandem::vgpu::machine {

struct Block;
struct WgmmaDetail;

// A copy of a register that an outstanding wgmma will write. The copy is performed when the wgmma completes.
struct LateCopy {
  int warp = 0;  // in the warpgroup
  int32_t from = 0, to = 0;
  uint32_t lanes = 0;
};

struct Wgmma {
  const WgmmaDetail* detail = nullptr;
  int32_t source = 0;
  uint64_t a = 0, b = 0;  // descriptors
  units::MatrixTile a_tile, b_tile;
  bool accumulate = false;
  uint32_t issued_by = 0;  // warps of the warpgroup
  std::vector<LateCopy> copies;
  AsyncRef op;
};

// A setmaxnreg of the first warp that executes it. PTX requires the same count in the other warps.
struct Reallocation {
  int32_t count = 0;   // registers of a thread
  int32_t source = 0;  // instruction of the op
  uint32_t warps = 0;  // warps that have executed the setmaxnreg
};

struct Warpgroup {
  std::deque<Wgmma> under_way;  // not complete, in order
  uint64_t completed = 0;       // products completed, of all ever issued

  // Consecutive products usually add to the same accumulators, which are written to registers at a wait. An access
  // before a wait calls write_sums() first.
  const WgmmaDetail* unwritten = nullptr;  // product whose accumulators are only here
  std::vector<float> sums;

  std::vector<Reallocation> reallocations;
};

bool writes_register(const Wgmma& wgmma, int32_t at);  // in the register file
void write_sums(Block& block, size_t group);

}  // namespace tandem::vgpu::machine
