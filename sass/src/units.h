// Which unit of a streaming multiprocessor executes an instruction, and at what rate.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "sass/src/sass.h"

namespace tandem::machine_code {

enum class Unit {
  mma,            // tensor core
  exponential,    // special functions, and conversions between floats and integers
  fma,            // multiply, add, their packed pairs; integer multiply-add
  alu,            // integers, logic, comparisons, selects, minima and maxima
  conversion,     // to narrower floats: on the ALU's path
  tensor_memory,  // between registers and tensor memory
  shared_memory,  // between registers and shared memory; shuffles
  memory,         // global and local memory, and what starts copies
  uniform,        // the path of what is the same in a warp, and the way to and from it
  control,        // branches, barriers, waits, votes, constants, special registers
};
inline constexpr size_t kUnits = 10;
std::string_view name_of(Unit unit);

// Unknown opcodes are control, and known() is false.
Unit unit_of(const Instruction& instruction);
bool known(const Instruction& instruction);

// Of one streaming multiprocessor, a clock.
struct Rates {
  std::string_view arch;     // "sm_90": the beginning of the architectures that it is for
  double issue = 4;          // warp instructions
  double exponentials = 16;  // and other lanes of that unit
  double fma = 128;          // lanes; packed pairs count twice
  double alu = 64;           // lanes
  double shared_bytes = 128;
  double tensor_bytes = 0;  // 0: there is no tensor memory
  double mma_columns = 2;   // of a product that is 32 bytes deep, with 64 rows or, in tensor memory, 128
};
const Rates* rates_of(std::string_view arch);  // or nothing

// Lanes, weighed by how long the unit takes for them, or bytes, that a warp's instruction costs its unit.
double lanes_of(const Instruction& instruction);  // exponential, fma, alu, conversion
double bytes_of(const Instruction& instruction);  // tensor_memory, shared_memory

// A product of the tensor core: HGMMA, UTCHMMA, ...
bool is_product(const Instruction& instruction);
bool in_tensor_memory(const Instruction& product);       // its sums are, else in registers
int columns_of(const Instruction& product);              // 128 of "HGMMA.64x128x16"; 0: UTCHMMA does not say
int depth_of(const Instruction& product);                // elements that are summed up; 32 bytes of each row
bool begins_sum(const Instruction& product);             // what was in the accumulator is dropped
bool left_in_shared_memory(const Instruction& product);  // else in registers or tensor memory
bool by_a_pair(const Instruction& product);              // of two blocks

}  // namespace tandem::machine_code
