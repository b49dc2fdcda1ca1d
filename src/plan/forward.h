// What a GPU does for a forward call: which kernel, over which tiles, in which order. Pure functions of the problem and
// the device, without allocation: they are part of every call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "gpu/device.h"
#include "plan/tile.h"
#include "problem/problem.h"
#include "shared/forward.h"

namespace tandem::plan {

struct ForwardPlan {
  Tile tile;
  int together = 1;      // query heads of a key head whose rows are neighbours in a tile
  int units = 0;         // heads of a sequence, counted together
  int tiles_m = 0;       // of a unit; ragged: of a unit over all sequences, at most
  int tiles = 0;         // of all; ragged: at most
  int group = 1;         // units whose tiles are taken together (ragged: of each sequence)
  bool counted = false;  // tiles are taken from a counter
  bool keyless = false;  // there is no key at all: the kernel reads zeros in the workspace
  int grid = 0;
  int window_left = 0, window_right = 0;  // as the kernel has them, where the tile is bounded on that side
  size_t workspace_bytes = 0;             // 0: none is needed
};

// The workspace, from its first multiple of kWorkspaceAlignment on.
inline constexpr size_t kWorkspaceAlignment = 16;
inline constexpr size_t kCounterOffset = 0;  // two ints
inline constexpr size_t kZerosOffset = 16;   // what stands for keys and values where there are none
inline constexpr size_t kWorkOffset = 32;    // ForwardWork[tiles_m], ragged only

// Bounds beyond are as good as these, and sums stay in int.
inline constexpr int kFarWindow = 1 << 30;

// Ok, or the first reason for which this device does not serve the call. Where data pointers are set they count too.
Status check_forward(const Problem& problem, const gpu::Properties& device);

// For a problem that check_forward accepts and that has something to write.
ForwardPlan plan_forward(const Problem& problem, const gpu::Properties& device);

// A left or right bound that hides a key from some query.
bool binds_left(const Problem& problem);
bool binds_right(const Problem& problem);

// Lengths are known on the device only.
inline bool ragged(const Problem& p) { return p.packed_q() || p.packed_k() || p.seqused_q || p.seqused_k; }

// All of a tile in one number, and in one word: "forward_bf16_d128_128x128x2_turns_right".
uint64_t id_of(const Tile& tile);
std::string name_of(const Tile& tile);

// The kernel's source: entry points "forward" and, where the tile is ragged, "schedule", one block of
// kScheduleThreads threads that makes the work list and comes first.
std::string translation_unit(const Tile& tile);
inline constexpr uint32_t kScheduleThreads = 1024;

}  // namespace tandem::plan
