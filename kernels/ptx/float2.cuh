// Two floats per instruction (PTX ISA "fma", "add", "mul" with .f32x2; Blackwell). Such an instruction halves the
// number of instructions, but not the time of the FMA units.
#pragma once
#include "ptx/base.cuh"

struct Float2 {
  u64 bits;
};

TANDEM_DEVICE Float2 float2_of(float low, float high) {
  Float2 p;
  asm("mov.b64 %0, {%1, %2};" : "=l"(p.bits) : "f"(low), "f"(high));
  return p;
}
TANDEM_DEVICE Float2 float2_of(float both) { return float2_of(both, both); }
TANDEM_DEVICE void split(Float2 p, float* low, float* high) {
  asm("mov.b64 {%0, %1}, %2;" : "=f"(*low), "=f"(*high) : "l"(p.bits));
}

TANDEM_DEVICE Float2 fma(Float2 a, Float2 b, Float2 c) {
  Float2 d;
  asm("fma.rn.ftz.f32x2 %0, %1, %2, %3;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits), "l"(c.bits));
  return d;
}
// fma rounded towards -infinity.
TANDEM_DEVICE Float2 fma_down(Float2 a, Float2 b, Float2 c) {
  Float2 d;
  asm("fma.rm.ftz.f32x2 %0, %1, %2, %3;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits), "l"(c.bits));
  return d;
}
TANDEM_DEVICE Float2 operator+(Float2 a, Float2 b) {
  Float2 d;
  asm("add.rn.ftz.f32x2 %0, %1, %2;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits));
  return d;
}
TANDEM_DEVICE Float2 operator-(Float2 a, Float2 b) {
  Float2 d;
  asm("sub.rn.ftz.f32x2 %0, %1, %2;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits));
  return d;
}
TANDEM_DEVICE Float2 operator*(Float2 a, Float2 b) {
  Float2 d;
  asm("mul.rn.ftz.f32x2 %0, %1, %2;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits));
  return d;
}
