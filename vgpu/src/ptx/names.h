// The meaning of a name in the scope that reads it. Only the parser uses this header.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "vgpu/src/ptx/module.h"

namespace tandem::vgpu::ptx {

// A name, numbered in order of first appearance.
using NameId = int32_t;

struct Entity {
  enum class Kind : uint8_t { none, reg, symbol, function, branch_targets, call_targets, prototype };
  Kind kind = Kind::none;
  int32_t index = -1;  // index of a register, symbol, function or list of targets
  int32_t depth = -1;  // depth of the name's scope
};

// All names of a text.
class NameTable {
 public:
  explicit NameTable(size_t expected);
  NameId add(std::string_view name);
  NameId find(std::string_view name) const;  // -1: absent
  size_t size() const { return names_.size(); }

 private:
  size_t slot_of(std::string_view name) const;
  void grow();

  std::vector<NameId> slots_;  // -1: free. At least half of the places are free
  std::vector<std::string_view> names_;
};

// Nested scopes: the module, a function's parameters, its body, { } blocks. `.reg .b32 %r<100>` declares a hundred
// names. Only used names are stored and numbered.
class Names {
 public:
  explicit Names(std::string_view text);

  NameId id(std::string_view name);

  void open();
  void close();
  int32_t depth() const { return static_cast<int32_t>(scopes_.size()) - 1; }

  // Declares a name in the innermost scope. Returns false if the scope has a declaration of that name.
  bool declare(std::string_view name, Entity::Kind kind, int32_t index);
  bool declare_register(std::string_view name, Type type);
  bool declare_registers(std::string_view prefix, Type type, int64_t count);

  // Registers found from here on are numbered in this list.
  void number_registers(std::vector<RegisterName>* registers) { registers_ = registers; }
  Entity find(std::string_view name);

 private:
  // Registers prefix0, prefix1, ...: PTX ISA, "Parameterized Variable Names".
  struct ParameterizedRegisters {
    NameId prefix = -1;
    Type type = Type::none;
    int64_t count = 0;
    int32_t depth = -1;
    int32_t outer = -1;  // registers of the same prefix that these partly hide
  };
  struct Declared {  // restored when the scope closes
    NameId name = -1;
    Entity before;
  };
  struct NameScope {
    std::vector<Declared> names;
    size_t first_parameterized = 0;
  };

  void bind(NameId name, const Entity& entity);
  const ParameterizedRegisters* find_parameterized(std::string_view name, int32_t deeper_than) const;

  NameTable ids_;
  std::vector<Entity> entities_;                       // by NameId: the entity that the name denotes now
  std::vector<int32_t> parameterized_by_prefix_;       // by NameId of the prefix: the innermost, or -1
  std::vector<ParameterizedRegisters> parameterized_;  // all open scopes, the innermost last
  std::vector<NameScope> scopes_;
  std::vector<RegisterName>* registers_ = nullptr;
};

}  // namespace tandem::vgpu::ptx
