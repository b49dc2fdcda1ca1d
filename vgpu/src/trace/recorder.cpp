#include "vgpu/src/trace/recorder.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "vgpu/src/trace/drawing.h"
#include "vgpu/src/trace/record.h"

namespace tandem::vgpu {
namespace trace {
namespace {

Unit unit_of(AsyncKind kind) {
  switch (kind) {
    case AsyncKind::bulk_load:
    case AsyncKind::cluster_launch: return kCopiesIn;
    case AsyncKind::bulk_store: return kCopiesOut;
    case AsyncKind::cp_async:
    case AsyncKind::st_async: return kThreadCopies;
    case AsyncKind::wgmma:
    case AsyncKind::tcgen05_mma: return kTensorCore;
    default: return kTensorMemory;
  }
}

void raise(Mark& mark, const Mark& other) {
  if (other.step >= mark.step) mark = other;
}

// Busy times of a unit. Blocks execute their warps in any order, so that early work may be recorded late. Such work
// fills the first gap that is long enough.
class Busy {
 public:
  int64_t take(int64_t from, int64_t steps) {
    auto next = spans_.upper_bound(from);
    int64_t at = next == spans_.begin() ? from : std::max(from, std::prev(next)->second);
    for (; next != spans_.end() && next->first < at + steps; ++next) at = std::max(at, next->second);
    int64_t end = at + steps;
    if (next != spans_.end() && next->first == end) {
      end = next->second;
      next = spans_.erase(next);
    }
    if (next != spans_.begin() && std::prev(next)->second == at) {
      std::prev(next)->second = end;
    } else {
      spans_.emplace_hint(next, at, end);
    }
    return at;
  }

 private:
  std::map<int64_t, int64_t> spans_;  // begins and ends; adjacent intervals are merged
};

// A barrier that counts generations: a named barrier, or the cluster's.
struct Generations {
  Mark arriving;
  std::vector<Mark> complete;
};

struct Mbarrier {
  Mark arriving;
  std::map<uint64_t, Mark> complete;  // by phase
};

struct ByPlace {
  bool operator()(const BarrierId& a, const BarrierId& b) const {
    return std::pair(a.cta, a.address) < std::pair(b.cta, b.address);
  }
};

constexpr uint32_t kClusterBarrier = 1 << 16;  // beyond the numbers of named barriers

// "m64n128k16" -> 64 * 128 * 16; 0: no product.
int64_t product_size(std::string_view shape) {
  int64_t size = 1;
  for (const char letter : {'m', 'n', 'k'}) {
    int64_t extent = 0;
    if (!shape.starts_with(letter)) return 0;
    const auto [end, error] = std::from_chars(shape.data() + 1, shape.data() + shape.size(), extent);
    if (error != std::errc()) return 0;
    shape.remove_prefix(static_cast<size_t>(end - shape.data()));
    size *= extent;
  }
  return shape.empty() ? size : 0;
}

class BlockRecorder final : public Recorder {
 public:
  BlockRecorder(const LaunchDescription& launch, int32_t block, const Costs& costs, int32_t blocks)
      : program_(*launch.program),
        block_(block),
        blocks_(blocks),
        warps_of_block_(static_cast<int32_t>((launch.block.x * launch.block.y * launch.block.z + 31) / 32)),
        costs_(costs) {
    warps_.resize(static_cast<size_t>(blocks) * static_cast<size_t>(warps_of_block_));
  }

  bool wants_instructions() const override { return true; }

  void executes(const Actor& actor) override {
    TracedWarp* warp = warp_of(actor);
    if (warp == nullptr) return;
    if (warp->trying == actor.instruction) {  // earlier tries count as one
      warp->executed.resize(warp->tried_at);
    } else if (tries_barrier(actor.instruction)) {
      warp->trying = actor.instruction;
      warp->tried_at = warp->executed.size();
    }
    warp->executed.push_back(actor.instruction);
  }

  // Four warps issue a wgmma, each with an event. The product begins with the last event.
  bool async_issues(const Actor& actor, AsyncKind kind, AsyncId id, std::span<const Span> reads,
                    std::span<const Span> writes) override {
    TracedWarp* warp = warp_of(actor);
    if (warp == nullptr) return true;
    if (!reads.empty() && !writes.empty()) {
      const TracedCopy copy{actor.instruction, warp->clock(), reads.front().address, writes.front().address};
      if (copy == warp->copy) return true;
      warp->copy = copy;
    }
    const auto [entry, is_new] = under_way_.try_emplace(id, static_cast<int64_t>(operations_.size()));
    if (is_new)
      operations_.push_back({.unit = unit_of(kind), .block = actor.cta - block_, .instruction = actor.instruction});
    TracedOperation& operation = operations_[static_cast<size_t>(entry->second)];
    operation.issued = std::max(operation.issued, warp->clock());
    if (++operation.warps == (kind == AsyncKind::wgmma ? 4 : 1)) {
      const int32_t quarter = operation.unit == kTensorMemory ? actor.warp % 4 : 0;  // each warp has its own lanes
      const int32_t issuer = number_of(actor) - (kind == AsyncKind::wgmma ? actor.warp % 4 : 0);
      const int64_t steps = std::max<int64_t>(1, work_of(kind, actor.instruction, reads, writes));
      int64_t& before = last_of_[{operation.unit, issuer}];  // operations of a warp keep their order
      operation.begin =
          busy_[{operation.block * kUnits + operation.unit, quarter}].take(std::max(operation.issued, before), steps);
      operation.end = before = operation.begin + steps;
      operation.seen = operation.end + latency_of(kind);
    }
    warp->groups[kind].latest = entry->second;
    if (kind == AsyncKind::tcgen05_ld) warp->loads = entry->second;
    if (kind == AsyncKind::tcgen05_st) warp->stores = entry->second;
    if (kind == AsyncKind::tcgen05_mma || kind == AsyncKind::tcgen05_cp) warp->matrices = entry->second;
    return true;
  }
  void async_signals(AsyncId id, BarrierId barrier, uint32_t) override {
    const auto found = under_way_.find(id);
    if (is_recorded(barrier.cta) && found != under_way_.end())
      raise(mbarriers_[barrier].arriving, mark_of(found->second));
  }

  void group_commits(const Actor& actor, AsyncKind kind) override {
    if (TracedWarp* warp = warp_of(actor)) {
      TracedGroups& groups = warp->groups[kind];
      groups.committed.push_back(groups.latest);
    }
  }
  void group_waits(const Actor& actor, AsyncKind kind, uint32_t pending, bool) override {
    TracedWarp* warp = warp_of(actor);
    if (warp == nullptr) return;
    const std::vector<int64_t>& committed = warp->groups[kind].committed;
    if (committed.size() > pending) wait(*warp, mark_of(committed[committed.size() - pending - 1]));
  }
  void tcgen05_commits(const Actor& actor, std::span<const BarrierId> barriers) override {
    const TracedWarp* warp = warp_of(actor);
    for (const BarrierId& barrier : barriers) {
      if (warp != nullptr && is_recorded(barrier.cta)) raise(mbarriers_[barrier].arriving, mark_of(warp->matrices));
    }
  }
  void tcgen05_waits(const Actor& actor, bool loads, bool stores) override {
    TracedWarp* warp = warp_of(actor);
    if (warp == nullptr) return;
    if (loads) wait(*warp, mark_of(warp->loads));
    if (stores) wait(*warp, mark_of(warp->stores));
  }

  void named_arrives(const Actor& actor, uint32_t barrier) override { arrive(actor, barrier); }
  void named_completes(int32_t cta, uint32_t barrier) override {
    if (is_recorded(cta)) complete(cta, barrier);
  }
  void named_passes(const Actor& actor, uint32_t barrier) override { pass(actor, barrier); }
  // All blocks of a cluster share its barrier.
  void cluster_arrives(const Actor& actor, Order) override { arrive(actor, kClusterBarrier); }
  void cluster_passes(const Actor& actor) override {
    // The first warp that passes ends a generation.
    const TracedWarp* warp = warp_of(actor);
    const auto arrived = warp == nullptr ? 0 : warp->arrived.find(kClusterBarrier)->second;
    if (warp != nullptr && arrived == generations_of(actor.cta, kClusterBarrier).complete.size())
      complete(actor.cta, kClusterBarrier);
    pass(actor, kClusterBarrier);
  }
  void mbarrier_arrives(const Actor& actor, BarrierId barrier, uint32_t, uint32_t, Order, Scope) override {
    const TracedWarp* warp = warp_of(actor);
    if (warp != nullptr && is_recorded(barrier.cta)) raise(mbarriers_[barrier].arriving, mark_of(actor, *warp));
  }
  void mbarrier_completes(BarrierId barrier, uint64_t phase) override {
    if (!is_recorded(barrier.cta)) return;
    Mbarrier& object = mbarriers_[barrier];
    object.complete[phase] = object.arriving;
    object.arriving = {};
  }
  void mbarrier_passes(const Actor& actor, BarrierId barrier, uint64_t phase, Order, Scope) override {
    TracedWarp* warp = warp_of(actor);
    if (warp == nullptr || !is_recorded(barrier.cta)) return;
    warp->trying = -1;
    wait(*warp, mbarriers_[barrier].complete[phase]);
  }

  Timeline timeline() const override;

 private:
  bool is_recorded(int32_t cta) const { return cta >= block_ && cta < block_ + blocks_; }
  int32_t number_of(const Actor& actor) const { return (actor.cta - block_) * warps_of_block_ + actor.warp; }
  TracedWarp* warp_of(const Actor& actor) {
    return is_recorded(actor.cta) ? &warps_[static_cast<size_t>(number_of(actor))] : nullptr;
  }
  Mark mark_of(const Actor& actor, const TracedWarp& warp) const {
    return {warp.clock(), number_of(actor), warp.clock() - 1};
  }
  Mark mark_of(int64_t number) const {
    if (number == kNone) return {};
    const TracedOperation& operation = operations_[static_cast<size_t>(number)];
    const int32_t unit = operation.block * kUnits + operation.unit;
    return {operation.seen, static_cast<int32_t>(warps_.size()) + unit, operation.end - 1};
  }

  bool tries_barrier(int32_t instruction) const {
    const ptx::Instruction& source = program_.source(instruction);
    return source.opcode == "mbarrier" && (source.has("try_wait") || source.has("test_wait"));
  }

  // Returns the steps of the unit.
  int64_t work_of(AsyncKind kind, int32_t instruction, std::span<const Span> reads,
                  std::span<const Span> writes) const {
    int64_t read = 0, written = 0;
    for (const Span& span : reads) read += int64_t{span.bytes} * span.rows;
    for (const Span& span : writes) written += int64_t{span.bytes} * span.rows;
    if (kind == AsyncKind::wgmma) {
      for (const std::string& modifier : program_.source(instruction).modifiers) {
        if (const int64_t size = product_size(modifier)) return size / costs_.products;
      }
    }
    if (kind == AsyncKind::tcgen05_mma) return written / 4 * 16 / costs_.products / 2;  // depth 16, at double rate
    return std::max(read, written) / (unit_of(kind) == kTensorMemory ? costs_.tensor_bytes : costs_.copy_bytes);
  }
  int64_t latency_of(AsyncKind kind) const {
    const Unit unit = unit_of(kind);
    return unit == kCopiesIn || unit == kCopiesOut ? costs_.copy_latency : costs_.local_latency;
  }

  Generations& generations_of(int32_t cta, uint32_t barrier) {
    return generations_[{barrier == kClusterBarrier ? block_ : cta, barrier}];
  }
  void arrive(const Actor& actor, uint32_t barrier) {
    TracedWarp* warp = warp_of(actor);
    if (warp == nullptr) return;
    Generations& generations = generations_of(actor.cta, barrier);
    raise(generations.arriving, mark_of(actor, *warp));
    warp->arrived[barrier] = generations.complete.size();
  }
  void complete(int32_t cta, uint32_t barrier) {
    Generations& generations = generations_of(cta, barrier);
    generations.complete.push_back(generations.arriving);
    generations.arriving = {};
  }
  void pass(const Actor& actor, uint32_t barrier) {
    TracedWarp* warp = warp_of(actor);
    if (warp == nullptr) return;
    const std::vector<Mark>& complete = generations_of(actor.cta, barrier).complete;
    const size_t generation = warp->arrived[barrier];
    if (generation < complete.size()) wait(*warp, complete[generation]);
  }

  static void wait(TracedWarp& warp, const Mark& until) {
    const int64_t now = warp.clock();
    if (until.step <= now) return;
    warp.waits.push_back({warp.executed.size(), now, until});
    warp.waited += until.step - now;
  }

  const Program& program_;
  const int32_t block_, blocks_, warps_of_block_;
  const Costs costs_;
  std::vector<TracedWarp> warps_;
  std::map<std::pair<int32_t, int32_t>, Busy> busy_;        // by unit of a block and part of it
  std::map<std::pair<int32_t, int32_t>, int64_t> last_of_;  // by unit and issuing warp: the end of its last operation
  std::vector<TracedOperation> operations_;
  std::unordered_map<AsyncId, int64_t> under_way_;
  std::map<BarrierId, Mbarrier, ByPlace> mbarriers_;
  std::map<std::pair<int32_t, uint32_t>, Generations> generations_;  // by block and number
};

Timeline BlockRecorder::timeline() const {
  Timeline timeline = draw(program_, warps_, operations_, block_, blocks_);
  timeline.title = str_cat(program_.function().name, blocks_ == 1 ? ", block " : ", blocks ", block_);
  if (blocks_ > 1) timeline.title += str_cat(" to ", block_ + blocks_ - 1);
  return timeline;
}

}  // namespace
}  // namespace trace

std::unique_ptr<Recorder> Recorder::create(const LaunchDescription& launch, int32_t block, const Costs& costs,
                                           int32_t blocks) {
  return std::make_unique<trace::BlockRecorder>(launch, block, costs, blocks);
}

}  // namespace tandem::vgpu
