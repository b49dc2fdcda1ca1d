// State that the parts of the parser share. Only the parser uses this header.
#pragma once

#include "vgpu/src/ptx/constant.h"
#include "vgpu/src/ptx/labels.h"
#include "vgpu/src/ptx/lexer.h"
#include "vgpu/src/ptx/module.h"
#include "vgpu/src/ptx/names.h"

namespace tandem::vgpu::ptx {

// A limit of the memory that short texts may define ("[100000000] = {{1}, {2}}").
class Budget {
 public:
  explicit Budget(size_t text_bytes) : left_((int64_t{64} << 20) + 64 * static_cast<int64_t>(text_bytes)) {}

  void spend(int32_t line, int64_t bytes, const char* what) {
    left_ -= bytes;
    if (left_ < 0)
      unsupported(line, std::string(what) + " need far more memory than the text itself: split the module");
  }

 private:
  int64_t left_;
};

struct Reading {
  explicit Reading(std::string_view text) : lexer(text), names(text), budget(text.size()) {}

  Lexer lexer;
  Names names;
  Labels labels;
  Budget budget;
};

// Reads "[%rd1+16]", "{%r1, %r2}", "%p1|%p2", "0f3F800000". Names are resolved in the current scope.
Operand read_operand(Reading& reading);

// The variables of one declaration: ".global .align 16 .f32", followed by names with their sizes and initial values.
struct VariableType {
  Space space = Space::generic;
  Type type = Type::none;
  int32_t vector = 1;  // elements: .v2, .v4
  int32_t alignment = 0;
};
// The space of the dotted word "global"; generic: the word names no space of variables.
Space variable_space(std::string_view dotted);
VariableType read_variable_type(Reading& reading, Space space);
struct Variable {
  Token name;
  Symbol symbol;
};
Variable read_variable(Reading& reading, const VariableType& type, bool is_extern);
// Reads ".reg .b32 %r<10>, x;".
void read_registers(Reading& reading);

// A function's body, "{ ... }". function has its name and parameters; its symbols are numbered from first_symbol on.
// Location::file is the number that .file and .loc have.
void read_body(Reading& reading, int32_t first_symbol, Function* function);

}  // namespace tandem::vgpu::ptx
