// The cp family: kinds of copies, groups of copies, and their completion.
#include "vgpu/src/machine/instructions/bulk.h"

#include "vgpu/src/machine/instructions/mbarrier.h"
#include "vgpu/src/machine/run/execute.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

AsyncGroups& groups_of(Warp& warp, uint32_t lane, bool bulk) {
  if (warp.lane_groups.empty()) warp.lane_groups.resize(kLanes);
  return bulk ? warp.lane_groups[lane].bulk : warp.lane_groups[lane].cp_async;
}

struct GroupDetail : Detail {
  bool bulk = false;
  bool commits = false, read_only = false, all = false;
  uint32_t pending = 0;
};

Step commit_op(Context& context, const Op& op) {
  const auto& detail = op.as<GroupDetail>();
  TANDEM_EACH_LANE(lane, context.mask) {
    AsyncGroups& groups = groups_of(context.warp, lane, detail.bulk);
    groups.committed.push_back(groups.open ? std::move(groups.open) : std::make_shared<Progress>());
    groups.open = nullptr;
    while (groups.committed.size() > 64 && groups.committed.front()->left == 0) groups.committed.pop_front();
  }
  if (context.grid.observer != nullptr)
    context.grid.observer->group_commits(context.actor(op), detail.bulk ? AsyncKind::bulk_store : AsyncKind::cp_async);
  return Step::next;
}

Step wait_op(Context& context, const Op& op) {
  const auto& detail = op.as<GroupDetail>();
  const WaitKind kind = detail.bulk ? WaitKind::bulk : WaitKind::cp_async;
  TANDEM_EACH_LANE(lane, context.mask) {
    const AsyncGroups& groups = groups_of(context.warp, lane, detail.bulk);
    for (size_t n = 0; n + detail.pending < groups.committed.size(); ++n)
      if (groups.committed[n]->left != 0) return context.wait(kind, detail.pending);
    if (detail.all && groups.open && groups.open->left != 0) return context.wait(kind);
  }
  TANDEM_EACH_LANE(lane, context.mask) {
    AsyncGroups& groups = groups_of(context.warp, lane, detail.bulk);
    while (groups.committed.size() > detail.pending) groups.committed.pop_front();
    if (detail.all) groups.open = nullptr;
  }
  if (context.grid.observer != nullptr) {
    const AsyncKind async = detail.bulk ? AsyncKind::bulk_store : AsyncKind::cp_async;
    if (detail.all) context.grid.observer->group_commits(context.actor(op), async);  // wait_all commits first
    context.grid.observer->group_waits(context.actor(op), async, detail.pending, detail.read_only);
  }
  return Step::next;
}

Status cp(Builder& b, const Instruction& i) {
  if (i.has("commit_group") || i.has("wait_group") || i.has("wait_all")) return decode_groups(b, i);
  if (!i.has("bulk")) return decode_cp_async(b, i);
  if (i.has("prefetch")) return {};
  return i.has("tensor") ? decode_tensor_copy(b, i) : decode_bulk_copy(b, i);
}

constexpr Family kFamilies[] = {{"cp", cp}, {"tensormap", decode_tensor_map}};

}  // namespace

Status decode_groups(Builder& b, const Instruction& i) {
  Modifiers words(i);
  auto detail = std::make_unique<GroupDetail>();
  words.take("async");
  detail->bulk = words.take("bulk");
  const std::string what = words.take_of({"commit_group", "wait_group", "wait_all"});
  detail->read_only = words.take("read");
  TANDEM_TRY(b.unknown(i, words));
  detail->commits = what == "commit_group";
  detail->all = what == "wait_all";
  if (what == "wait_group") {
    if (i.operands.size() != 1 || i.operands[0].kind != Operand::Kind::integer)
      return b.refuse(i, "must have a number of groups: add the operand");
    detail->pending = static_cast<uint32_t>(i.operands[0].bits);
  }
  const Exec exec = detail->commits ? commit_op : wait_op;
  b.emit(exec, std::move(detail));
  return {};
}

std::shared_ptr<Progress> open_group(Warp& warp, uint32_t lane, bool bulk) {
  AsyncGroups& groups = groups_of(warp, lane, bulk);
  if (!groups.open) groups.open = std::make_shared<Progress>();
  return groups.open;
}

AsyncRef issue_copy(Context& context, const Op& op, uint32_t lane, Copy copy) {
  Grid& grid = context.grid;
  Actor actor = context.actor(op);
  actor.lanes = 1u << lane;
  if (copy.group) ++copy.group->left;
  const AsyncRef made = context.cluster.async.issue(actor, nullptr);
  made->blocks = copy.blocks;
  made->outlives = copy.kind == AsyncKind::bulk_store;
  if (grid.observer != nullptr)
    made->moves_data = grid.observer->async_issues(actor, copy.kind, made->id, copy.reads, copy.writes);
  copy.reads.clear();
  copy.writes.clear();
  made->complete = [&grid, self = made.get(), copy = std::move(copy)] {
    if (self->moves_data) copy.move();
    if (grid.observer != nullptr) grid.observer->async_completes(self->id);
    if (copy.group) --copy.group->left;
    for (const Signal& signal : copy.signals) {
      Mbarrier* barrier = mbarrier_at(grid, self->issuer, *signal.block, signal.offset);
      if (barrier == nullptr) return;
      if (grid.observer != nullptr)
        grid.observer->async_signals(self->id, {signal.block->cta, signal.offset}, signal.bytes);
      mbarrier_complete_bytes(grid, self->issuer, *signal.block, *barrier, signal.bytes);
    }
  };
  ++context.cluster.events;
  context.cluster.async.advance(&context.cluster.random);
  return made;
}

Direction direction_of(const Instruction& i) {
  for (const std::string& word : i.modifiers) {
    if (word == "global") return Direction::store;
    if (word.starts_with("shared")) return i.has("global") ? Direction::load : Direction::shared_to_shared;
  }
  return Direction::load;
}

AddressOperand add_address(Builder& b, Detail* detail, const Operand& operand) {
  AddressOperand a;
  const int32_t reg = b.address(operand, &a.offset);
  a.in = static_cast<int32_t>(detail->in.size());
  a.wide = reg >= 0 && b.width(reg) == 8;
  detail->in.push_back(reg);
  return a;
}

uint64_t value_of(const Context& context, const Detail& detail, const AddressOperand& a, uint32_t lane) {
  const int32_t at = detail.in[static_cast<size_t>(a.in)];
  const auto offset = static_cast<uint64_t>(a.offset);
  if (a.wide) return context.row<uint64_t>(at)[lane] + offset;
  return static_cast<uint32_t>(context.row(at)[lane] + offset);
}

std::span<const Family> bulk_families() { return kFamilies; }

}  // namespace tandem::vgpu::machine
