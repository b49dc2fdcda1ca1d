// Decoded PTX instructions. An op fills a cache line; the dispatch loop executes ops in order.
//
// A warp's registers are one block of memory, and an operand is a byte offset into it. A register is a row of 32 lanes
// of 4, 8 or 16 bytes; the rest of a narrower value is zero. A predicate is a word, one bit per lane. Constants and
// special registers are also rows, filled in when the block begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tandem::vgpu::machine {

inline constexpr int kLanes = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

struct Op;
struct Context;

// The next state of the fragment that executed an op.
enum class Step : uint8_t {
  next,   // continues with the next op
  jump,   // continues at another op: its pc has been set
  wait,   // tries the same op again later
  yield,  // continues with the next op after the other fragments' turn
  gone,   // has ended, or waits at a join
  end,    // the run is over
};

// Row functions access only their rows: F types are on float rows (units/numbers.h), R types on any rows.
using F1 = void (*)(const float*, float*);
using F2 = void (*)(const float*, const float*, float*);
using F3 = void (*)(const float*, const float*, const float*, float*);
using R1 = void (*)(const void*, void*);
using R2 = void (*)(const void*, const void*, void*);
using R3 = void (*)(const void*, const void*, const void*, void*);
using R4 = void (*)(const void*, const void*, const void*, const void*, void*);
using RowsOf = void (*)(const Op&, const std::byte* registers, void* d);
using Exec = Step (*)(Context&, const Op&);

enum class Shape : uint8_t { none, f1, f2, f3, r1, r2, r3, r4, rows, exec, branch, join };

// The operation of an op: a function of one of these types, or an operation of the dispatch loop.
struct Action {
  Shape shape = Shape::none;
  union {
    void (*none)() = nullptr;
    F1 f1;
    F2 f2;
    F3 f3;
    R1 r1;
    R2 r2;
    R3 r3;
    R4 r4;
    RowsOf rows;
    Exec exec;
  };

  constexpr Action() {}
  constexpr explicit Action(Shape s) : shape(s) {}
  constexpr Action(F1 f) : shape(Shape::f1), f1(f) {}
  constexpr Action(F2 f) : shape(Shape::f2), f2(f) {}
  constexpr Action(F3 f) : shape(Shape::f3), f3(f) {}
  constexpr Action(R1 f) : shape(Shape::r1), r1(f) {}
  constexpr Action(R2 f) : shape(Shape::r2), r2(f) {}
  constexpr Action(R3 f) : shape(Shape::r3), r3(f) {}
  constexpr Action(R4 f) : shape(Shape::r4), r4(f) {}
  constexpr Action(RowsOf f) : shape(Shape::rows), rows(f) {}
  constexpr Action(Exec f) : shape(Shape::exec), exec(f) {}
};

// Data of an exec or rows op beyond an Op. Derived types add more. An absent register is -1.
enum class Hold : uint8_t { none, mma, tmem_load };
struct Detail {
  virtual ~Detail() = default;
  std::vector<int32_t> in, out;
  // Registers that the operation uses after the op, until an op that releases them. Registers of products are held
  // after the next commit.
  std::vector<int32_t> held;
  Hold holds = Hold::none, releases = Hold::none;
  bool commits = false;
  // Ops that may follow instead of the next op, and whether the next op never follows.
  std::vector<int32_t> targets;
  bool ends = false;
  bool traps = false;  // the op ends the kernel
  // Index in `in` of a predicate. If the predicate is false, registers that are both in and out are only written. -1:
  // none.
  int32_t adds_if = -1;
  bool answers = false, ignored = false;  // out[0] is the result of a wait, which is unused
};

struct alignas(64) Op {
  Action action;
  const Detail* detail = nullptr;
  uint8_t width = 0;                               // width of d: bytes per lane, 0: a predicate
  bool first = true;                               // the first op of its PTX instruction
  bool is_copy = false;                            // copies one register, and so renames a pending one
  uint8_t watch = 0;                               // checks before execution: a sum of the bits below
  static constexpr uint8_t kHeld = 1;              // an operand may belong to an outstanding operation
  static constexpr uint8_t kProduct = 2;           // some operand is a register of wgmmas
  static constexpr uint8_t kUnwritten = 4;         // an operand may be an unwritten register: Code::uses
  uint32_t flip = 0;                               // ~0: executed where the guard is false
  int32_t guard = 0;                               // always present: the constant "true" for most ops
  int32_t d = -1, a = -1, b = -1, c = -1, e = -1;  // registers; a branch: d is its target, a its join
  int32_t source = 0;                              // index into Code::sources

  template <class T>
  const T& as() const {
    return static_cast<const T&>(*detail);
  }
};
static_assert(sizeof(Op) == 64);

}  // namespace tandem::vgpu::machine
