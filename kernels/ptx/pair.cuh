// Two floats in one instruction (PTX ISA "fma", "add", "mul" of .f32x2; Blackwell). Half the instructions; the FMA
// units take as long.
#pragma once
#include "ptx/base.cuh"

struct Pair {
  u64 bits;
};

TANDEM_DEVICE Pair pair_of(float low, float high) {
  Pair p;
  asm("mov.b64 %0, {%1, %2};" : "=l"(p.bits) : "f"(low), "f"(high));
  return p;
}
TANDEM_DEVICE Pair pair_of(float both) { return pair_of(both, both); }
TANDEM_DEVICE void split(Pair p, float* low, float* high) {
  asm("mov.b64 {%0, %1}, %2;" : "=f"(*low), "=f"(*high) : "l"(p.bits));
}

TANDEM_DEVICE Pair fma(Pair a, Pair b, Pair c) {
  Pair d;
  asm("fma.rn.ftz.f32x2 %0, %1, %2, %3;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits), "l"(c.bits));
  return d;
}
// Rounded towards -infinity.
TANDEM_DEVICE Pair fma_down(Pair a, Pair b, Pair c) {
  Pair d;
  asm("fma.rm.ftz.f32x2 %0, %1, %2, %3;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits), "l"(c.bits));
  return d;
}
TANDEM_DEVICE Pair operator+(Pair a, Pair b) {
  Pair d;
  asm("add.rn.ftz.f32x2 %0, %1, %2;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits));
  return d;
}
TANDEM_DEVICE Pair operator-(Pair a, Pair b) {
  Pair d;
  asm("sub.rn.ftz.f32x2 %0, %1, %2;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits));
  return d;
}
TANDEM_DEVICE Pair operator*(Pair a, Pair b) {
  Pair d;
  asm("mul.rn.ftz.f32x2 %0, %1, %2;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits));
  return d;
}
