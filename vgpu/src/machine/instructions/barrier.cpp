// Named barriers, cluster barriers, fences, register reallocation. PTX ISA, "Parallel Synchronization and Communication
// Instructions", "setmaxnreg".
#include <atomic>

#include "vgpu/src/machine/instructions/mbarrier.h"
#include "vgpu/src/machine/instructions/warp.h"
#include "vgpu/src/machine/run/execute.h"
#include "vgpu/src/machine/run/warpgroup.h"

namespace tandem::vgpu::machine {
namespace {

using ptx::Instruction;
using ptx::Operand;
using ptx::Type;

enum class Use : uint8_t { sync, arrive, red_popc, red_and, red_or };
struct NamedDetail : Detail {  // in: barrier, count or -1, predicate or -1; out: result
  Use use = Use::sync;
  bool aligned = false;
  bool negated = false;
};

std::string name_of_barrier(uint32_t id) { return "named barrier " + std::to_string(id); }

void complete(Context& context, NamedBarrier& barrier, uint32_t id) {
  if (context.grid.observer != nullptr) context.grid.observer->named_completes(context.block.cta, id);
  barrier.last_count = barrier.count;
  barrier.last_all = barrier.all;
  barrier.last_any = barrier.any;
  barrier.count = barrier.any = barrier.arrived = barrier.expected = 0;
  barrier.all = 1;
  ++barrier.generation;
}

// Records the arrival of the op's lanes. Returns false if the run is over.
bool arrive(Context& context, const Op& op, const NamedDetail& detail, uint32_t id, uint32_t threads) {
  NamedBarrier& barrier = context.block.named[id];
  const bool given = detail.in[1] >= 0;
  const auto live = static_cast<uint32_t>(context.block.threads_alive);
  const uint32_t expected =
      given ? context.row(detail.in[1])[first_lane(context.mask)] : (live + kLanes - 1) / kLanes * kLanes;
  if (given && (expected == 0 || expected % kLanes != 0)) {
    if (!context.finds(
            Rule::barrier_count, op, name_of_barrier(id),
            "a count of " + std::to_string(expected) + " threads must be a multiple of 32: correct the count"))
      return false;
  }
  if (barrier.arrived != 0 && (barrier.expected != expected || barrier.all_threads == given)) {
    if (!context.finds(Rule::barrier_count, op, name_of_barrier(id),
                       "the thread expects " + std::to_string(expected) + " threads, but earlier arrivals expect " +
                           std::to_string(barrier.expected)))
      return false;
  }
  barrier.expected = expected;
  barrier.all_threads = !given;
  barrier.arrived += threads;
  ++context.cluster.events;
  if (detail.in[2] >= 0) {
    const uint32_t votes = *context.row(detail.in[2]) & context.mask;
    barrier.count += static_cast<uint32_t>(__builtin_popcount(votes));
    barrier.all = barrier.all != 0 && votes == context.mask ? 1 : 0;
    barrier.any = barrier.any != 0 || votes != 0 ? 1 : 0;
  }
  if (context.grid.observer != nullptr) context.grid.observer->named_arrives(context.actor(op), id);
  if (barrier.arrived > expected) {
    if (!context.finds(Rule::over_arrival, op, name_of_barrier(id),
                       std::to_string(barrier.arrived) + " threads have arrived, but only " + std::to_string(expected) +
                           " are expected"))
      return false;
  }
  return true;
}

Step named_op(Context& context, const Op& op) {
  const auto& detail = op.as<NamedDetail>();
  const uint32_t id = context.row(detail.in[0])[first_lane(context.mask)];
  if (id >= context.block.named.size()) {
    context.finds(Rule::invalid_barrier, op, name_of_barrier(id),
                  "the barrier's number must be 0 to 15: correct the number", true);
    return Step::end;
  }
  NamedBarrier& barrier = context.block.named[id];
  Fragment& fragment = context.fragment;
  if (!fragment.tried) {
    if (detail.aligned && !is_whole(context, op, Exited::do_not_matter)) return Step::end;
    // A warp whose lanes arrive together counts as a whole.
    const bool whole = context.mask == context.warp.alive;
    if (!arrive(context, op, detail, id, whole ? kLanes : static_cast<uint32_t>(__builtin_popcount(context.mask))))
      return Step::end;
    fragment.state = barrier.generation;
    if (barrier.arrived >= barrier.expected) complete(context, barrier, id);
    if (detail.use == Use::arrive) return Step::next;
  } else if (barrier.all_threads && barrier.generation == static_cast<uint32_t>(fragment.state)) {
    // Threads that have ended do not arrive.
    const auto live = static_cast<uint32_t>(context.block.threads_alive + kLanes - 1) / kLanes * kLanes;
    if (barrier.arrived >= live) complete(context, barrier, id);
  }
  if (barrier.generation == static_cast<uint32_t>(fragment.state))
    return context.wait(WaitKind::named, id, barrier.generation);
  if (context.grid.observer != nullptr) context.grid.observer->named_passes(context.actor(op), id);
  if (detail.use == Use::red_popc) {
    TANDEM_EACH_LANE(lane, context.mask) context.row(detail.out[0])[lane] = barrier.last_count;
  } else if (detail.use != Use::sync) {
    const bool result = (detail.use == Use::red_and ? barrier.last_all : barrier.last_any) != 0;
    uint32_t& word = *context.row(detail.out[0]);
    word = (word & ~context.mask) | (result ? context.mask : 0);
  }
  return Step::next;
}

Status named(Builder& b, const Instruction& i, Modifiers& words) {
  auto detail = std::make_unique<NamedDetail>();
  words.take("cta");
  detail->aligned = i.opcode == "bar" || i.has("aligned");
  words.take("aligned");
  const std::string use = words.take_of({"sync", "arrive", "red"});
  size_t first = 0;
  if (use == "red") {
    const std::string what = words.take_of({"popc", "and", "or"});
    const bool popc = what == "popc";
    words.take_type();
    detail->use = popc ? Use::red_popc : what == "and" ? Use::red_and : Use::red_or;
    detail->out = {b.destination(i.operands[0], popc ? Type::b32 : Type::pred)};
    first = 1;
  } else {
    detail->use = use == "arrive" ? Use::arrive : Use::sync;
  }
  TANDEM_TRY(b.unknown(i, words));
  if (use.empty() || i.operands.size() <= first)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  const size_t counted = use == "red" ? 2 : 1;
  detail->in = {b.source(i.operands[first], Type::b32), -1, -1};
  if (i.operands.size() > first + counted) detail->in[1] = b.source(i.operands[first + 1], Type::b32);
  if (use == "red") detail->in[2] = b.predicate(i.operands.back());
  if (detail->use == Use::arrive && detail->in[1] < 0)
    return b.refuse(i, "must have a number of threads: add the operand");
  if (b.failed()) return b.fail(i);
  b.emit(named_op, std::move(detail));
  return {};
}

// barrier.cluster: each thread stores the generation in which it has arrived.
struct ClusterDetail : Detail {
  bool arrives = false, aligned = false;
  Order order = Order::release;
};

Step cluster_op(Context& context, const Op& op) {
  const auto& detail = op.as<ClusterDetail>();
  Cluster& cluster = context.cluster;
  Warp& warp = context.warp;
  if (!context.fragment.tried && detail.aligned && !is_whole(context, op, Exited::do_not_matter)) return Step::end;
  if (detail.arrives) {
    if ((warp.cluster_arrived & context.mask) != 0 &&
        !context.finds(Rule::over_arrival, op, "cluster barrier",
                       "a thread arrives a second time without a wait: wait between the arrivals"))
      return Step::end;
    TANDEM_EACH_LANE(lane, context.mask) warp.cluster_generation[lane] = cluster.barrier_generation;
    cluster.barrier_arrived += __builtin_popcount(context.mask & ~warp.cluster_arrived);
    warp.cluster_arrived |= context.mask;
    ++cluster.events;
    if (context.grid.observer != nullptr) context.grid.observer->cluster_arrives(context.actor(op), detail.order);
    return Step::next;
  }
  const auto lane = static_cast<uint32_t>(first_lane(context.mask));
  if ((context.mask & ~warp.cluster_arrived) != 0) {
    context.finds(Rule::deadlock, op, "cluster barrier", "a thread waits that has not arrived: arrive before the wait",
                  true);
    return Step::end;
  }
  // Threads that have ended count as arrived.
  if (warp.cluster_generation[lane] == cluster.barrier_generation) {
    if (cluster.barrier_arrived < cluster.threads_alive)
      return context.wait(WaitKind::cluster, cluster.barrier_generation);
    ++cluster.barrier_generation;
    cluster.barrier_arrived = 0;
    ++cluster.events;
  }
  warp.cluster_arrived &= ~context.mask;
  if (context.grid.observer != nullptr) context.grid.observer->cluster_passes(context.actor(op));
  return Step::next;
}

Status barrier(Builder& b, const Instruction& i) {
  Modifiers words(i);
  if (!words.take("cluster")) {
    if (words.take("warp")) {
      words.take("sync");
      TANDEM_TRY(b.unknown(i, words));
      return decode_warp_sync(b, i);
    }
    return named(b, i, words);
  }
  auto detail = std::make_unique<ClusterDetail>();
  const std::string use = words.take_of({"arrive", "wait"});
  const std::string order = words.take_of({"release", "relaxed", "acquire"});
  detail->aligned = words.take("aligned");
  TANDEM_TRY(b.unknown(i, words));
  if (use.empty()) return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  detail->arrives = use == "arrive";
  detail->order = order == "relaxed" ? Order::relaxed : Order::release;
  b.emit(cluster_op, std::move(detail));
  return {};
}

struct FenceDetail : Detail {
  Order order = Order::acquire_release;
  Scope scope = Scope::gpu;
};

Step fence_op(Context& context, const Op& op) {
  const auto& detail = op.as<FenceDetail>();
  // All operations after the later of two fences see all operations before the earlier fence.
  if (detail.scope != Scope::cta) context.grid.fences.fetch_add(1, std::memory_order_acq_rel);
  if (context.grid.observer != nullptr) context.grid.observer->fence(context.actor(op), detail.order, detail.scope);
  return Step::next;
}

struct ProxyFenceDetail : Detail {
  FencedSpaces spaces = FencedSpaces::all;
};

Step proxy_fence_op(Context& context, const Op& op) {
  if (context.grid.observer != nullptr)
    context.grid.observer->proxy_fence(context.actor(op), op.as<ProxyFenceDetail>().spaces);
  return Step::next;
}

Status fence(Builder& b, const Instruction& i) {
  Modifiers words(i);
  if (words.take("proxy")) {
    // .async, .alias, .tensormap::generic, ...: only .async orders two proxies that can race here.
    const bool async = !words.take_prefix("async").empty();
    words.take_of({"alias"});
    words.take_prefix("tensormap");
    const std::string ordering = words.take_of({"acquire", "release"});
    const bool restricted = !words.take_prefix("sync_restrict").empty();  // to shared memory
    const std::string space = words.take_of({"global", "shared::cta", "shared::cluster"});
    words.take_of({"cta", "cluster", "gpu", "sys"});
    TANDEM_TRY(b.unknown(i, words));
    if (!async) return {};
    auto detail = std::make_unique<ProxyFenceDetail>();
    detail->spaces = space == "global"              ? FencedSpaces::global
                     : restricted || !space.empty() ? FencedSpaces::shared
                                                    : FencedSpaces::all;
    b.emit(proxy_fence_op, std::move(detail));
    return {};
  }
  auto detail = std::make_unique<FenceDetail>();
  if (words.take("mbarrier_init")) {
    words.take("release");
    words.take("cluster");
    detail->order = Order::release;
    detail->scope = Scope::cluster;
  } else {
    const std::string order = words.take_of({"acq_rel", "sc", "acquire", "release"});
    words.take_prefix("sync_restrict");
    const std::string scope = words.take_of({"cta", "cluster", "gpu", "sys", "gl"});
    detail->order = order == "acquire" ? Order::acquire : order == "release" ? Order::release : Order::acquire_release;
    detail->scope = scope == "cta"       ? Scope::cta
                    : scope == "cluster" ? Scope::cluster
                    : scope == "sys"     ? Scope::system
                                         : Scope::gpu;
  }
  TANDEM_TRY(b.unknown(i, words));
  b.emit(fence_op, std::move(detail));
  return {};
}

// setmaxnreg: hardware counts by warp, so each warp takes registers for its 32 threads from the block's pool, or
// returns them.
struct RegistersDetail : Detail {
  bool more = false;
  int32_t count = 0;
};

// PTX requires that the warps of a warpgroup execute the same instructions.
void compare_with_group(Context& context, const Op& op, int32_t count) {
  auto& before = context.block.warpgroups[static_cast<size_t>(context.warp.index / 4)]->reallocations;
  const size_t nth = context.warp.reallocations++;
  if (nth == before.size()) before.push_back({count, op.source, 0});
  before[nth].warps |= 1u << context.warp.index % 4;
  if (before[nth].count == count) return;
  context.finds(Rule::uneven_registers, op, "",
                "the warp requests " + std::to_string(count) +
                    " registers a thread, but another warp of the warpgroup requests " +
                    std::to_string(before[nth].count) + " at " + context.grid.code->place(before[nth].source));
}

Step registers_op(Context& context, const Op& op) {
  const auto& detail = op.as<RegistersDetail>();
  int32_t &own = context.warp.thread_registers, &pool = context.block.register_pool;
  if (!context.fragment.tried) {
    if (!is_whole(context, op)) return Step::end;
    compare_with_group(context, op, detail.count);
  }
  if (own != detail.count && detail.more == (detail.count < own)) {
    return context.finds(Rule::register_budget, op, "",
                         "the warp has " + std::to_string(own) + " registers a thread and requests " +
                             std::to_string(detail.count) + (detail.more ? " by .inc" : " by .dec"))
               ? Step::next
               : Step::end;
  }
  const int32_t difference = (detail.count - own) * kLanes;
  if (difference > pool)
    return context.wait(WaitKind::registers, static_cast<uint64_t>(detail.count), static_cast<uint64_t>(pool));
  pool -= difference;
  own = detail.count;
  ++context.cluster.events;
  return Step::next;
}

Status setmaxnreg(Builder& b, const Instruction& i) {
  Modifiers words(i);
  auto detail = std::make_unique<RegistersDetail>();
  const std::string way = words.take_of({"inc", "dec"});
  words.take("sync");
  words.take("aligned");
  words.take("u32");
  TANDEM_TRY(b.unknown(i, words));
  if (way.empty() || i.operands.size() != 1 || i.operands[0].kind != Operand::Kind::integer)
    return b.refuse(i, "must have a form that the virtual GPU executes: use another form");
  detail->more = way == "inc";
  detail->count = static_cast<int32_t>(i.operands[0].bits);
  if (detail->count < 24 || detail->count > 256 || detail->count % 8 != 0)
    return b.refuse(i, std::to_string(detail->count) + " must be a multiple of 8 from 24 to 256: correct the number");
  b.emit(registers_op, std::move(detail));
  return {};
}

constexpr Family kFamilies[] = {
    {"bar", barrier},  {"barrier", barrier},       {"fence", fence},
    {"membar", fence}, {"setmaxnreg", setmaxnreg}, {"mbarrier", decode_mbarrier},
};

}  // namespace

std::span<const Family> barrier_families() { return kFamilies; }

}  // namespace tandem::vgpu::machine
