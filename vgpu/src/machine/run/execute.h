// The dispatch loop, and the scheduler that calls it.
#pragma once

#include <span>

#include "vgpu/src/machine/run/state.h"

namespace tandem::vgpu::machine {

// Executes a fragment until it waits, ends, or has executed *budget ops. Subtracts the executed ops from *budget.
Step execute(Grid& grid, Warp& warp, Fragment& fragment, int64_t* budget);

// control.cpp The lanes `taken` of the fragment continue at target, the rest at the next op. All lanes rejoin at join
// (-1: nowhere).
void diverge(Warp& warp, Fragment& fragment, uint32_t taken, int32_t target, int32_t join);
// Executes a join op. Returns false if the fragment ends because its lanes wait for others.
bool rejoin(Warp& warp, Fragment& fragment, int32_t pc);
void exit_lanes(Context& context, const Op& op, uint32_t lanes);
// Releases lanes that wait at a join, because other lanes may need them to proceed.
bool break_joins(Warp& warp);
Fragment& new_fragment(Warp& warp, uint32_t mask, int32_t pc, int32_t join);
// Each group of lanes except the first becomes a separate fragment. All fragments execute the same op again.
Step split_fragment(Context& context, std::span<const uint32_t> groups);

// The effect of exited lanes on an .aligned instruction. PTX requires all threads of the warp. A barrier ignores exited
// threads, and hardware executes most other instructions for the warp as a whole. Products and matrices in shared
// memory take registers of all lanes, so they need every lane.
enum class Exited : uint8_t { do_not_matter, matter_by_the_letter, matter };
// Returns true if all lanes of the warp execute the op together, as .aligned requires. Otherwise reports a finding.
// Returns false if the run ends.
bool is_whole(Context& context, const Op& op, Exited exited = Exited::matter_by_the_letter);
// Waits until all lanes of members are at this op (with any_place: at an op of the same function). Returns true to the
// last caller, which acts for all of them. release_lanes() lets the rest continue after their op.
bool gather_lanes(Context& context, const Op& op, uint32_t members, bool any_place, uint32_t* present);
void release_lanes(Context& context, const Op& op, uint32_t lanes);

// scheduler.cpp
enum class Turn : uint8_t { done, idle, active, stopped };
Turn take_turn(Cluster& cluster, int64_t budget);

// deadlock.cpp
void report_deadlock(Cluster& cluster);
void report_endless_loop(Cluster& cluster);
// Returns the fragment that executes in the warp with the most executed ops, or a waiting one where all wait.
const Fragment* busiest_fragment(const Cluster& cluster, const Warp** warp);
std::string stuck_table(const Cluster& cluster);

// pending_registers.cpp: registers that an outstanding matrix product or tensor memory load reads or writes.
void check_held(Context& context, const Op& op);
bool rename_held(Context& context, const Op& op);  // true: op copies a register that will be written

// unwritten.cpp
void check_written(Context& context, const Op& op);

// block.cpp
void begin_cluster(Cluster& cluster, Grid& grid, int32_t index);
void end_block(Block& block);

}  // namespace tandem::vgpu::machine
