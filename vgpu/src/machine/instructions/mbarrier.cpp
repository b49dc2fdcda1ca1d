#include "vgpu/src/machine/instructions/mbarrier.h"

#include <cstdio>
#include <cstring>
#include <span>

#include "vgpu/src/machine/instructions/memory.h"
#include "vgpu/src/machine/run/execute.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

constexpr uint64_t kMark = 0x6d62'6172'0000'0000;  // "mbar"
constexpr uint32_t kMaxArrivals = (1u << 20) - 1;
constexpr int64_t kMaxBytes = (1 << 20) - 1;

enum class Use : uint8_t { init, inval, arrive, expect_tx, complete_tx, test_wait, try_wait };
struct MbarrierDetail : Detail {  // in: address, then operands; out: state or predicate
  Use use = Use::init;
  AccessForm form;  // order and scope, cluster
  bool wide_address = false;
  int64_t offset = 0;
  bool expects = false, drops = false, no_complete = false;
  bool parity = false;
};

uint64_t token_of(const Mbarrier& barrier) { return barrier.phase << 20 | barrier.pending; }

void check_complete(Grid& grid, Block& block, Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  if (grid.observer != nullptr) grid.observer->mbarrier_completes({block.cta, barrier.address}, barrier.phase);
  ++barrier.phase;
  barrier.pending = barrier.expected;
  ++block.cluster->events;
}

bool init(Context& context, const Op& op, const SharedPlace& place, uint32_t count) {
  Block& block = *place.block;
  const std::string name = "mbarrier at " + std::to_string(place.offset);
  if (count == 0 || count > kMaxArrivals) {
    context.finds(Rule::invalid_barrier, op, name,
                  "the count (" + std::to_string(count) + ") must be 1 to 2^20 - 1: correct the count", true);
    return false;
  }
  uint64_t word;
  std::memcpy(&word, block.shared.data() + place.offset, 8);
  size_t index = block.mbarriers.size();
  for (size_t n = 0; n < block.mbarriers.size(); ++n)
    if (block.mbarriers[n].address == place.offset) index = n;
  if (index == block.mbarriers.size()) block.mbarriers.emplace_back();
  Mbarrier& barrier = block.mbarriers[index];
  if (barrier.live && word == (kMark | index) &&
      !context.finds(Rule::invalid_barrier, op, name,
                     "the mbarrier is initialised a second time: invalidate the mbarrier first"))
    return false;
  barrier = {place.offset, true, count, count, 0, 0};
  word = kMark | index;
  std::memcpy(block.shared.data() + place.offset, &word, 8);
  if (context.grid.observer != nullptr)
    context.grid.observer->mbarrier_inits(context.actor(op), {block.cta, place.offset}, count);
  return true;
}

// Returns true if an earlier lane of the instruction has initialised the same barrier with the same count. Whole warps
// do so without an elected lane.
bool lane_before_did(uint32_t mask, uint32_t lane, std::span<const SharedPlace> places, const uint32_t* counts) {
  for (uint32_t before = 0; before < lane; ++before) {
    if ((mask >> before & 1) != 0 && places[before].block == places[lane].block &&
        places[before].offset == places[lane].offset && counts[before] == counts[lane])
      return true;
  }
  return false;
}

// Executes arrive for one thread, or for several threads.
Step arrive(Context& context, const Op& op, const MbarrierDetail& detail, const SharedPlace& place, uint32_t lane) {
  Actor actor = context.actor(op);
  actor.lanes = 1u << lane;
  Mbarrier* barrier = mbarrier_at(context.grid, actor, *place.block, place.offset);
  if (barrier == nullptr) return Step::end;
  const bool has_number = detail.in[1] >= 0;
  const uint32_t number = has_number ? context.row(detail.in[1])[lane] : 1;
  const uint32_t count = detail.expects ? 1 : number, bytes = detail.expects ? number : 0;
  if (context.grid.observer != nullptr)
    context.grid.observer->mbarrier_arrives(actor, {place.block->cta, place.offset}, count, bytes, detail.form.order,
                                            detail.form.scope);
  if (!detail.out.empty() && detail.out[0] >= 0) context.row<uint64_t>(detail.out[0])[lane] = token_of(*barrier);
  barrier->bytes += bytes;
  if (detail.no_complete && count >= barrier->pending &&
      !context.finds(Rule::over_arrival, op, name_of(*barrier),
                     "an arrive.noComplete must not complete the phase: use arrive"))
    return Step::end;
  if (detail.drops && barrier->expected > 0) --barrier->expected;
  return mbarrier_arrive(context.grid, actor, *place.block, *barrier, count) ? Step::next : Step::end;
}

Step expect_or_complete(Context& context, const Op& op, const MbarrierDetail& detail, const SharedPlace& place,
                        uint32_t lane) {
  Actor actor = context.actor(op);
  actor.lanes = 1u << lane;
  Mbarrier* barrier = mbarrier_at(context.grid, actor, *place.block, place.offset);
  if (barrier == nullptr) return Step::end;
  const int64_t bytes = context.row(detail.in[1])[lane];
  ++context.cluster.events;
  if (detail.use == Use::complete_tx)
    return mbarrier_complete_bytes(context.grid, actor, *place.block, *barrier, bytes) ? Step::next : Step::end;
  if (context.grid.observer != nullptr)
    context.grid.observer->mbarrier_arrives(actor, {place.block->cta, place.offset}, 0, static_cast<uint32_t>(bytes),
                                            Order::relaxed, detail.form.scope);
  barrier->bytes += bytes;
  return Step::next;
}

// Returns true if the phase that the waiting thread names has completed.
bool is_over(Context& context, const MbarrierDetail& detail, const Mbarrier& barrier, uint32_t lane) {
  if (detail.parity) return (barrier.phase & 1) != (context.row(detail.in[1])[lane] & 1);
  return barrier.phase != context.row<uint64_t>(detail.in[1])[lane] >> 20;
}

void put_predicate(Context& context, const MbarrierDetail& detail, uint32_t passed) {
  if (detail.out.empty() || detail.out[0] < 0) return;
  uint32_t& word = *context.row(detail.out[0]);
  word = (word & ~context.mask) | (passed & context.mask);
}

Step wait(Context& context, const Op& op, const MbarrierDetail& detail, const SharedPlace* places) {
  uint32_t passed = 0;
  Mbarrier* last = nullptr;
  uint32_t parity = 0;
  TANDEM_EACH_LANE(lane, context.mask) {
    Mbarrier* barrier = mbarrier_at(context.grid, context.actor(op), *places[lane].block, places[lane].offset);
    if (barrier == nullptr) return Step::end;
    if (is_over(context, detail, *barrier, lane))
      passed |= 1u << lane;
    else
      last = barrier, parity = context.row(detail.in[1])[lane] & 1;
  }
  Fragment& fragment = context.fragment;
  if (detail.ignored && !fragment.tried)
    context.finds(Rule::ignored_wait, op, "mbarrier at " + std::to_string(places[first_lane(context.mask)].offset),
                  "the wait may end before the phase completes, but the kernel ignores the result");
  // A thread that waits through two completions would miss its phase on hardware.
  if (detail.use == Use::try_wait && last != nullptr && fragment.tried && detail.parity && passed == 0 &&
      fragment.wait.a == last->address && last->phase >= fragment.state + 2) {
    if (!context.finds(Rule::wrong_parity, op, name_of(*last),
                       "the awaited phase and the next phase have ended: parity " + std::to_string(parity) +
                           " means a later phase now"))
      return Step::end;
    passed = context.mask;
  }
  if (detail.use == Use::try_wait && passed != context.mask && !fragment.time_is_up) {
    if (!fragment.tried) fragment.state = last->phase;
    return context.wait(WaitKind::mbarrier, last->address, detail.parity ? parity : last->phase & 1);
  }
  fragment.time_is_up = false;
  put_predicate(context, detail, passed);
  if (context.grid.observer != nullptr) {
    // One event covers each barrier; usually all lanes wait for the same barrier.
    for (uint32_t left = passed & context.mask; left != 0;) {
      const SharedPlace& place = places[first_lane(left)];
      Actor actor = context.actor(op);
      actor.lanes = 0;
      TANDEM_EACH_LANE(lane, left)
      actor.lanes |= places[lane].offset == place.offset && places[lane].block == place.block ? 1u << lane : 0u;
      left &= ~actor.lanes;
      const Mbarrier* barrier = mbarrier_at(context.grid, actor, *place.block, place.offset);
      if (barrier->phase == 0) continue;  // a fresh barrier: the phase before the first
      context.grid.observer->mbarrier_passes(actor, {place.block->cta, place.offset}, barrier->phase - 1,
                                             detail.form.order, detail.form.scope);
    }
  }
  return passed == context.mask ? Step::next : Step::yield;
}

Step mbarrier_op(Context& context, const Op& op) {
  const auto& detail = op.as<MbarrierDetail>();
  SharedPlace places[kLanes];
  TANDEM_EACH_LANE(lane, context.mask) {
    const uint64_t base =
        detail.wide_address ? context.row<uint64_t>(detail.in[0])[lane] : context.row(detail.in[0])[lane];
    const uint64_t address = base + static_cast<uint64_t>(detail.offset);
    const bool generic = in_window(address, kSharedWindow);
    if (!generic && detail.form.space == ptx::Space::generic && detail.wide_address) {
      context.finds(Rule::wrong_space, op, "",
                    "the mbarrier's generic address must be in shared memory: correct the address", true);
      return Step::end;
    }
    if (!resolve_shared(context, op, detail.wide_address ? address : static_cast<uint32_t>(address),
                        detail.form.cluster || generic, 8, &places[lane]))
      return Step::end;
    if (places[lane].offset % 8 != 0) {
      context.finds(Rule::misaligned, op, "mbarrier at " + std::to_string(places[lane].offset),
                    "the address of an mbarrier must be a multiple of 8: align the mbarrier", true);
      return Step::end;
    }
  }
  if (detail.use == Use::test_wait || detail.use == Use::try_wait) return wait(context, op, detail, places);
  ++context.cluster.events;
  TANDEM_EACH_LANE(lane, context.mask) {
    Step step = Step::next;
    switch (detail.use) {
      case Use::init:
        if (lane_before_did(context.mask, lane, places, context.row(detail.in[1]))) break;
        if (!init(context, op, places[lane], context.row(detail.in[1])[lane])) return Step::end;
        break;
      case Use::inval: {
        Actor actor = context.actor(op);
        actor.lanes = 1u << lane;
        Mbarrier* barrier = mbarrier_at(context.grid, actor, *places[lane].block, places[lane].offset);
        if (barrier == nullptr) return Step::end;
        barrier->live = false;
        if (context.grid.observer != nullptr)
          context.grid.observer->mbarrier_invalidates(actor, {places[lane].block->cta, places[lane].offset});
        break;
      }
      case Use::arrive: step = arrive(context, op, detail, places[lane], lane); break;
      default: step = expect_or_complete(context, op, detail, places[lane], lane); break;
    }
    if (step == Step::end) return step;
  }
  return Step::next;
}

// mbarrier.pending_count.b64 d, state.
Step pending_op(Context& context, const Op& op) {
  TANDEM_EACH_LANE(lane, context.mask)
  context.row(op.detail->out[0])[lane] =
      static_cast<uint32_t>(context.row<uint64_t>(op.detail->in[0])[lane]) & kMaxArrivals;
  return Step::next;
}

Status pending_count(Builder& b, const Instruction& i) {
  auto detail = std::make_unique<Detail>();
  detail->out = {b.destination(i.operands[0], Type::b32)};
  detail->in = {b.source(i.operands[1], Type::b64)};
  if (b.failed()) return b.fail(i);
  b.emit(pending_op, std::move(detail));
  return {};
}

Use use_of(Modifiers& words, MbarrierDetail* detail) {
  const std::string use =
      words.take_of({"init", "inval", "arrive", "arrive_drop", "test_wait", "try_wait", "complete_tx"});
  if (use == "arrive" || use == "arrive_drop") {
    detail->drops = use == "arrive_drop";
    detail->expects = words.take("expect_tx");
    detail->no_complete = words.take("noComplete");
    return Use::arrive;
  }
  if (use.empty()) {
    words.take("expect_tx");
    return Use::expect_tx;
  }
  return use == "init"          ? Use::init
         : use == "inval"       ? Use::inval
         : use == "complete_tx" ? Use::complete_tx
         : use == "test_wait"   ? Use::test_wait
                                : Use::try_wait;
}

}  // namespace

std::string name_of(const Mbarrier& barrier) {
  char text[96];
  std::snprintf(text, sizeof text, "mbarrier at 0x%x, phase %llu", barrier.address,
                static_cast<unsigned long long>(barrier.phase));
  return text;
}

Mbarrier* mbarrier_at(Grid& grid, const Actor& actor, Block& block, uint32_t offset) {
  uint64_t word = 0;
  std::memcpy(&word, block.shared.data() + offset, 8);
  const uint64_t index = word & 0xffff'ffff;
  if ((word & ~uint64_t{0xffff'ffff}) == kMark && index < block.mbarriers.size() &&
      block.mbarriers[index].address == offset && block.mbarriers[index].live)
    return &block.mbarriers[index];
  const char* why = "the mbarrier has not been initialised";
  for (const Mbarrier& barrier : block.mbarriers)
    if (barrier.address == offset)
      why = barrier.live ? "the mbarrier has been overwritten" : "the mbarrier has been invalidated";
  char text[64];
  std::snprintf(text, sizeof text, "shared 0x%x of block %d", offset, block.cta);
  report(grid, actor, Rule::invalid_barrier, text, why, true);
  return nullptr;
}

bool mbarrier_arrive(Grid& grid, const Actor& actor, Block& block, Mbarrier& barrier, uint32_t count) {
  ++block.cluster->events;
  if (count > barrier.pending) {
    const uint32_t pending = barrier.pending;
    barrier.pending = 0;
    if (!report(grid, actor, Rule::over_arrival, name_of(barrier),
                std::to_string(count) + (count == 1 ? " arrival where " : " arrivals where ") +
                    std::to_string(pending) + " of " + std::to_string(barrier.expected) + " are missing"))
      return false;
  } else {
    barrier.pending -= count;
  }
  check_complete(grid, block, barrier);
  return true;
}

bool mbarrier_complete_bytes(Grid& grid, const Actor& actor, Block& block, Mbarrier& barrier, int64_t bytes) {
  barrier.bytes -= bytes;
  if ((barrier.bytes > kMaxBytes || barrier.bytes < -kMaxBytes) &&
      !report(grid, actor, Rule::over_arrival, name_of(barrier),
              std::to_string(barrier.bytes) + " bytes exceed the counter: expect at most 2^20 - 1 bytes per phase"))
    return false;
  check_complete(grid, block, barrier);
  return true;
}

Status decode_mbarrier(Builder& b, const Instruction& i) {
  if (i.has("pending_count")) return pending_count(b, i);
  Modifiers words(i);
  auto detail = std::make_unique<MbarrierDetail>();
  detail->use = use_of(words, detail.get());
  detail->parity = words.take("parity");
  const bool waits = detail->use == Use::test_wait || detail->use == Use::try_wait;
  take_order(words, &detail->form);
  take_space(words, &detail->form);
  if (detail->form.order == Order::weak) detail->form.order = waits ? Order::acquire : Order::release;
  if (!i.has("cluster") && !i.has("gpu")) detail->form.scope = Scope::cta;
  words.take("b64");
  TANDEM_TRY(b.unknown(i, words));
  const bool results = waits || detail->use == Use::arrive;
  size_t first = results && i.operands.size() > 1 && i.operands[0].kind != Operand::Kind::address ? 1 : 0;
  if (i.operands.size() <= first) return b.refuse(i, "must have an address: add the operand");
  const int32_t address = b.address(i.operands[first], &detail->offset);
  if (b.failed()) return b.fail(i);
  detail->wide_address = b.width(address) == 8;
  detail->in = {address, -1};
  if (i.operands.size() > first + 1)
    detail->in[1] = b.source(i.operands[first + 1], waits && !detail->parity ? Type::b64 : Type::b32);
  if (first == 1 && i.operands[0].kind != Operand::Kind::sink)
    detail->out = {b.destination(i.operands[0], waits ? Type::pred : Type::b64)};
  detail->answers = waits && !detail->out.empty();
  detail->ignored = waits && detail->out.empty();
  if (b.failed()) return b.fail(i);
  if (detail->in[1] < 0 && detail->use != Use::inval && detail->use != Use::arrive)
    return b.refuse(i, "must have the operands that PTX defines: add the missing operands");
  if (detail->expects && detail->in[1] < 0) return b.refuse(i, "must have a number of bytes: add the operand");
  b.emit(mbarrier_op, std::move(detail));
  return {};
}

}  // namespace tandem::vgpu::machine
