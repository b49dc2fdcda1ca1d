// Communication inside a warp. PTX ISA, "shfl.sync", "vote.sync", "match.sync", "redux.sync", "elect.sync",
// "activemask", "bar.warp.sync".
#include "vgpu/src/machine/instructions/warp.h"

#include <array>
#include <bit>
#include <cmath>

#include "vgpu/src/machine/run/execute.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

// The lanes of the fragment that name the same member mask as its lowest lane.
uint32_t lanes_of_first_mask(const Context& context, int32_t mask_row) {
  const uint32_t* masks = context.row(mask_row);
  const uint32_t first = masks[first_lane(context.mask)];
  uint32_t same = 0;
  for (uint32_t lane = 0; lane < kLanes; ++lane) same |= uint32_t{masks[lane] == first} << lane;
  return same & context.mask;
}

// Executes an op once for each group of lanes that name the same member mask, when all members of the group are there.
// act(lanes) computes the results of a group. A fragment whose groups are not all complete is split into its groups.
template <bool kAnyPlace = false, class Act>
Step for_each_group(Context& context, const Op& op, int32_t mask_row, Act&& act) {
  const uint32_t all = context.mask;
  const auto members_of = [&](uint32_t group) { return context.row(mask_row)[first_lane(group)]; };
  const auto check_members = [&](uint32_t group) {
    if ((group & ~members_of(group)) != 0)
      context.finds(Rule::divergent_aligned, op, "",
                    "a lane executes the instruction without its own bit in the member mask: add the bit");
  };
  uint32_t group = lanes_of_first_mask(context, mask_row);
  if (group == all) {
    check_members(group);
    uint32_t present;
    const uint32_t members = members_of(group);
    if (!gather_lanes(context, op, members, kAnyPlace, &present)) return context.wait(WaitKind::lanes, members, 0);
    present &= members | all;
    release_lanes(context, op, present);
    act(present);
    return Step::next;
  }
  std::array<uint32_t, kLanes> groups;
  size_t count = 0;
  bool complete = true;
  for (uint32_t left = all; left != 0; left &= ~group) {
    context.mask = left;
    group = lanes_of_first_mask(context, mask_row);
    groups[count++] = group;
    const uint32_t missing = members_of(group) & context.warp.alive & ~group;
    complete = complete && missing == 0;
    if ((missing & all) != 0)
      context.finds(Rule::divergent_aligned, op, "",
                    str_cat("lane ", first_lane(group), " has lane ", first_lane(missing & all),
                            " in the member mask, but that lane has another mask"));
  }
  context.mask = all;
  if (!complete) return split_fragment(context, {groups.data(), count});
  for (size_t n = 0; n < count; ++n) {
    check_members(groups[n]);
    act(groups[n]);
  }
  return Step::next;
}

void put_predicate(Context& context, int32_t at, uint32_t lanes, uint32_t bits) {
  if (at < 0) return;
  uint32_t& word = *context.row(at);
  word = (word & ~lanes) | (bits & lanes);
}

enum class Shuffle : uint8_t { up, down, bfly, idx };
struct ShuffleDetail : Detail {  // in: a, b, c, mask; out: d, p
  Shuffle mode = Shuffle::idx;
};

void shuffle(Context& context, const Op& op, const ShuffleDetail& detail, uint32_t present) {
  const uint32_t *a = context.row(detail.in[0]), *b = context.row(detail.in[1]), *c = context.row(detail.in[2]);
  uint32_t result[kLanes], in_range = 0;
  std::pair<int32_t, int32_t> missing(-1, -1);  // a lane, and another that it reads, which does not take part
  TANDEM_EACH_LANE(lane, present) {
    const uint32_t clamp = c[lane] & 31, segment = c[lane] >> 8 & 31, by = b[lane] & 31;
    const uint32_t most = (lane & segment) | (clamp & ~segment), least = lane & segment;
    int32_t from = 0;
    bool ok = false;
    switch (detail.mode) {
      case Shuffle::up:
        from = static_cast<int32_t>(lane) - static_cast<int32_t>(by);
        ok = from >= static_cast<int32_t>(most);
        break;
      case Shuffle::down:
        from = static_cast<int32_t>(lane + by);
        ok = from <= static_cast<int32_t>(most);
        break;
      case Shuffle::bfly:
        from = static_cast<int32_t>(lane ^ by);
        ok = from <= static_cast<int32_t>(most);
        break;
      case Shuffle::idx:
        from = static_cast<int32_t>(least | (by & ~segment));
        ok = from <= static_cast<int32_t>(most);
        break;
    }
    if (!ok) from = static_cast<int32_t>(lane);
    if ((present >> from & 1) == 0) missing = {static_cast<int32_t>(lane), from};
    result[lane] = a[from];
    in_range |= ok ? 1u << lane : 0u;
  }
  if (missing.first >= 0)
    context.finds(Rule::shuffle_lane, op, "",
                  str_cat("lane ", missing.first, " reads lane ", missing.second, ", which ",
                          (context.warp.alive >> missing.second & 1) != 0 ? "is not in the mask" : "has exited"));
  uint32_t* d = context.row(detail.out[0]);
  TANDEM_EACH_LANE(lane, present) d[lane] = result[lane];
  put_predicate(context, detail.out[1], present, in_range);
}

Step shfl_op(Context& context, const Op& op) {
  const auto& detail = op.as<ShuffleDetail>();
  return for_each_group(context, op, detail.in[3], [&](uint32_t present) { shuffle(context, op, detail, present); });
}

Status shfl(Builder& b, const Instruction& i) {
  Modifiers words(i);
  words.take("sync");
  const std::string mode = words.take_of({"up", "down", "bfly", "idx"});
  words.take("b32");
  TANDEM_TRY(b.unknown(i, words));
  if (mode.empty() || i.operands.size() != 5 || !i.has("sync")) {
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  }
  auto detail = std::make_unique<ShuffleDetail>();
  detail->mode = mode == "up"     ? Shuffle::up
                 : mode == "down" ? Shuffle::down
                 : mode == "bfly" ? Shuffle::bfly
                                  : Shuffle::idx;
  const bool two = i.operands[0].kind == Operand::Kind::pair;
  const int32_t d = b.destination(two ? i.operands[0].parts[0] : i.operands[0], Type::b32);
  const int32_t p = two ? b.destination(i.operands[0].parts[1], Type::pred) : -1;
  for (size_t n = 1; n < 5; ++n) detail->in.push_back(b.source(i.operands[n], Type::b32));
  if (b.failed()) return b.fail(i);
  detail->out = {d, p};
  b.emit(shfl_op, std::move(detail));
  return {};
}

enum class Vote : uint8_t { all, any, uni, ballot };
struct VoteDetail : Detail {  // in: predicate, mask; out: d
  Vote mode = Vote::all;
  bool negated = false;
};

void vote(Context& context, const VoteDetail& detail, uint32_t present) {
  const uint32_t votes = *context.row(detail.in[0]) & present;
  if (detail.mode == Vote::ballot) {
    uint32_t* d = context.row(detail.out[0]);
    TANDEM_EACH_LANE(lane, present) d[lane] = votes;
    return;
  }
  const bool all = votes == present, none = votes == 0;
  const bool result = detail.mode == Vote::all ? all : detail.mode == Vote::any ? !none : all || none;
  put_predicate(context, detail.out[0], present, result ? kAllLanes : 0);
}

Step vote_op(Context& context, const Op& op) {
  const auto& detail = op.as<VoteDetail>();
  return for_each_group(context, op, detail.in[1], [&](uint32_t present) { vote(context, detail, present); });
}

Status decode_vote(Builder& b, const Instruction& i) {
  Modifiers words(i);
  words.take("sync");
  const std::string mode = words.take_of({"all", "any", "uni", "ballot"});
  words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  if (mode.empty() || i.operands.size() != 3 || !i.has("sync")) {
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  }
  auto detail = std::make_unique<VoteDetail>();
  detail->mode = mode == "all" ? Vote::all : mode == "any" ? Vote::any : mode == "uni" ? Vote::uni : Vote::ballot;
  detail->out = {b.destination(i.operands[0], mode == "ballot" ? Type::b32 : Type::pred)};
  detail->in = {b.predicate(i.operands[1]), b.source(i.operands[2], Type::b32)};
  if (b.failed()) return b.fail(i);
  b.emit(vote_op, std::move(detail));
  return {};
}

struct MatchDetail : Detail {  // in: a, mask; out: d, p
  bool all = false;
  bool wide = false;
};

void match(Context& context, const MatchDetail& detail, uint32_t present) {
  const auto value = [&](uint32_t lane) -> uint64_t {
    return detail.wide ? context.row<uint64_t>(detail.in[0])[lane] : context.row(detail.in[0])[lane];
  };
  uint32_t same[kLanes];
  bool equal = true;
  TANDEM_EACH_LANE(lane, present) {
    const uint64_t mine = value(lane);
    same[lane] = 0;
    for (uint32_t other = 0; other < kLanes; ++other)
      if ((present >> other & 1) != 0 && value(other) == mine) same[lane] |= 1u << other;
    equal = equal && same[lane] == present;
  }
  uint32_t* d = context.row(detail.out[0]);
  TANDEM_EACH_LANE(lane, present) d[lane] = detail.all ? (equal ? present : 0) : same[lane];
  put_predicate(context, detail.out[1], present, equal ? kAllLanes : 0);
}

Step match_op(Context& context, const Op& op) {
  const auto& detail = op.as<MatchDetail>();
  return for_each_group(context, op, detail.in[1], [&](uint32_t present) { match(context, detail, present); });
}

Status decode_match(Builder& b, const Instruction& i) {
  Modifiers words(i);
  words.take("sync");
  const std::string mode = words.take_of({"any", "all"});
  const Type type = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  if (mode.empty() || type == Type::none || i.operands.size() != 3) {
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  }
  auto detail = std::make_unique<MatchDetail>();
  detail->all = mode == "all";
  detail->wide = width_of(type) == 8;
  const bool two = i.operands[0].kind == Operand::Kind::pair;
  detail->out = {b.destination(two ? i.operands[0].parts[0] : i.operands[0], Type::b32),
                 two ? b.destination(i.operands[0].parts[1], Type::pred) : -1};
  detail->in = {b.source(i.operands[1], type), b.source(i.operands[2], Type::b32)};
  if (b.failed()) return b.fail(i);
  b.emit(match_op, std::move(detail));
  return {};
}

struct ReduxDetail : Detail {  // in: a, mask; out: d
  std::string operation;
  Type type = Type::u32;
  bool absolute = false, propagate_nan = false;
};

uint32_t reduce_real(const ReduxDetail& detail, uint32_t x, uint32_t y) {
  float a = std::bit_cast<float>(x), b = std::bit_cast<float>(y);
  if (std::isnan(a) || std::isnan(b)) {
    if (detail.propagate_nan || (std::isnan(a) && std::isnan(b))) return 0x7fffffff;
    return std::isnan(a) ? y : x;
  }
  if (a == b) return (detail.operation == "min") == std::signbit(a) ? x : y;
  return (detail.operation == "min") == (a < b) ? x : y;
}

uint32_t reduce(const ReduxDetail& detail, uint32_t x, uint32_t y) {
  const bool real = detail.type == Type::f32, sign = detail.type == Type::s32;
  if (detail.operation == "add") return x + y;
  if (detail.operation == "and") return x & y;
  if (detail.operation == "or") return x | y;
  if (detail.operation == "xor") return x ^ y;
  if (real) return reduce_real(detail, x, y);
  const bool less = sign ? static_cast<int32_t>(x) < static_cast<int32_t>(y) : x < y;
  return (detail.operation == "min") == less ? x : y;
}

void redux(Context& context, const ReduxDetail& detail, uint32_t present) {
  const uint32_t* a = context.row(detail.in[0]);
  const auto value = [&](int lane) { return detail.absolute ? a[lane] & 0x7fffffffu : a[lane]; };
  uint32_t result = value(first_lane(present));
  TANDEM_EACH_LANE(lane, present & (present - 1)) result = reduce(detail, result, value(static_cast<int>(lane)));
  uint32_t* d = context.row(detail.out[0]);
  TANDEM_EACH_LANE(lane, present) d[lane] = result;
}

Step redux_op(Context& context, const Op& op) {
  const auto& detail = op.as<ReduxDetail>();
  return for_each_group(context, op, detail.in[1], [&](uint32_t present) { redux(context, detail, present); });
}

Status decode_redux(Builder& b, const Instruction& i) {
  Modifiers words(i);
  words.take("sync");
  auto detail = std::make_unique<ReduxDetail>();
  detail->operation = words.take_of({"add", "min", "max", "and", "or", "xor"});
  detail->absolute = words.take("abs");
  detail->propagate_nan = words.take("NaN");
  detail->type = words.take_type();
  TANDEM_TRY(b.unknown(i, words));
  if (detail->operation.empty() || i.operands.size() != 3)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  detail->out = {b.destination(i.operands[0], detail->type)};
  detail->in = {b.source(i.operands[1], detail->type), b.source(i.operands[2], Type::b32)};
  if (b.failed()) return b.fail(i);
  b.emit(redux_op, std::move(detail));
  return {};
}

// in: mask; out: d, p. The leader is the lowest lane.
Step elect_op(Context& context, const Op& op) {
  return for_each_group(context, op, op.detail->in[0], [&](uint32_t present) {
    const auto leader = static_cast<uint32_t>(first_lane(present));
    if (op.detail->out[0] >= 0) {
      uint32_t* d = context.row(op.detail->out[0]);
      TANDEM_EACH_LANE(lane, present) d[lane] = leader;
    }
    put_predicate(context, op.detail->out[1], present, 1u << leader);
  });
}

Status elect(Builder& b, const Instruction& i) {
  Modifiers words(i);
  words.take("sync");
  TANDEM_TRY(b.unknown(i, words));
  if (i.operands.size() != 2 || i.operands[0].kind != Operand::Kind::pair)
    return b.refuse(i, "must have two results: write d|p");
  auto detail = std::make_unique<Detail>();
  detail->out = {b.destination(i.operands[0].parts[0], Type::b32), b.destination(i.operands[0].parts[1], Type::pred)};
  detail->in = {b.source(i.operands[1], Type::b32)};
  if (b.failed()) return b.fail(i);
  b.emit(elect_op, std::move(detail));
  return {};
}

Step activemask_op(Context& context, const Op& op) {
  uint32_t* d = context.row(op.detail->out[0]);
  TANDEM_EACH_LANE(lane, context.mask) d[lane] = context.mask;
  return Step::next;
}

Status activemask(Builder& b, const Instruction& i) {
  auto detail = std::make_unique<Detail>();
  detail->out = {b.destination(i.operands[0], Type::b32)};
  if (b.failed()) return b.fail(i);
  b.emit(activemask_op, std::move(detail));
  return {};
}

Step warp_sync_op(Context& context, const Op& op) {
  return for_each_group<true>(context, op, op.detail->in[0], [&](uint32_t present) {
    if (context.grid.observer == nullptr) return;
    Actor actor = context.actor(op);
    actor.lanes = present;
    context.grid.observer->warp_syncs(actor);
  });
}

constexpr Family kFamilies[] = {
    {"shfl", shfl},          {"vote", decode_vote}, {"match", decode_match},
    {"redux", decode_redux}, {"elect", elect},      {"activemask", activemask},
};

}  // namespace

Status decode_warp_sync(Builder& b, const Instruction& i) {
  auto detail = std::make_unique<Detail>();
  if (i.operands.size() != 1) return b.refuse(i, "must have a member mask: add the operand");
  detail->in = {b.source(i.operands[0], Type::b32)};
  if (b.failed()) return b.fail(i);
  b.emit(warp_sync_op, std::move(detail));
  return {};
}

std::span<const Family> warp_families() { return kFamilies; }

}  // namespace tandem::vgpu::machine
