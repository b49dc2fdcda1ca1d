#include "vgpu/src/machine/run/execute.h"

#include <cstring>

namespace tandem::vgpu::machine {
namespace {

template <class T>
void merge(T* to, const T* from, uint32_t mask) {
  for (int i = 0; i < kLanes; ++i)
    if (mask >> i & 1) to[i] = from[i];
}

// Copies the lanes of mask of a row to their places.
void merge_row(std::byte* to, const std::byte* from, int width, uint32_t mask) {
  switch (width) {
    case 0: {
      uint32_t old, made;
      std::memcpy(&old, to, 4);
      std::memcpy(&made, from, 4);
      old = (old & ~mask) | (made & mask);
      std::memcpy(to, &old, 4);
      break;
    }
    case 4: merge(reinterpret_cast<uint32_t*>(to), reinterpret_cast<const uint32_t*>(from), mask); break;
    case 8: merge(reinterpret_cast<uint64_t*>(to), reinterpret_cast<const uint64_t*>(from), mask); break;
    default:
      for (int i = 0; i < kLanes; ++i)
        if (mask >> i & 1) std::memcpy(to + 16 * i, from + 16 * i, 16);
  }
}

inline const float* reals(const std::byte* r, int32_t at) { return reinterpret_cast<const float*>(r + at); }

// Records that an ordinary instruction has accessed registers of wgmmas. The next wgmma then needs a wgmma.fence.
void touch(Warp& warp, const Op& op) {
  const auto row = [&](int32_t at) {
    if (at >= 0) warp.touched[static_cast<size_t>(at) / (4 * kLanes)] = warp.fences;
  };
  if (op.action.shape != Shape::exec) {
    for (const int32_t at : {op.a, op.b, op.c, op.e}) row(at);
    if (op.width != 0) row(op.d);
    return;
  }
  for (const int32_t at : op.detail->in) row(at);
  for (const int32_t at : op.detail->out) row(at);
}

// Checks registers that may be unwritten, or that asynchronous operations read or write. True: the op is done.
[[gnu::always_inline]] inline bool watch(Context& context, Warp& warp, Fragment& fragment, const Op& op, int32_t pc) {
  if ((op.watch & Op::kUnwritten) != 0) {
    fragment.pc = pc;
    check_written(context, op);
  }
  if ((op.watch & Op::kHeld) != 0 && warp.holds) {
    if (op.is_copy && rename_held(context, op)) return true;
    check_held(context, op);
  }
  if ((op.watch & Op::kProduct) != 0 && context.mask != 0) touch(warp, op);
  return false;
}

// Continues after a branch that these lanes take.
[[gnu::always_inline]] inline void branch(Warp& warp, Fragment& fragment, const Op& op, uint32_t taken, int32_t* pc) {
  if (taken == fragment.mask) {
    *pc = op.d;
  } else if (taken == 0) {
    ++*pc;
  } else {
    fragment.pc = *pc;
    diverge(warp, fragment, taken, op.d, op.a);
    *pc = fragment.pc;
  }
}

template <bool kTraced>
Step execute_ops(Context& context, int64_t* budget) {
  Grid& grid = context.grid;
  Warp& warp = context.warp;
  Fragment& fragment = context.fragment;
  const Op* const ops = grid.code->ops.data();
  std::byte* const r = warp.registers;
  alignas(64) std::byte scratch[16 * kLanes];
  int32_t pc = fragment.pc;
  int64_t left = *budget;
  Step step = Step::next;
  while (left > 0) {
    const Op& op = ops[pc];
    const uint32_t m = fragment.mask & (*reinterpret_cast<const uint32_t*>(r + op.guard) ^ op.flip);
    if (kTraced && op.first && !fragment.tried) {
      grid.observer->executes(
          {context.block.cta, warp.index, op.action.shape == Shape::branch ? fragment.mask : m, op.source});
    }
    if (op.watch != 0) {
      context.mask = m;
      if (watch(context, warp, fragment, op, pc)) {
        ++pc, --left;
        continue;
      }
    }
    const bool whole = m == warp.alive;
    std::byte* const d = whole ? r + op.d : scratch;
    switch (op.action.shape) {
      case Shape::f1: op.action.f1(reals(r, op.a), reinterpret_cast<float*>(d)); break;
      case Shape::f2: op.action.f2(reals(r, op.a), reals(r, op.b), reinterpret_cast<float*>(d)); break;
      case Shape::f3: op.action.f3(reals(r, op.a), reals(r, op.b), reals(r, op.c), reinterpret_cast<float*>(d)); break;
      case Shape::r1: op.action.r1(r + op.a, d); break;
      case Shape::r2: op.action.r2(r + op.a, r + op.b, d); break;
      case Shape::r3: op.action.r3(r + op.a, r + op.b, r + op.c, d); break;
      case Shape::r4: op.action.r4(r + op.a, r + op.b, r + op.c, r + op.e, d); break;
      case Shape::rows: op.action.rows(op, r, d); break;
      case Shape::branch:
        --left;
        branch(warp, fragment, op, m, &pc);
        continue;
      case Shape::join:
        fragment.pc = pc;
        if (fragment.join >= 0 && !rejoin(warp, fragment, pc)) {
          step = Step::gone;
          goto out;
        }
        ++pc;
        continue;
      default:
        if (m == 0) {  // no lane executes the instruction
          ++pc, --left;
          continue;
        }
        context.mask = m;
        fragment.pc = pc;
        step = op.action.exec(context, op);
        if (step == Step::wait) goto out;
        fragment.tried = false;
        --left;
        if (step == Step::next) {
          ++pc;
          continue;
        }
        if (step == Step::jump) {
          pc = fragment.pc;
          step = Step::next;
          continue;
        }
        if (step == Step::yield) ++pc;
        goto out;
    }
    if (!whole) merge_row(r + op.d, scratch, op.width, m);
    ++pc, --left;
  }
out:
  if (step != Step::gone) fragment.pc = pc;
  *budget = left;
  return step;
}

}  // namespace

Step execute(Grid& grid, Warp& warp, Fragment& fragment, int64_t* budget) {
  Block& block = *warp.block;
  Context context{grid, *block.cluster, block, warp, fragment, 0};
  return grid.traced ? execute_ops<true>(context, budget) : execute_ops<false>(context, budget);
}

}  // namespace tandem::vgpu::machine
