// cp.async of 4, 8 and 16 bytes, and the arrivals that wait for it. PTX ISA, "cp.async", "cp.async.mbarrier.arrive".
#include <cstring>

#include "vgpu/src/machine/instructions/bulk.h"
#include "vgpu/src/machine/instructions/mbarrier.h"
#include "vgpu/src/machine/instructions/memory.h"
#include "vgpu/src/machine/run/execute.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

struct CopyDetail : Detail {  // in: to, from, source bytes or -1, predicate or -1
  AddressOperand to, from;
  uint32_t bytes = 0;
};

bool issue_lane(Context& context, const Op& op, const CopyDetail& detail, uint32_t lane) {
  uint32_t given = detail.bytes;
  if (detail.in[2] >= 0) given = std::min(given, context.row(detail.in[2])[lane]);
  if (detail.in[3] >= 0 && (*context.row(detail.in[3]) >> lane & 1) != 0) given = 0;  // ignore-src
  const uint64_t from = value_of(context, detail, detail.from, lane);
  SharedPlace to;
  if (!resolve_shared(context, op, value_of(context, detail, detail.to, lane), false, detail.bytes, &to)) return false;
  if ((to.offset % detail.bytes != 0 || (given != 0 && from % detail.bytes != 0)) &&
      !context.finds(Rule::misaligned, op, "",
                     str_cat("the addresses of a copy of ", detail.bytes,
                             " bytes must be multiples of this size: align the addresses")))
    return false;
  if (given != 0 && (from < 0x10000 || from >= kSharedWindow)) {
    context.finds(Rule::wrong_space, op, "", "the source must be an address of global memory: correct the address",
                  true);
    return false;
  }
  Copy copy;
  copy.kind = AsyncKind::cp_async;
  if (given != 0) copy.reads.push_back({Memory::global, 0, from, given, 1});
  copy.writes.push_back({Memory::shared, to.block->cta, to.offset, detail.bytes, 1});
  copy.blocks = 1u << to.block->rank;
  copy.group = open_group(context.warp, lane, false);
  copy.move = [to, from, given, bytes = detail.bytes] {
    std::byte* const at = to.block->shared.data() + to.offset;
    std::memcpy(at, reinterpret_cast<const std::byte*>(static_cast<uintptr_t>(from)), given);
    std::memset(at + given, 0, bytes - given);
  };
  const AsyncRef made = issue_copy(context, op, lane, std::move(copy));
  if (context.grid.code->uses_cp_async_arrive) context.warp.lane_groups[lane].copies.push_back(made);
  return true;
}

Step copy_op(Context& context, const Op& op) {
  const auto& detail = op.as<CopyDetail>();
  TANDEM_EACH_LANE(lane, context.mask)
  if (!issue_lane(context, op, detail, lane)) return Step::end;
  return Step::next;
}

// cp.async.mbarrier.arrive: in: address.
struct ArriveDetail : Detail {
  AddressOperand barrier;
  bool counted = false;  // .noinc: the arrival is one that init has counted
};

Step arrive_op(Context& context, const Op& op) {
  const auto& detail = op.as<ArriveDetail>();
  if (context.warp.lane_groups.empty()) context.warp.lane_groups.resize(kLanes);
  TANDEM_EACH_LANE(lane, context.mask) {
    SharedPlace place;
    if (!resolve_shared(context, op, value_of(context, detail, detail.barrier, lane), false, 8, &place))
      return Step::end;
    Actor actor = context.actor(op);
    actor.lanes = 1u << lane;
    Mbarrier* barrier = mbarrier_at(context.grid, actor, *place.block, place.offset);
    if (barrier == nullptr) return Step::end;
    if (!detail.counted) ++barrier->pending;
    std::vector<AsyncRef> copies = std::exchange(context.warp.lane_groups[lane].copies, {});
    const AsyncRef made = context.cluster.async.issue(actor, nullptr, copies);
    made->blocks = 1u << place.block->rank;
    context.warp.lane_groups[lane].copies.push_back(made);  // the next arrival comes after this arrival
    Grid* const grid = &context.grid;
    made->complete = [grid, place, actor, copies = std::move(copies)] {
      Mbarrier* at = mbarrier_at(*grid, actor, *place.block, place.offset);
      if (at == nullptr) return;
      if (grid->observer != nullptr)
        for (const AsyncRef& copy : copies)
          grid->observer->async_signals(copy->id, {place.block->cta, place.offset}, 0);
      mbarrier_arrive(*grid, actor, *place.block, *at, 1);
    };
  }
  ++context.cluster.events;
  context.cluster.async.advance(&context.cluster.random);
  return Step::next;
}

Status arrive(Builder& b, const Instruction& i) {
  Modifiers words(i);
  auto detail = std::make_unique<ArriveDetail>();
  for (const char* word : {"async", "mbarrier", "arrive", "b64"}) words.take(word);
  detail->counted = words.take("noinc");
  b.code().uses_cp_async_arrive = true;
  words.take_of({"shared", "shared::cta"});
  TANDEM_TRY(b.unknown(i, words));
  if (i.operands.size() != 1) return b.refuse(i, "must have an address: add the operand");
  detail->barrier = add_address(b, detail.get(), i.operands[0]);
  if (b.failed()) return b.fail(i);
  b.emit(arrive_op, std::move(detail));
  return {};
}

}  // namespace

Status decode_cp_async(Builder& b, const Instruction& i) {
  if (i.has("mbarrier")) return arrive(b, i);
  Modifiers words(i);
  auto detail = std::make_unique<CopyDetail>();
  words.take("async");
  const std::string cache = words.take_of({"ca", "cg"});
  words.take_of({"shared", "shared::cta"});
  words.take("global");
  const bool hint = words.take("L2::cache_hint");
  take_cache_hints(words);
  TANDEM_TRY(b.unknown(i, words));
  size_t operands = i.operands.size() - (hint ? 1 : 0);
  if (cache.empty() || operands < 3 || operands > 4 || i.operands[2].kind != Operand::Kind::integer)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  detail->bytes = static_cast<uint32_t>(i.operands[2].bits);
  if (detail->bytes != 16 && (cache == "cg" || (detail->bytes != 4 && detail->bytes != 8)))
    return b.refuse(i, "a copy must have 4, 8 or 16 bytes, and with .cg 16: correct the size");
  detail->to = add_address(b, detail.get(), i.operands[0]);
  detail->from = add_address(b, detail.get(), i.operands[1]);
  detail->in.push_back(-1);
  detail->in.push_back(-1);
  if (operands == 4 && !b.failed()) {
    const bool predicate =
        i.operands[3].kind == Operand::Kind::reg && b.width(b.frame()->registers + i.operands[3].reg) == 0;
    detail->in[predicate ? 3 : 2] = b.source(i.operands[3], predicate ? Type::pred : Type::b32);
  }
  if (b.failed()) return b.fail(i);
  b.emit(copy_op, std::move(detail));
  return {};
}

}  // namespace tandem::vgpu::machine
