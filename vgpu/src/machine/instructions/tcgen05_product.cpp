// tcgen05.cp, shift and commit, and code shared with mma. One thread issues them, and the tensor core of a block or a
// pair executes them.
//
// PTX guarantees this order: products of the same shape into the same accumulators; copies and shifts before later
// products; a shift after earlier products. A commit follows all earlier operations of its thread. The tensor core also
// executes one thread's operations in order, and all products of a block in order. Kernels rely on this order: a
// product overwrites the A of the preceding product, a copy overwrites the scales. The model therefore has the same
// order.
#include <algorithm>
#include <cstring>

#include "vgpu/src/machine/instructions/bulk.h"
#include "vgpu/src/machine/instructions/mbarrier.h"
#include "vgpu/src/machine/instructions/tcgen05.h"
#include "vgpu/src/machine/run/execute.h"
#include "vgpu/src/machine/run/resolve.h"
#include "vgpu/src/units/tensor_memory.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

struct CopyDetail : Detail {  // in: tensor memory address, descriptor
  units::TmemCopy copy;
  int32_t group = 1;
  int32_t offset = 0;
};

bool is_by(const TensorOp& before, const Context& context, uint32_t lane) {
  const Actor& by = before.op->issuer;
  return by.cta == context.block.cta && by.warp == context.warp.index && by.lanes == 1u << lane;
}

bool issue_cp(Context& context, const Op& op, const CopyDetail& detail, uint32_t lane) {
  TensorWork work;
  work.kind = AsyncKind::tcgen05_cp;
  if (!group_of(context, op, detail.group, &work.blocks)) return false;
  const uint32_t address = context.row(detail.in[0])[lane] + static_cast<uint32_t>(detail.offset);
  units::MatrixDescriptor descriptor;
  Status status = units::decode_tcgen05(context.row<uint64_t>(detail.in[1])[lane], &descriptor);
  if (status.ok()) status = units::check(detail.copy, address, descriptor, context.grid.window_bytes);
  if (!status.ok()) {
    context.finds(Rule::invalid_descriptor, op, "", status.message, true);
    return false;
  }
  for (const Block* block : work.blocks) {
    std::vector<units::Range> shared;
    std::vector<units::CellRange> cells;
    units::list_ranges(detail.copy, descriptor, address, &shared, &cells);
    if (!check_cells(context, op, *block, cells)) return false;
    add_shared(*block, shared, &work.reads);
    add_cells(*block, cells, &work.writes);
  }
  auto& ops = tensor_ops(work.blocks);
  for (const TensorOp& before : ops)
    if (is_by(before, context, lane) ||
        (before.kind == AsyncKind::tcgen05_shift && detail.copy.shape == units::TmemCopy::Shape::s4x256b))
      work.after.push_back(before.op);
  work.move = [&detail, descriptor, address, blocks = work.blocks] {
    for (Block* block : blocks)
      units::copy_to_tmem(detail.copy, descriptor, block->shared.data(), block->tensor_memory.get(), address);
  };
  ops.push_back({AsyncKind::tcgen05_cp, issue_work(context, op, lane, std::move(work))});
  return true;
}

Step cp_op(Context& context, const Op& op) {
  TANDEM_EACH_LANE(lane, context.mask)
  if (!issue_cp(context, op, op.as<CopyDetail>(), lane)) return Step::end;
  context.cluster.async.advance(&context.cluster.random);
  return Step::next;
}

Status cp(Builder& b, const Instruction& i, Modifiers& words) {
  using Copy = units::TmemCopy;
  auto detail = std::make_unique<CopyDetail>();
  detail->group = take_group(words);
  const std::pair<const char*, Copy::Shape> shapes[] = {{"128x256b", Copy::Shape::s128x256b},
                                                        {"4x256b", Copy::Shape::s4x256b},
                                                        {"128x128b", Copy::Shape::s128x128b},
                                                        {"64x128b", Copy::Shape::s64x128b},
                                                        {"32x128b", Copy::Shape::s32x128b}};
  bool known = false;
  for (const auto& [name, shape] : shapes) {
    if (!words.take(name)) continue;
    detail->copy.shape = shape;
    known = true;
  }
  const std::string multicast = words.take_of({"warpx2::02_13", "warpx2::01_23", "warpx4"});
  detail->copy.multicast = multicast == "warpx4"          ? Copy::Multicast::warpx4
                           : multicast == "warpx2::02_13" ? Copy::Multicast::warpx2_02_13
                           : multicast == "warpx2::01_23" ? Copy::Multicast::warpx2_01_23
                                                          : Copy::Multicast::none;
  if (words.take("b8x16")) {
    const std::string source = words.take_of({"b4x16_p64", "b6x16_p32"});
    if (source.empty()) return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
    detail->copy.source = source == "b4x16_p64" ? Copy::Source::b4x16_p64 : Copy::Source::b6x16_p32;
  }
  TANDEM_TRY(b.unknown(i, words));
  if (!known || detail->group == 0 || i.operands.size() != 2) {
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  }
  const Status status = units::check(detail->copy);
  if (!status.ok()) return b.refuse(i, status.message);
  int64_t offset = 0;
  detail->in.push_back(b.address(i.operands[0], &offset, 4));
  detail->offset = static_cast<int32_t>(offset);
  detail->in.push_back(b.source(i.operands[1], Type::b64));
  if (b.failed()) return b.fail(i);
  b.emit(cp_op, std::move(detail));
  return {};
}

struct ShiftDetail : Detail {  // in: address
  int32_t group = 1;
  int32_t offset = 0;
};

bool issue_shift(Context& context, const Op& op, const ShiftDetail& detail, uint32_t lane) {
  TensorWork work;
  work.kind = AsyncKind::tcgen05_shift;
  if (!group_of(context, op, detail.group, &work.blocks)) return false;
  const uint32_t address = context.row(detail.in[0])[lane] + static_cast<uint32_t>(detail.offset);
  const Status status = units::check_shift(address);
  if (!status.ok()) {
    context.finds(Rule::invalid_shape, op, "", status.message, true);
    return false;
  }
  std::vector<units::CellRange> cells;
  units::list_shift_ranges(address, &cells);
  for (const Block* block : work.blocks) {
    if (!check_cells(context, op, *block, cells)) return false;
    add_cells(*block, cells, &work.writes);  // the shift also reads these columns
  }
  auto& ops = tensor_ops(work.blocks);
  for (const TensorOp& before : ops)
    if (before.kind == AsyncKind::tcgen05_mma || is_by(before, context, lane)) work.after.push_back(before.op);
  work.move = [address, blocks = work.blocks] {
    for (Block* block : blocks) units::shift_down(block->tensor_memory.get(), address);
  };
  ops.push_back({AsyncKind::tcgen05_shift, issue_work(context, op, lane, std::move(work))});
  return true;
}

Step shift_op(Context& context, const Op& op) {
  TANDEM_EACH_LANE(lane, context.mask)
  if (!issue_shift(context, op, op.as<ShiftDetail>(), lane)) return Step::end;
  context.cluster.async.advance(&context.cluster.random);
  return Step::next;
}

Status shift(Builder& b, const Instruction& i, Modifiers& words) {
  auto detail = std::make_unique<ShiftDetail>();
  detail->group = take_group(words);
  words.take("down");
  TANDEM_TRY(b.unknown(i, words));
  if (detail->group == 0 || i.operands.size() != 1)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  int64_t offset = 0;
  detail->in.push_back(b.address(i.operands[0], &offset, 4));
  detail->offset = static_cast<int32_t>(offset);
  if (b.failed()) return b.fail(i);
  b.emit(shift_op, std::move(detail));
  return {};
}

struct CommitDetail : Detail {  // in: address, mask or -1
  int32_t group = 1;
  bool cluster = false;
  AddressOperand barrier;
};

bool issue_commit(Context& context, const Op& op, const CommitDetail& detail, uint32_t lane) {
  std::vector<Block*> blocks;
  SharedPlace place;
  if (!group_of(context, op, detail.group, &blocks)) return false;
  if (!resolve_shared(context, op, value_of(context, detail, detail.barrier, lane), detail.cluster, 8, &place))
    return false;
  std::vector<Block*> signalled;
  if (detail.in[1] < 0) {
    signalled.push_back(place.block);
  } else {
    const uint32_t mask = context.row(detail.in[1])[lane] & 0xffff;
    for (size_t rank = 0; rank < 16; ++rank) {
      if ((mask >> rank & 1) == 0) continue;
      if (rank >= context.cluster.blocks.size()) {
        context.finds(Rule::wrong_space, op, "",
                      str_cat("the multicast mask names block rank ", rank,
                              ", which the cluster does not have: clear this bit of the mask"),
                      true);
        return false;
      }
      signalled.push_back(&context.cluster.blocks[rank]);
    }
  }
  Actor actor = context.actor(op);
  actor.lanes = 1u << lane;
  std::vector<AsyncRef> after;
  for (const TensorOp& before : tensor_ops(blocks))
    if (is_by(before, context, lane)) after.push_back(before.op);
  if (context.grid.observer != nullptr) {
    std::vector<BarrierId> ids;
    for (const Block* block : signalled) ids.push_back({block->cta, place.offset});
    context.grid.observer->tcgen05_commits(actor, ids);
  }
  // PTX defines no order of a thread's commits. On hardware commits arrive in order, and the checker reports code that
  // relies on it.
  auto& commits = context.warp.last_commits;
  auto last = std::find_if(commits.begin(), commits.end(), [&](const auto& entry) { return entry.first == lane; });
  if (last == commits.end()) last = commits.insert(last, {lane, nullptr});
  if (last->second) after.push_back(last->second);
  const AsyncRef made = context.cluster.async.issue(actor, nullptr, after);
  last->second = made;
  Grid* const grid = &context.grid;
  made->complete = [grid, actor, signalled, offset = place.offset] {
    for (Block* block : signalled) {
      Mbarrier* barrier = mbarrier_at(*grid, actor, *block, offset);
      if (barrier == nullptr) return;
      mbarrier_arrive(*grid, actor, *block, *barrier, 1);
    }
  };
  return true;
}

Step commit_op(Context& context, const Op& op) {
  TANDEM_EACH_LANE(lane, context.mask)
  if (!issue_commit(context, op, op.as<CommitDetail>(), lane)) return Step::end;
  ++context.cluster.events;
  context.cluster.async.advance(&context.cluster.random);
  return Step::next;
}

Status commit(Builder& b, const Instruction& i, Modifiers& words) {
  auto detail = std::make_unique<CommitDetail>();
  detail->group = take_group(words);
  words.take("mbarrier::arrive::one");
  detail->cluster = words.take("shared::cluster");
  const bool multicast = words.take("multicast::cluster");
  words.take("b64");
  TANDEM_TRY(b.unknown(i, words));
  if (detail->group == 0 || i.operands.size() != (multicast ? 2u : 1u))
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  detail->barrier = add_address(b, detail.get(), i.operands[0]);
  detail->in.push_back(multicast ? b.source(i.operands[1], Type::b16) : -1);
  if (b.failed()) return b.fail(i);
  b.emit(commit_op, std::move(detail));
  return {};
}

Status tcgen05(Builder& b, const Instruction& i) {
  if (!b.model().tcgen05) return b.refuse(i, b.model().name + " has no tensor memory: run the kernel on vgpu:b200");
  Modifiers words(i);
  b.code().uses_tcgen05 = true;
  const std::string what = words.take_of({"mma", "commit", "cp", "shift"});
  if (what == "mma") return decode_tmem_mma(b, i, words);
  if (what == "commit") return commit(b, i, words);
  if (what == "cp") return cp(b, i, words);
  if (what == "shift") return shift(b, i, words);
  return decode_tmem(b, i);
}

constexpr Family kFamilies[] = {{"tcgen05", tcgen05}, {"clusterlaunchcontrol", decode_cluster_launch}};

}  // namespace

// Finds the blocks of an instruction, the block of even rank first.
bool group_of(Context& context, const Op& op, int32_t group, std::vector<Block*>* blocks) {
  if (!use_group(context, op, group)) return false;
  if (group == 1) {
    blocks->push_back(&context.block);
    return true;
  }
  Block* const peer = peer_of(context, op);
  if (peer == nullptr) return false;
  if (context.block.rank % 2 == 0)
    *blocks = {&context.block, peer};
  else
    *blocks = {peer, &context.block};
  return true;
}

// Outstanding operations of these blocks.
std::vector<TensorOp>& tensor_ops(const std::vector<Block*>& blocks) {
  auto& list = blocks[0]->tensor_ops;
  std::erase_if(list, [](const TensorOp& o) { return o.op->done; });
  return list;
}

AsyncRef issue_work(Context& context, const Op& op, uint32_t lane, TensorWork work) {
  Actor actor = context.actor(op);
  actor.lanes = 1u << lane;
  const AsyncRef made = context.cluster.async.issue(actor, nullptr, work.after);
  for (const Block* block : work.blocks) made->blocks |= 1u << block->rank;
  Observer* const observer = context.grid.observer;
  if (observer != nullptr)
    made->moves_data = observer->async_issues(actor, work.kind, made->id, work.reads, work.writes);
  made->complete = [observer, self = made.get(), move = std::move(work.move)] {
    if (self->moves_data) move();
    if (observer != nullptr) observer->async_completes(self->id);
  };
  ++context.cluster.events;
  return made;
}

void add_shared(const Block& block, const std::vector<units::Range>& ranges, std::vector<Span>* spans) {
  for (const units::Range& r : ranges) spans->push_back({Memory::shared, block.cta, r.address, r.bytes, 1});
}

std::span<const Family> tcgen05_families() { return kFamilies; }

}  // namespace tandem::vgpu::machine
