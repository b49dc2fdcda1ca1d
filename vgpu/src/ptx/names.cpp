#include "vgpu/src/ptx/names.h"

#include <bit>
#include <cstring>
#include <string>

namespace tandem::vgpu::ptx {

NameTable::NameTable(size_t expected) : slots_(std::bit_ceil(2 * expected + 16), -1) {}

// Returns the position of the name, or the position where it must be inserted.
size_t NameTable::slot_of(std::string_view name) const {
  constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15;
  uint64_t hash = name.size();
  const auto mix = [&](uint64_t part) {
    hash = (hash ^ part) * kMultiplier;
    hash ^= hash >> 32;
  };
  size_t at = 0;
  uint64_t part = 0;
  for (; name.size() - at >= 8; at += 8) {
    std::memcpy(&part, name.data() + at, 8);
    mix(part);
  }
  for (part = 0; at < name.size(); ++at) part = part << 8 | static_cast<uint8_t>(name[at]);
  mix(part);
  size_t slot = hash & (slots_.size() - 1);
  while (slots_[slot] >= 0 && names_[slots_[slot]] != name) slot = (slot + 1) & (slots_.size() - 1);
  return slot;
}

NameId NameTable::find(std::string_view name) const { return slots_[slot_of(name)]; }

NameId NameTable::add(std::string_view name) {
  size_t slot = slot_of(name);
  if (slots_[slot] >= 0) return slots_[slot];
  if (2 * (names_.size() + 1) > slots_.size()) {
    grow();
    slot = slot_of(name);
  }
  names_.push_back(name);
  return slots_[slot] = static_cast<NameId>(names_.size() - 1);
}

void NameTable::grow() {
  slots_.assign(2 * slots_.size(), -1);
  for (size_t i = 0; i < names_.size(); ++i) slots_[slot_of(names_[i])] = static_cast<NameId>(i);
}

Names::Names(std::string_view text) : ids_(text.size() / 64) {  // about the number in compilers' output
  open();
}

NameId Names::id(std::string_view name) {
  const NameId known = ids_.add(name);
  if (entities_.size() < ids_.size()) {
    entities_.emplace_back();
    parameterized_by_prefix_.push_back(-1);
  }
  return known;
}

void Names::open() { scopes_.push_back({{}, parameterized_.size()}); }

void Names::close() {
  for (const Declared& d : scopes_.back().names) entities_[d.name] = d.before;
  for (; parameterized_.size() > scopes_.back().first_parameterized; parameterized_.pop_back()) {
    parameterized_by_prefix_[parameterized_.back().prefix] = parameterized_.back().outer;
  }
  scopes_.pop_back();
}

void Names::bind(NameId name, const Entity& entity) {
  scopes_[entity.depth].names.push_back({name, entities_[name]});
  entities_[name] = entity;
}

bool Names::declare(std::string_view name, Entity::Kind kind, int32_t index) {
  const NameId known = id(name);
  if (entities_[known].depth == depth() || find_parameterized(name, depth() - 1)) return false;
  bind(known, {kind, index, depth()});
  return true;
}

bool Names::declare_register(std::string_view name, Type type) {
  if (!declare(name, Entity::Kind::reg, static_cast<int32_t>(registers_->size()))) return false;
  registers_->push_back({std::string(name), type});
  return true;
}

bool Names::declare_registers(std::string_view prefix, Type type, int64_t count) {
  const NameId known = id(prefix);
  const int32_t outer = parameterized_by_prefix_[known];
  if (outer >= 0 && parameterized_[outer].depth == depth()) return false;
  parameterized_by_prefix_[known] = static_cast<int32_t>(parameterized_.size());
  parameterized_.push_back({known, type, count, depth(), outer});
  return true;
}

// The innermost family of the name in a scope deeper than this. %r12 may be the 13th of %r or the 3rd of %r1.
const Names::ParameterizedRegisters* Names::find_parameterized(std::string_view name, int32_t deeper_than) const {
  if (parameterized_.empty() || parameterized_.back().depth <= deeper_than) return nullptr;
  constexpr size_t kMaxDigits = 9;
  const ParameterizedRegisters* innermost = nullptr;
  int32_t innermost_depth = deeper_than;
  int64_t number = 0, unit = 1;
  for (size_t digits = 1; digits <= kMaxDigits && digits < name.size(); ++digits, unit *= 10) {
    const char digit = name[name.size() - digits];
    if (digit < '0' || digit > '9') break;
    number += (digit - '0') * unit;
    if (digit == '0' && digits > 1) continue;  // %r012 is none of %r
    const NameId prefix = ids_.find(name.substr(0, name.size() - digits));
    for (int32_t i = prefix < 0 ? -1 : parameterized_by_prefix_[prefix];
         i >= 0 && parameterized_[i].depth > innermost_depth; i = parameterized_[i].outer) {
      if (number >= parameterized_[i].count) continue;
      innermost = &parameterized_[i];
      innermost_depth = innermost->depth;
    }
  }
  return innermost;
}

Entity Names::find(std::string_view name) {
  const NameId known = id(name);
  const Entity entity = entities_[known];
  const ParameterizedRegisters* registers = find_parameterized(name, entity.depth);
  if (!registers) return entity;
  bind(known, {Entity::Kind::reg, static_cast<int32_t>(registers_->size()), registers->depth});
  registers_->push_back({std::string(name), registers->type});
  return entities_[known];
}

}  // namespace tandem::vgpu::ptx
