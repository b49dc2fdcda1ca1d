// Constants and constant expressions: 8, 0xFF00U, -1, 4*8, 0f3F800000. Only the parser uses this header.
#pragma once

#include "vgpu/src/ptx/lexer.h"

namespace tandem::vgpu::ptx {

struct Constant {
  enum class Kind : uint8_t { signed_integer, unsigned_integer, f32, f64 };
  Kind kind = Kind::signed_integer;
  uint64_t bits = 0;  // f32: of a float; else of 64 bits

  bool is_real() const { return kind == Kind::f32 || kind == Kind::f64; }
};

// Returns true if the next token can begin a constant.
bool at_constant(const Lexer& lexer);
Constant read_constant(Lexer& lexer);
// Reads the next tokens "+4", "-4*2+1", ... if present: the offset of the address before them.
uint64_t read_offset(Lexer& lexer);
// Reads a number in [least, most]. `what` names the number in a refusal: "threads of a block".
int64_t read_count(Lexer& lexer, const char* what, int64_t least, int64_t most);

}  // namespace tandem::vgpu::ptx
