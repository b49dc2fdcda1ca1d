// The unit of an SM that executes an instruction, and the rate of that unit.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "sass/src/sass.h"

namespace tandem::machine_code {

enum class Unit {
  mma,            // tensor core
  exponential,    // special functions, conversions between float and integer
  fma,            // multiply, add, their packed pairs; integer multiply-add
  alu,            // integers, logic, comparisons, selects, minima and maxima
  conversion,     // to narrower floats, on the ALU's path
  tensor_memory,  // between registers and tensor memory
  shared_memory,  // between registers and shared memory; shuffles
  memory,         // global and local memory, start of copies
  uniform,        // warp-uniform path, and moves to and from it
  control,        // branches, barriers, votes, constants, special registers
};
inline constexpr size_t kUnits = 10;
std::string_view name_of(Unit unit);

// An unknown opcode counts as control, and known() returns false for it.
Unit unit_of(const Instruction& instruction);
bool known(const Instruction& instruction);

// Rates of one SM per clock.
struct Rates {
  std::string_view arch;     // prefix of the architectures that have these rates
  double issue = 4;          // warp instructions
  double exponentials = 16;  // lanes of the unit for exponentials and other functions
  double fma = 128;          // lanes; packed pairs count twice
  double alu = 64;           // lanes
  double shared_bytes = 128;
  double tensor_bytes = 0;  // 0: no tensor memory
  double mma_columns = 2;   // per product: 32 bytes deep, 64 rows (tensor memory: 128)
};
const Rates* rates_of(std::string_view arch);  // null if unknown

// The lanes, weighted by the time that the unit takes for them, or the bytes of a warp's instruction.
double lanes_of(const Instruction& instruction);  // exponential, fma, alu, conversion
double bytes_of(const Instruction& instruction);  // tensor_memory, shared_memory

// A bulk copy or addition to global memory.
bool is_bulk_store(const Instruction& instruction);
bool writes_global(const Instruction& instruction);  // bulk stores, stores and atomics

// A product of the tensor core: HGMMA, UTCHMMA, ...
bool is_product(const Instruction& instruction);
bool in_tensor_memory(const Instruction& product);       // sums are in tensor memory, else in registers
int columns_of(const Instruction& product);              // 128 of "HGMMA.64x128x16"; 0: UTCHMMA does not encode it
int depth_of(const Instruction& product);                // summed elements: 32 bytes of each row
bool begins_sum(const Instruction& product);             // the product overwrites the accumulator
bool left_in_shared_memory(const Instruction& product);  // else in registers or tensor memory
bool by_a_pair(const Instruction& product);              // two blocks multiply together

}  // namespace tandem::machine_code
