// A PTX module in the form of its text: names are resolved, but nothing is interpreted. machine/ defines the meaning of
// instructions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::vgpu::ptx {

// The origin of an instruction: source file and line by .loc if present, and always the line of the PTX text.
struct Location {
  int32_t ptx_line = 0;
  int32_t file = -1;      // index of Module::files, -1 without .loc
  int32_t line = 0;       // line of the source; for inlined code the innermost line
  int32_t inlining = -1;  // index of Module::inlinings: the inlined call
};

// A call that the compiler replaced by the callee's code.
struct Inlining {
  std::string function;         // the callee, "Softmax::step"; "": unknown
  int32_t file = -1, line = 0;  // line of the call
  int32_t outer = -1;           // the call that the caller itself was inlined at
};

enum class Type : uint8_t {
  none,
  pred,
  b8,
  b16,
  b32,
  b64,
  b128,
  u8,
  u16,
  u32,
  u64,
  s8,
  s16,
  s32,
  s64,
  f16,
  bf16,
  f16x2,
  bf16x2,
  f32,
  f32x2,
  f64,
  tf32,
  e4m3,
  e5m2,
  e4m3x2,
  e5m2x2,
  e2m3x2,
  e3m2x2,
  e2m1x2,
  ue8m0x2,
};
int bits_of(Type type);                  // bits of a register that holds it; pred: 1
const char* name_of(Type type);          // "f16x2"
Type type_named(std::string_view name);  // none: no type has this name

enum class Space : uint8_t { generic, reg, param, local, shared, global, constant };

// An index of Function::registers. Registers of nested { } scopes have distinct indices.
using Register = int32_t;

struct Operand {
  enum class Kind : uint8_t {
    none,
    reg,       // reg; negated: !%p
    integer,   // bits: two's complement of 64 bits
    real,      // bits: of a double (0d) or, with is_f32, of a float (0f)
    special,   // special register, name in text: "%tid.x"
    symbol,    // a variable: index of Function::symbols; offset in bits
    label,     // target indexes Function::instructions; text: its name
    function,  // text: its name; for an alias, the aliased name
    vector,    // {a, b, ...}: parts
    pair,      // d|p: parts[0], parts[1]
    address,   // [base+offset]: parts[0] and bits; [base, x, y]: parts
    sink,      // _
    string,    // text: .pragma-like immediates, or a prototype
  };
  Kind kind = Kind::none;
  bool negated = false;
  bool is_f32 = false;
  Register reg = -1;
  int32_t symbol = -1;
  int32_t target = -1;
  uint64_t bits = 0;
  std::string text;
  std::vector<Operand> parts;
};

// "@!%p1 cp.async.bulk.tensor.4d.shared::cluster.global ...": opcode "cp", modifiers {"async", "bulk", "tensor", ...}
// in the order of the text, which is not fixed.
//
// Operands have the order of the text, except in two instructions:
//   call            {results}, callee, {arguments}: always these three, vectors with no parts where the text has none.
//                   callee is a function or, of an indirect call, a register; then a fourth: the prototype's name
//                   (string) or the functions it may be (vector of .calltargets)
//   brx.idx         index, {labels}: those of the .branchtargets
struct Instruction {
  std::string opcode;
  std::vector<std::string> modifiers;
  Register guard = -1;
  bool guard_negated = false;
  std::vector<Operand> operands;
  Location location;

  bool has(std::string_view modifier) const;
  std::string full_name() const;  // "cp.async.bulk.tensor.4d..."
};

struct RegisterName {
  std::string name;  // as in the text, "%f12"
  Type type = Type::none;
};

// An initial value of 64 bits that is an address: an offset in bytes from the beginning of a variable.
struct AddressValue {
  int64_t at = 0;  // position in the variable that has this value
  int32_t variable = -1;
  uint64_t offset = 0;
};

// A variable: of the module, of a function, or a parameter.
struct Symbol {
  std::string name;
  Space space = Space::generic;
  Type type = Type::none;  // type of an element
  int64_t elements = 1;    // 0: "extern .shared .b8 smem[]", dynamic shared memory
  int32_t alignment = 0;   // in bytes, never 0 in what parse() returns
  bool is_extern = false;
  std::vector<std::byte> initial;       // the first bytes; the rest is zero or unspecified
  std::vector<AddressValue> addresses;  // addresses among the values; the bytes there are zero
  int64_t bytes() const;
};

struct Function {
  std::string name;
  bool is_entry = false;
  bool has_body = false;            // false: only declared (vprintf); no instructions
  std::vector<Symbol> symbols;      // variables: of the module, parameters, the function's own
  std::vector<int32_t> parameters;  // indices of symbols, in order; results of a .func: results
  std::vector<int32_t> results;
  std::vector<RegisterName> registers;  // registers in use, in order of their first appearance
  std::vector<Instruction> instructions;

  // Performance and launch directives; 0: absent.
  int32_t max_threads[3] = {0, 0, 0}, required_threads[3] = {0, 0, 0}, required_cluster[3] = {0, 0, 0};
  int32_t max_registers = 0, min_ctas = 0, max_cluster_rank = 0;
  bool explicit_cluster = false;
  bool blocks_are_clusters = false;  // the grid of a launch counts clusters
};

struct Module {
  int version_major = 0, version_minor = 0;
  std::string target;  // "sm_90a"
  std::vector<std::string> files;
  std::vector<Inlining> inlinings;
  std::vector<Symbol> variables;
  std::vector<Function> functions;

  const Function* find(std::string_view name) const;
};

}  // namespace tandem::vgpu::ptx
