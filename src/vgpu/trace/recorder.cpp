#include "vgpu/trace/recorder.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>
#include <unordered_map>

#include "problem/text.h"
#include "vgpu/ptx/inlining.h"
#include "vgpu/trace/roles.h"

namespace tandem::vgpu {
namespace {

enum Unit : int32_t { kCopiesIn, kCopiesOut, kThreadCopies, kTensorCore, kTensorMemory, kUnits };
constexpr const char* kUnitNames[kUnits] = {"copies in", "copies out", "cp.async", "tensor core", "tensor memory"};

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

// Something that others wait for: from which step on they may go on, the row it happened in, and when.
struct Mark {
  int64_t step = 0;
  int32_t row = -1;
  int64_t happened = 0;
};
void raise(Mark& mark, const Mark& other) {
  if (other.step >= mark.step) mark = other;
}

struct Wait {
  size_t at = 0;  // after so many instructions
  int64_t begin = 0;
  Mark end;
};

struct Operation {
  Unit unit = kCopiesIn;
  int warps = 0;               // that have issued it
  int64_t issued = 0;          // by the last of them
  int64_t begin = 0, end = 0;  // of the unit's work
  int64_t seen = 0;            // by waiters
  int32_t instruction = -1;
};

// When a unit is busy. Blocks execute their warps in any order, so that what is issued early may come up late: it gets
// the first gap that is long enough.
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
  std::map<int64_t, int64_t> spans_;  // begins and ends; those that touch are one
};

constexpr int64_t kNone = -1;  // in place of an operation's number

// Asynchronous operations in groups, as a warp commits them: the latest that each group or one before it has.
struct Groups {
  int64_t latest = kNone;
  std::vector<int64_t> committed;
};

struct Warp {
  std::vector<int32_t> executed;  // instructions, one a step between waits
  std::vector<Wait> waits;
  int64_t waited = 0;
  int32_t trying = -1;  // the instruction that tries to pass a barrier, again and again, from `tried_at` on
  size_t tried_at = 0;
  std::map<AsyncKind, Groups> groups;
  int64_t matrices = kNone, loads = kNone, stores = kNone;  // tcgen05: the latest of each
  std::map<uint32_t, size_t> arrived;                       // at named barriers: in which generation

  int64_t clock() const { return static_cast<int64_t>(executed.size()) + waited; }
};

// A barrier that counts generations: named ones, the cluster's.
struct Generations {
  Mark arriving;
  std::vector<Mark> complete;
};

struct Mbarrier {
  Mark arriving;
  std::map<uint64_t, Mark> complete;  // by phase
};

constexpr uint32_t kClusterBarrier = 1 << 16;  // beside the numbers of named ones

// "m64n128k16" -> 64 * 128 * 16; 0: it is none.
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
  BlockRecorder(const LaunchDescription& launch, int32_t block, const Costs& costs)
      : program_(*launch.program), block_(block), costs_(costs) {
    const gpu::Dim3& size = launch.block;
    warps_.resize((size.x * size.y * size.z + 31) / 32);
  }

  bool wants_instructions() const override { return true; }

  void executes(const Actor& actor) override {
    Warp* warp = warp_of(actor);
    if (warp == nullptr) return;
    if (warp->trying == actor.instruction) {  // the tries before were one
      warp->executed.resize(warp->tried_at);
    } else if (tries_barrier(actor.instruction)) {
      warp->trying = actor.instruction;
      warp->tried_at = warp->executed.size();
    }
    warp->executed.push_back(actor.instruction);
  }

  // A wgmma is issued by four warps, each with an event: it begins with the last of them.
  bool async_issues(const Actor& actor, AsyncKind kind, AsyncId id, std::span<const Span> reads,
                    std::span<const Span> writes) override {
    Warp* warp = warp_of(actor);
    if (warp == nullptr) return true;
    const auto [entry, is_new] = under_way_.try_emplace(id, static_cast<int64_t>(operations_.size()));
    if (is_new) operations_.push_back({.unit = unit_of(kind), .instruction = actor.instruction});
    Operation& operation = operations_[static_cast<size_t>(entry->second)];
    operation.issued = std::max(operation.issued, warp->clock());
    if (++operation.warps == (kind == AsyncKind::wgmma ? 4 : 1)) {
      const int32_t quarter = operation.unit == kTensorMemory ? actor.warp % 4 : 0;  // each warp has its own lanes
      const int32_t issuer = kind == AsyncKind::wgmma ? actor.warp / 4 * 4 : actor.warp;
      const int64_t steps = std::max<int64_t>(1, work_of(kind, actor.instruction, reads, writes));
      int64_t& before = last_of_[{operation.unit, issuer}];  // its operations keep their order
      operation.begin = busy_[{operation.unit, quarter}].take(std::max(operation.issued, before), steps);
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
    if (barrier.cta == block_ && found != under_way_.end())
      raise(mbarriers_[barrier.address].arriving, mark_of(found->second));
  }

  void group_commits(const Actor& actor, AsyncKind kind) override {
    if (Warp* warp = warp_of(actor)) {
      Groups& groups = warp->groups[kind];
      groups.committed.push_back(groups.latest);
    }
  }
  void group_waits(const Actor& actor, AsyncKind kind, uint32_t pending, bool) override {
    Warp* warp = warp_of(actor);
    if (warp == nullptr) return;
    const std::vector<int64_t>& committed = warp->groups[kind].committed;
    if (committed.size() > pending) wait(*warp, mark_of(committed[committed.size() - pending - 1]));
  }
  void tcgen05_commits(const Actor& actor, std::span<const BarrierId> barriers) override {
    const Warp* warp = warp_of(actor);
    for (const BarrierId& barrier : barriers) {
      if (warp != nullptr && barrier.cta == block_)
        raise(mbarriers_[barrier.address].arriving, mark_of(warp->matrices));
    }
  }
  void tcgen05_waits(const Actor& actor, bool loads, bool stores) override {
    Warp* warp = warp_of(actor);
    if (warp == nullptr) return;
    if (loads) wait(*warp, mark_of(warp->loads));
    if (stores) wait(*warp, mark_of(warp->stores));
  }

  void named_arrives(const Actor& actor, uint32_t barrier) override { arrive(actor, barrier); }
  void named_completes(int32_t cta, uint32_t barrier) override {
    if (cta == block_) complete(barrier);
  }
  void named_passes(const Actor& actor, uint32_t barrier) override { pass(actor, barrier); }
  void cluster_arrives(const Actor& actor, Order) override { arrive(actor, kClusterBarrier); }
  void cluster_passes(const Actor& actor) override {
    // The first to pass ends a generation.
    const Warp* warp = warp_of(actor);
    const auto arrived = warp == nullptr ? 0 : warp->arrived.find(kClusterBarrier)->second;
    if (warp != nullptr && arrived == generations_[kClusterBarrier].complete.size()) complete(kClusterBarrier);
    pass(actor, kClusterBarrier);
  }
  void mbarrier_arrives(const Actor& actor, BarrierId barrier, uint32_t, uint32_t, Order, Scope) override {
    const Warp* warp = warp_of(actor);
    if (warp != nullptr && barrier.cta == block_) raise(mbarriers_[barrier.address].arriving, mark_of(actor, *warp));
  }
  void mbarrier_completes(BarrierId barrier, uint64_t phase) override {
    if (barrier.cta != block_) return;
    Mbarrier& object = mbarriers_[barrier.address];
    object.complete[phase] = object.arriving;
    object.arriving = {};
  }
  void mbarrier_passes(const Actor& actor, BarrierId barrier, uint64_t phase, Order, Scope) override {
    Warp* warp = warp_of(actor);
    if (warp == nullptr || barrier.cta != block_) return;
    warp->trying = -1;
    wait(*warp, mbarriers_[barrier.address].complete[phase]);
  }

  Timeline timeline() const override;

 private:
  Warp* warp_of(const Actor& actor) { return actor.cta == block_ ? &warps_[static_cast<size_t>(actor.warp)] : nullptr; }
  static Mark mark_of(const Actor& actor, const Warp& warp) { return {warp.clock(), actor.warp, warp.clock() - 1}; }
  Mark mark_of(int64_t number) const {
    if (number == kNone) return {};
    const Operation& operation = operations_[static_cast<size_t>(number)];
    return {operation.seen, static_cast<int32_t>(warps_.size()) + operation.unit, operation.end - 1};
  }

  bool tries_barrier(int32_t instruction) const {
    const ptx::Instruction& source = program_.source(instruction);
    return source.opcode == "mbarrier" && (source.has("try_wait") || source.has("test_wait"));
  }

  // Steps of the unit.
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

  void arrive(const Actor& actor, uint32_t barrier) {
    Warp* warp = warp_of(actor);
    if (warp == nullptr) return;
    Generations& generations = generations_[barrier];
    raise(generations.arriving, mark_of(actor, *warp));
    warp->arrived[barrier] = generations.complete.size();
  }
  void complete(uint32_t barrier) {
    Generations& generations = generations_[barrier];
    generations.complete.push_back(generations.arriving);
    generations.arriving = {};
  }
  void pass(const Actor& actor, uint32_t barrier) {
    Warp* warp = warp_of(actor);
    if (warp == nullptr) return;
    const std::vector<Mark>& complete = generations_[barrier].complete;
    const size_t generation = warp->arrived[barrier];
    if (generation < complete.size()) wait(*warp, complete[generation]);
  }

  static void wait(Warp& warp, const Mark& until) {
    const int64_t now = warp.clock();
    if (until.step <= now) return;
    warp.waits.push_back({warp.executed.size(), now, until});
    warp.waited += until.step - now;
  }

  const Program& program_;
  const int32_t block_;
  const Costs costs_;
  std::vector<Warp> warps_;
  std::map<std::pair<int32_t, int32_t>, Busy> busy_;        // by unit and part of it
  std::map<std::pair<int32_t, int32_t>, int64_t> last_of_;  // by unit and issuing warp: the end of its last operation
  std::vector<Operation> operations_;
  std::unordered_map<AsyncId, int64_t> under_way_;
  std::unordered_map<uint32_t, Mbarrier> mbarriers_;  // by address
  std::map<uint32_t, Generations> generations_;       // by number
};

// Turns what was recorded into rows.
class Drawing {
 public:
  Drawing(const Program& program, const std::vector<Warp>& warps) : program_(program), roles_(program) {
    size_t instructions = 0;
    for (const Warp& warp : warps) {
      for (const int32_t i : warp.executed) instructions = std::max(instructions, static_cast<size_t>(i) + 1);
    }
    std::vector<std::vector<uint32_t>> counts(warps.size(), std::vector<uint32_t>(instructions));
    for (size_t w = 0; w < warps.size(); ++w) {
      for (const int32_t i : warps[w].executed) ++counts[w][static_cast<size_t>(i)];
    }
    const std::vector<std::string> names = roles_.of_warps(counts);
    for (size_t w = 0; w < warps.size(); ++w)
      timeline.rows.push_back(names[w].empty() ? say("warp ", w) : say(names[w], ", warp ", w));
    for (size_t i = 0; i < instructions; ++i) {
      const ptx::Instruction& source = program_.source(static_cast<int32_t>(i));
      timeline.places.push_back(say(source.full_name(), ", ", place_text(program_.module(), source.location)));
      name_of_instruction_.push_back(-1);
    }
  }

  // Runs of instructions of the same name, and the waits between them.
  void draw_warp(int32_t row, const Warp& warp) {
    int64_t step = 0;
    auto wait = warp.waits.begin();
    for (size_t n = 0; n < warp.executed.size() || wait != warp.waits.end(); ++n) {
      for (; wait != warp.waits.end() && wait->at == n; ++wait) {
        add({row, Activity::wait, wait->begin, wait->end.step, name("wait"), n > 0 ? warp.executed[n - 1] : -1});
        if (wait->end.row >= 0)
          timeline.arrows.push_back(
              {wait->end.row, row, wait->end.happened, wait->end.step, wait->end.step - wait->begin});
        step = wait->end.step;
      }
      if (n == warp.executed.size()) break;
      const int32_t instruction = warp.executed[n], called = name_of(instruction);
      std::vector<Slice>& slices = timeline.slices;
      const bool goes_on = !slices.empty() && slices.back().row == row && slices.back().name == called &&
                           slices.back().end == step && slices.back().activity != Activity::wait;
      if (goes_on) {
        ++slices.back().end;
      } else {
        add({row, Activity::compute, step, step + 1, called, instruction});
      }
      ++step;
    }
    timeline.steps = std::max(timeline.steps, step);
  }

  void draw_operations(const std::vector<Operation>& operations, size_t warps) {
    std::array<int32_t, kUnits> rows{};
    rows.fill(-1);
    for (const Operation& operation : operations) {
      int32_t& row = rows[operation.unit];
      if (row < 0) row = 0;
    }
    for (int32_t unit = 0; unit < kUnits; ++unit) {
      if (rows[static_cast<size_t>(unit)] < 0) continue;
      rows[static_cast<size_t>(unit)] = static_cast<int32_t>(timeline.rows.size());
      timeline.rows.emplace_back(kUnitNames[unit]);
    }
    for (const Operation& o : operations) {
      const Activity activity = o.unit == kTensorCore ? Activity::matrix : Activity::copy;
      add({rows[o.unit], activity, o.begin, o.end, name_of(o.instruction), o.instruction});
      timeline.steps = std::max(timeline.steps, o.end);
    }
    for (Arrow& arrow : timeline.arrows) {
      const auto unit = static_cast<size_t>(arrow.from_row) - warps;
      if (static_cast<size_t>(arrow.from_row) >= warps) arrow.from_row = rows[unit];
    }
  }

  Timeline timeline;

 private:
  void add(const Slice& slice) { timeline.slices.push_back(slice); }

  int32_t name(const std::string& text) {
    const auto [entry, is_new] = numbers_.try_emplace(text, static_cast<int32_t>(timeline.names.size()));
    if (is_new) timeline.names.push_back(text);
    return entry->second;
  }
  int32_t name_of(int32_t instruction) {
    int32_t& known = name_of_instruction_[static_cast<size_t>(instruction)];
    if (known < 0) known = name(roles_.activity_at(instruction));
    return known;
  }

  const Program& program_;
  Roles roles_;
  std::map<std::string, int32_t> numbers_;
  std::vector<int32_t> name_of_instruction_;
};

Timeline BlockRecorder::timeline() const {
  Drawing drawing(program_, warps_);
  for (size_t w = 0; w < warps_.size(); ++w) drawing.draw_warp(static_cast<int32_t>(w), warps_[w]);
  drawing.draw_operations(operations_, warps_.size());
  drawing.timeline.title = say(program_.function().name, ", block ", block_);
  return std::move(drawing.timeline);
}

}  // namespace

std::unique_ptr<Recorder> Recorder::create(const LaunchDescription& launch, int32_t block, const Costs& costs) {
  return std::make_unique<BlockRecorder>(launch, block, costs);
}

}  // namespace tandem::vgpu
