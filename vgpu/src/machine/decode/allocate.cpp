#include "vgpu/src/machine/decode/allocate.h"

#include <algorithm>
#include <queue>

#include "vgpu/src/machine/decode/flow.h"
#include "vgpu/src/machine/decode/register_set.h"

namespace tandem::vgpu::machine {
namespace {

struct Interval {
  int32_t begin = INT32_MAX, end = -1;
};

class Allocator {
 public:
  Allocator(Code* code, const std::vector<VirtualRegister>& registers, int32_t always)
      : code_(code), ops_(code->ops), registers_(registers), always_(always), blocks_(blocks_of(ops_, always)) {}

  void run() {
    find_held();
    find_live();
    find_ignored();
    find_defined();
    find_intervals();
    place();
    rewrite();
  }

 private:
  static bool is_row(const Op& op) {
    return op.action.shape != Shape::branch && op.action.shape != Shape::exec && op.action.shape != Shape::join;
  }
  template <class F>
  void each_use(const Op& op, F f) const {
    f(op.guard);
    if (is_row(op))
      for (const int32_t r : {op.a, op.b, op.c, op.e})
        if (r >= 0) f(r);
    if (op.detail == nullptr || is_row(op)) return;
    for (const int32_t r : op.detail->in)
      if (r >= 0) f(r);
  }
  template <class F>
  void each_def(const Op& op, F f) const {
    if (is_row(op) && op.d >= 0) f(op.d);
    if (op.detail == nullptr || is_row(op)) return;
    for (const int32_t r : op.detail->out)
      if (r >= 0) f(r);
  }
  bool conditional(const Op& op) const { return op.guard != always_ || op.flip != 0; }
  size_t count() const { return registers_.size(); }

  // Registers that asynchronous operations may hold before each op. Registers of wgmmas are open until the commit.
  struct Held {
    RegisterSet open, closed;
    explicit Held(size_t n = 0) : open(n), closed(n) {}
    bool operator[](int32_t r) const { return open[r] || closed[r]; }
    bool add(const Held& other) {
      const bool changed = open.add(other.open);
      return closed.add(other.closed) || changed;
    }
  };
  void step_held(const Op& op, Held* held) const {
    if (op.detail != nullptr && !is_row(op)) {
      if (op.detail->releases != Hold::none)
        held->closed.each([&](int32_t r) {
          if (kind_of_[static_cast<size_t>(r)] == op.detail->releases) held->closed.clear(r);
        });
      if (op.detail->commits) {
        held->closed.add(held->open);
        held->open = RegisterSet(count());
      }
      for (const int32_t r : op.detail->held) (op.detail->holds == Hold::mma ? held->open : held->closed).set(r);
    }
    if (!op.is_copy) return;
    if (held->open[op.a]) held->open.set(op.d);
    if (held->closed[op.a]) held->closed.set(op.d);
  }
  void find_held() {
    held_in_.assign(blocks_.size(), Held(count()));
    kind_of_.assign(count(), Hold::none);
    products_ = RegisterSet(count());
    bool any = false;
    for (const Op& op : ops_)
      if (op.detail != nullptr && !is_row(op))
        for (const int32_t r : op.detail->held) {
          kind_of_[static_cast<size_t>(r)] = op.detail->holds;
          if (op.detail->holds == Hold::mma) products_.set(r);
          any = true;
        }
    if (!any) return;
    for (bool changed = true; changed;) {  // copies of registers that may be held may be held
      changed = false;
      for (const Op& op : ops_) {
        if (!op.is_copy) continue;
        Hold& d = kind_of_[static_cast<size_t>(op.d)];
        const Hold a = kind_of_[static_cast<size_t>(op.a)];
        if (a == Hold::none || d != Hold::none) continue;
        d = a;
        changed = true;
      }
    }
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t n = 0; n < blocks_.size(); ++n) {
        Held held = held_in_[n];
        for (int32_t i = blocks_[n].begin; i < blocks_[n].end; ++i) step_held(ops_[static_cast<size_t>(i)], &held);
        for (const int32_t next : blocks_[n].next) changed = held_in_[static_cast<size_t>(next)].add(held) || changed;
      }
    }
  }

  // An op that releases held registers counts as a use of them, because their places are not free before.
  template <class F>
  void each_release(const Op& op, const Held& held, F f) const {
    if (op.detail == nullptr || is_row(op) || op.detail->releases == Hold::none) return;
    held.closed.each([&](int32_t r) {
      if (kind_of_[static_cast<size_t>(r)] == op.detail->releases) f(r);
    });
  }

  void find_live() {
    std::vector<RegisterSet> used(blocks_.size(), RegisterSet(count())), killed(blocks_.size(), RegisterSet(count()));
    for (size_t n = 0; n < blocks_.size(); ++n) {
      Held held = held_in_[n];
      for (int32_t i = blocks_[n].begin; i < blocks_[n].end; ++i) {
        const Op& op = ops_[static_cast<size_t>(i)];
        const auto use = [&](int32_t r) {
          if (!killed[n][r]) used[n].set(r);
        };
        each_use(op, use);
        each_release(op, held, use);
        if (!conditional(op)) each_def(op, [&](int32_t r) { killed[n].set(r); });
        step_held(op, &held);
      }
    }
    live_out_.assign(blocks_.size(), RegisterSet(count()));
    live_in_ = std::move(used);
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t n = blocks_.size(); n-- > 0;) {
        bool grew = false;
        for (const int32_t next : blocks_[n].next) grew = live_out_[n].add(live_in_[static_cast<size_t>(next)]) || grew;
        if (!grew) continue;
        RegisterSet through = live_out_[n];
        through.remove(killed[n]);
        changed = live_in_[n].add(through) || changed;
      }
    }
  }

  // Finds waits whose result is unused.
  void find_ignored() {
    for (size_t n = 0; n < blocks_.size(); ++n) {
      RegisterSet live = live_out_[n];
      for (int32_t i = blocks_[n].end; i-- > blocks_[n].begin;) {
        const Op& op = ops_[static_cast<size_t>(i)];
        if (op.detail != nullptr && op.detail->answers && !live[op.detail->out[0]])
          const_cast<Detail*>(op.detail)->ignored = true;
        if (!conditional(op)) each_def(op, [&](int32_t r) { live.clear(r); });
        each_use(op, [&](int32_t r) { live.set(r); });
      }
    }
  }

  void find_defined() {
    defined_in_.assign(blocks_.size(), RegisterSet(count()));
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t n = 0; n < blocks_.size(); ++n) {
        RegisterSet defined = defined_in_[n];
        for (int32_t i = blocks_[n].begin; i < blocks_[n].end; ++i)
          each_def(ops_[static_cast<size_t>(i)], [&](int32_t r) { defined.set(r); });
        for (const int32_t next : blocks_[n].next)
          changed = defined_in_[static_cast<size_t>(next)].add(defined) || changed;
      }
    }
  }

  void touch(int32_t r, int32_t at) {
    Interval& v = intervals_[static_cast<size_t>(r)];
    v.begin = std::min(v.begin, at);
    v.end = std::max(v.end, at);
  }

  // Positions of op i: 2i for its reads, 2i + 1 for its writes. An op of several steps reads until it has written.
  void find_intervals() {
    intervals_.assign(count(), {});
    for (size_t n = 0; n < blocks_.size(); ++n) {
      Held held = held_in_[n];
      for (int32_t i = blocks_[n].begin; i < blocks_[n].end; ++i) {
        Op& op = ops_[static_cast<size_t>(i)];
        const bool row = is_row(op);
        bool checked = false, touches = false;
        const auto mark = [&](int32_t r, int32_t at) {
          touch(r, at);
          checked = checked || held[r];
          touches = touches || products_[r];
        };
        each_use(op, [&](int32_t r) { mark(r, row ? 2 * i : 2 * i + 1); });
        each_release(op, held, [&](int32_t r) { touch(r, 2 * i + 1); });
        each_def(op, [&](int32_t r) { mark(r, 2 * i + 1); });
        const bool ordinary = row || op.detail == nullptr || op.detail->holds != Hold::mma;
        if (checked && ordinary) op.watch |= Op::kHeld;
        if (touches && ordinary) op.watch |= Op::kProduct;
        step_held(op, &held);
      }
      RegisterSet across = live_out_[n];
      RegisterSet defined = defined_in_[n];
      RegisterSet in = defined_in_[n];
      for (int32_t i = blocks_[n].begin; i < blocks_[n].end; ++i)
        each_def(ops_[static_cast<size_t>(i)], [&](int32_t r) { defined.set(r); });
      across.keep(defined);
      across.each([&](int32_t r) { touch(r, 2 * blocks_[n].end); });
      RegisterSet entering = live_in_[n];
      entering.keep(in);
      entering.each([&](int32_t r) { touch(r, 2 * blocks_[n].begin); });
    }
  }

  void place() {
    std::vector<int32_t> order;
    offsets_.assign(count(), -1);
    for (size_t r = 0; r < count(); ++r)
      if (!registers_[r].is_initial && intervals_[r].end >= 0) order.push_back(static_cast<int32_t>(r));
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return std::pair(intervals_[static_cast<size_t>(a)].begin, a) <
             std::pair(intervals_[static_cast<size_t>(b)].begin, b);
    });
    int32_t used[4] = {0, 0, 0, 0};  // places of each width
    std::vector<int32_t> free[4];
    using Active = std::pair<int32_t, int32_t>;  // end, register
    std::priority_queue<Active, std::vector<Active>, std::greater<>> active;
    int32_t live = 0;
    for (const int32_t r : order) {
      const Interval& v = intervals_[static_cast<size_t>(r)];
      while (!active.empty() && active.top().first < v.begin) {
        const int32_t ended = active.top().second;
        active.pop();
        free[kind(ended)].push_back(offsets_[static_cast<size_t>(ended)]);
        live -= registers_[static_cast<size_t>(ended)].width / 4;
      }
      auto& pool = free[kind(r)];
      if (pool.empty()) {
        offsets_[static_cast<size_t>(r)] = used[kind(r)]++;
      } else {
        offsets_[static_cast<size_t>(r)] = pool.back();
        pool.pop_back();
      }
      active.push({v.end, r});
      live += registers_[static_cast<size_t>(r)].width / 4;
      code_->registers_needed = std::max(code_->registers_needed, live);
    }
    for (size_t r = 0; r < count(); ++r)  // constants, and registers that are never written
      if (offsets_[r] < 0) offsets_[r] = used[kind(static_cast<int32_t>(r))]++;
    lay_out(used);
  }

  size_t kind(int32_t r) const {
    const int width = registers_[static_cast<size_t>(r)].width;
    return width == 0 ? 0 : width == 4 ? 1 : width == 8 ? 2 : 3;
  }

  void lay_out(const int32_t* used) {
    constexpr int32_t kSizes[4] = {4, 4 * kLanes, 8 * kLanes, 16 * kLanes};
    int32_t begins[4], at = 0;
    for (int k = 0; k < 4; ++k) {
      begins[k] = at;
      at = (at + used[k] * kSizes[k] + 127) / 128 * 128;
    }
    code_->register_bytes = at;
    for (size_t r = 0; r < count(); ++r) {
      const size_t k = kind(static_cast<int32_t>(r));
      offsets_[r] = begins[k] + offsets_[r] * kSizes[k];
      if (!registers_[r].is_initial) continue;
      Initial initial = registers_[r].initial;
      initial.at = offsets_[r];
      code_->initials.push_back(initial);
    }
  }

  void rewrite() {
    const auto move = [&](int32_t& r) {
      if (r >= 0) r = offsets_[static_cast<size_t>(r)];
    };
    for (Op& op : ops_) {
      move(op.guard);
      if (!is_row(op)) continue;
      for (int32_t* r : {&op.d, &op.a, &op.b, &op.c, &op.e}) move(*r);
    }
    for (const auto& detail : code_->details)
      for (auto* list : {&detail->in, &detail->out, &detail->held})
        for (int32_t& r : *list) move(r);
  }

  Code* code_;
  std::vector<Op>& ops_;
  const std::vector<VirtualRegister>& registers_;
  int32_t always_;
  std::vector<BasicBlock> blocks_;
  std::vector<Held> held_in_;
  std::vector<RegisterSet> live_in_, live_out_, defined_in_;
  std::vector<Hold> kind_of_;
  RegisterSet products_;  // registers of wgmmas
  std::vector<Interval> intervals_;
  std::vector<int32_t> offsets_;
};

}  // namespace

void allocate_registers(Code* code, const std::vector<VirtualRegister>& registers, int32_t always) {
  Allocator(code, registers, always).run();
}

}  // namespace tandem::vgpu::machine
