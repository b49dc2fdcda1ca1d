// Common code of the decoders of all instruction families: it converts operands to virtual registers and appends ops.
#pragma once

#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/text.h"
#include "vgpu/src/machine/code.h"
#include "vgpu/src/machine/op.h"
#include "vgpu/src/ptx/module.h"

namespace tandem::vgpu::machine {

// The modifiers of an instruction, consumed one by one. The modifiers' order is not fixed, and none may remain.
class Modifiers {
 public:
  explicit Modifiers(const ptx::Instruction& instruction)
      : words_(instruction.modifiers), used_(words_.size(), false) {}
  bool take(std::string_view word);
  // Returns the first of these words that is present, or an empty string.
  std::string take_of(std::initializer_list<std::string_view> words);
  // Returns the first remaining word with this prefix, or an empty string.
  std::string take_prefix(std::string_view prefix);
  // Returns the first remaining word that names a type.
  ptx::Type take_type();
  std::string take_first();  // the first remaining word, of any kind
  std::string left() const;  // ".a.b", or empty

 private:
  const std::vector<std::string>& words_;
  std::vector<bool> used_;
};

// The width of a type in a register file: 4, 8 or 16 bytes; predicates 0.
int width_of(ptx::Type type);
bool is_signed(ptx::Type type);
bool is_integer(ptx::Type type);           // u, s and b types
std::string integer_name(ptx::Type type);  // "u32" for b32

struct VirtualRegister {
  int width = 4;
  bool is_initial = false;
  Initial initial;
};

// The place of a symbol in a function that is being decoded.
struct OperandPlace {
  ptx::Space space = ptx::Space::generic;  // shared, local, param: offset; else address
  uint64_t at = 0;
  bool in_register = false;  // a parameter of a .func that is declared .reg: reg
  int32_t reg = -1;
};

// A function that is being decoded: the kernel itself, or a callee at one of its call sites.
struct Frame {
  const ptx::Function* function = nullptr;
  int32_t registers = 0;  // virtual register of the function's register 0
  std::vector<OperandPlace> places;
  std::vector<int32_t> starts;                                   // by instruction: the first op
  std::vector<std::pair<int32_t, int32_t>> branches;             // op, target instruction
  std::vector<int32_t> returns;                                  // ops that jump to the op after the call
  std::vector<std::pair<Detail*, std::vector<int32_t>>> tables;  // target instructions of brx.idx
  Frame* caller = nullptr;
  std::vector<bool> constants;  // registers of one immediate value; empty: unknown yet
};

class Builder {
 public:
  Builder(Code* code, const Model& model) : code_(code), model_(model) {}

  Status refuse(const ptx::Instruction& i, const std::string& why) const;
  Status unknown(const ptx::Instruction& i, const Modifiers& words) const;  // for modifiers left over

  // Operands of an instruction. width: bytes per lane that the op reads. On failure the returned register is -1, and
  // failure() has the reason.
  int32_t source(const ptx::Operand& operand, ptx::Type type);
  int32_t destination(const ptx::Operand& operand, ptx::Type type);  // a sink: a register that is never read
  // Decodes [register + offset], [symbol + offset] or [number]: the register (or a constant) of 8 or 4 bytes, and the
  // offset.
  int32_t address(const ptx::Operand& operand, int64_t* offset, int width = 0);
  int32_t predicate(const ptx::Operand& operand) { return source(operand, ptx::Type::pred); }
  bool failed() const { return !failure_.empty(); }
  Status fail(const ptx::Instruction& i);
  int width(int32_t reg) const { return registers_[static_cast<size_t>(reg)].width; }

  int32_t new_register(int width);
  int32_t constant(int width, uint64_t value);
  int32_t special(Special special, int width);
  int32_t always() { return constant(0, 1); }

  // Appends an op under the instruction's guard.
  Op& emit(Action action, int32_t d, std::initializer_list<int32_t> sources = {});
  Op& emit(Exec exec, std::unique_ptr<Detail> detail);
  // Looks up a form in lanes/ by name. False: no such form.
  bool emit_lanes(const std::string& name, int32_t d, std::initializer_list<int32_t> sources);
  void copy(int32_t d, int32_t a);  // the same width

  // The destination of a value of type t, kept in a register that may be wider: the value is extended as by cvt and ld.
  int32_t narrow_destination(const ptx::Operand& operand, ptx::Type type, int32_t* wide);
  void widen(int32_t wide, int32_t narrow, ptx::Type type);

  // Symbols.
  const OperandPlace& place(int32_t symbol) const { return frame_->places[static_cast<size_t>(symbol)]; }
  int64_t local_space(int64_t bytes, int64_t alignment);

  Code& code() { return *code_; }
  const Model& model() const { return model_; }
  Frame* frame() { return frame_; }
  Frame* enter(Frame* frame) { return std::exchange(frame_, frame); }
  std::vector<VirtualRegister>& registers() { return registers_; }
  void begin(const ptx::Instruction& i, int32_t source);
  int32_t position() const { return static_cast<int32_t>(code_->ops.size()); }
  bool is_constant(const ptx::Operand& operand);  // an immediate value, or a register that only one is moved to
  int32_t carry();                                // the extended-precision carry: 0 or 1

 private:
  int32_t of_register(const ptx::Operand& operand, int width);
  int32_t of_symbol(const ptx::Operand& operand, int width);
  int32_t failing(std::string why) {
    if (failure_.empty()) failure_ = std::move(why);
    return -1;
  }

  Code* code_;
  const Model& model_;
  Frame* frame_ = nullptr;
  std::vector<VirtualRegister> registers_;
  std::map<std::tuple<int, int, uint64_t>, int32_t> initials_;
  std::string failure_;
  int32_t guard_ = -1, source_ = 0, carry_ = -1, wide_bits_ = 0;
  bool guard_negated_ = false, first_ = true;
};

// The decoder of one PTX opcode.
using Decoder = Status (*)(Builder&, const ptx::Instruction&);
struct Family {
  const char* opcode;
  Decoder decode;
};
std::span<const Family> arithmetic_families();
std::span<const Family> real_families();
std::span<const Family> move_families();
std::span<const Family> memory_families();
std::span<const Family> control_families();
std::span<const Family> warp_families();
std::span<const Family> barrier_families();
std::span<const Family> bulk_families();
std::span<const Family> matrix_families();
std::span<const Family> tcgen05_families();
std::vector<std::span<const Family>> all_families();

}  // namespace tandem::vgpu::machine
