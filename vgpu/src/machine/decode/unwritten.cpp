#include "vgpu/src/machine/decode/unwritten.h"

#include <algorithm>
#include <string_view>

#include "vgpu/src/machine/decode/flow.h"
#include "vgpu/src/machine/decode/register_set.h"

namespace tandem::vgpu::machine {
namespace {

constexpr std::string_view kCarrying[] = {"mov", "selp", "prmt", "shfl"};

bool is_row(const Op& op) {
  return op.action.shape != Shape::branch && op.action.shape != Shape::exec && op.action.shape != Shape::join;
}

std::vector<int32_t> reads_of(const Op& op) {
  std::vector<int32_t> all;
  if (is_row(op)) {
    all = {op.a, op.b, op.c, op.e};
  } else if (op.detail != nullptr) {
    all = op.detail->in;
  }
  std::erase_if(all, [](int32_t r) { return r < 0; });
  return all;
}

std::vector<int32_t> writes_of(const Op& op) {
  std::vector<int32_t> all;
  if (is_row(op)) {
    all = {op.d};
  } else if (op.detail != nullptr) {
    all = op.detail->out;
  }
  std::erase_if(all, [](int32_t r) { return r < 0; });
  return all;
}

class Finder {
 public:
  Finder(Code* code, const std::vector<VirtualRegister>& registers, int32_t always)
      : code_(code),
        ops_(code->ops),
        registers_(registers),
        always_(always),
        blocks_(blocks_of(ops_, always)),
        in_(blocks_.size(), RegisterSet(registers.size())),
        found_(registers.size()),
        copies_(registers.size()) {}

  void run() {
    find_unwritten();
    each_op([&](int32_t, const Op& op, const RegisterSet& unwritten) {
      for (const int32_t r : reads_of(op))
        if (unwritten[r]) found_.set(r);
      if (unwritten[op.guard]) found_.set(op.guard);
    });
    add_copies();
    number();
    each_op([&](int32_t at, Op& op, const RegisterSet& unwritten) { note(at, op, unwritten); });
  }

 private:
  bool conditional(const Op& op) const { return op.guard != always_ || op.flip != 0; }
  const ptx::Instruction& source_of(const Op& op) const { return *code_->sources[static_cast<size_t>(op.source)]; }
  bool carries(const Op& op) const {
    return op.is_copy || std::ranges::find(kCarrying, source_of(op).opcode) != std::end(kCarrying);
  }

  // Updates the state from before an op to after it.
  void step(const Op& op, RegisterSet* unwritten) const {
    if (conditional(op)) return;
    for (const int32_t r : writes_of(op)) unwritten->clear(r);
  }
  // Calls f(number, op, registers that some path leaves unwritten).
  template <class F>
  void each_op(F f) {
    for (size_t n = 0; n < blocks_.size(); ++n) {
      RegisterSet unwritten = in_[n];
      for (int32_t i = blocks_[n].begin; i < blocks_[n].end; ++i) {
        Op& op = ops_[static_cast<size_t>(i)];
        f(i, op, unwritten);
        step(op, &unwritten);
      }
    }
  }

  void find_unwritten() {
    for (size_t r = 0; r < registers_.size(); ++r)
      if (!registers_[r].is_initial) in_[0].set(static_cast<int32_t>(r));
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t n = 0; n < blocks_.size(); ++n) {
        RegisterSet unwritten = in_[n];
        for (int32_t i = blocks_[n].begin; i < blocks_[n].end; ++i) step(ops_[static_cast<size_t>(i)], &unwritten);
        for (const int32_t next : blocks_[n].next) changed = in_[static_cast<size_t>(next)].add(unwritten) || changed;
      }
    }
  }

  // Adds registers whose only sources are such registers.
  void add_copies() {
    for (bool changed = true; changed;) {
      changed = false;
      each_op([&](int32_t, const Op& op, const RegisterSet& unwritten) {
        const std::vector<int32_t> reads = reads_of(op);
        const auto doubtful = [&](int32_t r) { return unwritten[r] || copies_[r]; };
        if (reads.empty() || !carries(op) || !std::ranges::all_of(reads, doubtful)) return;
        for (const int32_t r : writes_of(op)) {
          changed = changed || !copies_[r];
          copies_.set(r);
          found_.set(r);
        }
      });
    }
  }

  void number() {
    numbers_.assign(registers_.size(), -1);
    const auto& names = code_->function->registers;
    found_.each([&](int32_t r) {
      numbers_[static_cast<size_t>(r)] = static_cast<int32_t>(code_->may_be_unwritten.size());
      const auto at = static_cast<size_t>(r);
      code_->may_be_unwritten.push_back(at < names.size() ? names[at].name : "of a called function");
    });
  }

  // If all paths have written a register, its reads and writes need no check.
  void note(int32_t at, Op& op, const RegisterSet& unwritten) {
    RegisterUse use;
    const auto number_of = [&](int32_t r) {
      return unwritten[r] || copies_[r] ? numbers_[static_cast<size_t>(r)] : -1;
    };
    use.guard = number_of(op.guard);
    use.carries = carries(op);
    const std::vector<int32_t> reads = reads_of(op), writes = writes_of(op);
    const std::string& opcode = source_of(op).opcode;
    const bool stores = !is_row(op) && writes.empty() && (opcode == "st" || opcode == "tcgen05");
    const bool some_value =
        stores && std::any_of(reads.begin() + !reads.empty(), reads.end(), [&](int32_t r) { return number_of(r) < 0; });
    for (size_t n = 0; n < reads.size(); ++n) {
      const int32_t number = number_of(reads[n]);
      if (number < 0) {
        use.partly = true;
      } else if (op.detail != nullptr && op.detail->adds_if >= 0 &&
                 std::ranges::find(writes, reads[n]) != writes.end()) {
        use.sums.push_back(number);
      } else if (n == 0 || !some_value) {
        use.reads.push_back(number);
      }
    }
    for (const int32_t r : writes)
      if (number_of(r) >= 0) use.writes.push_back(number_of(r));
    if (use.guard < 0 && use.reads.empty() && use.sums.empty() && use.writes.empty()) return;
    op.watch |= Op::kUnwritten;
    code_->uses.emplace(at, std::move(use));
  }

  Code* code_;
  std::vector<Op>& ops_;
  const std::vector<VirtualRegister>& registers_;
  int32_t always_;
  std::vector<BasicBlock> blocks_;
  std::vector<RegisterSet> in_;   // by block: registers that some path there leaves unwritten
  RegisterSet found_, copies_;    // registers that are read; registers written by copies of them
  std::vector<int32_t> numbers_;  // by register; -1: always written
};

}  // namespace

void find_unwritten(Code* code, const std::vector<VirtualRegister>& registers, int32_t always) {
  Finder(code, registers, always).run();
}

}  // namespace tandem::vgpu::machine
