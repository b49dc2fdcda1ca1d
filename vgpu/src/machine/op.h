// What decoding makes of PTX instructions: ops of a cache line each, which the dispatch loop executes one after the
// other.
//
// A warp's registers are one block of memory, and an operand is a byte offset into it. A register is a row of 32 lanes
// of 4, 8 or 16 bytes (narrower ones: 4, the rest zero); a predicate is a word, one bit per lane. Constants and special
// registers are rows too, filled in when the block begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tandem::vgpu::machine {

inline constexpr int kLanes = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

struct Op;
struct Context;

// What becomes of the fragment that executed an op.
enum class Step : uint8_t {
  next,   // goes on behind it
  jump,   // goes on elsewhere: its pc has been set
  wait,   // tries the same op again later
  yield,  // goes on behind it after the others have had a turn
  gone,   // is no more, or waits at a join
  end,    // the run is over
};

// Row functions know nothing but their rows: f of float rows (units/numbers.h), r of any.
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

// What an op does: a function of one of these types, or something that the dispatch loop does itself.
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

// What an exec or rows op needs beyond an Op: derived types have the rest. A register that is not there is -1.
enum class Hold : uint8_t { none, mma, tmem_load };
struct Detail {
  virtual ~Detail() = default;
  std::vector<int32_t> in, out;
  // Registers that the operation goes on using when the op is done, until an op that releases them; those of products
  // only once an op in between has committed them.
  std::vector<int32_t> held;
  Hold holds = Hold::none, releases = Hold::none;
  bool commits = false;
  // Ops that it may go on with, other than the next one; and whether it never goes on with that.
  std::vector<int32_t> targets;
  bool ends = false;
  bool traps = false;  // it ends the kernel
  // Index in `in` of a predicate: where it is false, registers that are both in and out are only written. -1: none.
  int32_t adds_if = -1;
  bool answers = false, ignored = false;  // out[0] says whether a wait is over; but nobody reads it
};

struct alignas(64) Op {
  Action action;
  const Detail* detail = nullptr;
  uint8_t width = 0;                        // of d: bytes per lane, 0: a predicate
  bool first = true;                        // of the ops of its PTX instruction
  bool is_copy = false;                     // of one register, which renames a pending one
  uint8_t watch = 0;                        // what is to be looked at before it is executed: bits of the following
  static constexpr uint8_t kHeld = 1;       // an operand may belong to a product or tensor memory load under way
  static constexpr uint8_t kProduct = 2;    // some operand is a register of wgmmas
  static constexpr uint8_t kUnwritten = 4;  // some operand may be a register that nobody has written: Code::uses
  uint32_t flip = 0;                        // ~0: executed where the guard is false
  int32_t guard = 0;                        // always there: the constant "true" for most
  int32_t d = -1, a = -1, b = -1, c = -1, e = -1;  // row functions; a branch: d is its target, a where its lanes rejoin
  int32_t source = 0;                              // of Code::sources

  template <class T>
  const T& as() const {
    return static_cast<const T&>(*detail);
  }
};
static_assert(sizeof(Op) == 64);

}  // namespace tandem::vgpu::machine
