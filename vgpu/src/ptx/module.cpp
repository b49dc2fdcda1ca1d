#include "vgpu/src/ptx/module.h"

#include <algorithm>
#include <iterator>

namespace tandem::vgpu::ptx {
namespace {

struct TypeFacts {
  Type type;
  int bits;
  const char* name;
};

// The order of Type.
constexpr TypeFacts kTypes[] = {
    {Type::none, 0, ""},           {Type::pred, 1, "pred"},      {Type::b8, 8, "b8"},
    {Type::b16, 16, "b16"},        {Type::b32, 32, "b32"},       {Type::b64, 64, "b64"},
    {Type::b128, 128, "b128"},     {Type::u8, 8, "u8"},          {Type::u16, 16, "u16"},
    {Type::u32, 32, "u32"},        {Type::u64, 64, "u64"},       {Type::s8, 8, "s8"},
    {Type::s16, 16, "s16"},        {Type::s32, 32, "s32"},       {Type::s64, 64, "s64"},
    {Type::f16, 16, "f16"},        {Type::bf16, 16, "bf16"},     {Type::f16x2, 32, "f16x2"},
    {Type::bf16x2, 32, "bf16x2"},  {Type::f32, 32, "f32"},       {Type::f32x2, 64, "f32x2"},
    {Type::f64, 64, "f64"},        {Type::tf32, 32, "tf32"},     {Type::e4m3, 8, "e4m3"},
    {Type::e5m2, 8, "e5m2"},       {Type::e4m3x2, 16, "e4m3x2"}, {Type::e5m2x2, 16, "e5m2x2"},
    {Type::e2m3x2, 16, "e2m3x2"},  {Type::e3m2x2, 16, "e3m2x2"}, {Type::e2m1x2, 8, "e2m1x2"},
    {Type::ue8m0x2, 16, "ue8m0x2"}};

constexpr bool in_order() {
  for (size_t i = 0; i < std::size(kTypes); ++i) {
    if (kTypes[i].type != static_cast<Type>(i)) return false;
  }
  return true;
}
static_assert(in_order());

}  // namespace

int bits_of(Type type) { return kTypes[static_cast<size_t>(type)].bits; }

const char* name_of(Type type) { return kTypes[static_cast<size_t>(type)].name; }

Type type_named(std::string_view name) {
  for (const TypeFacts& facts : kTypes) {
    if (name == facts.name) return facts.type;
  }
  return Type::none;
}

bool Instruction::has(std::string_view modifier) const {
  return std::find(modifiers.begin(), modifiers.end(), modifier) != modifiers.end();
}

std::string Instruction::full_name() const {
  std::string name = opcode;
  for (const std::string& modifier : modifiers) name.append(".").append(modifier);
  return name;
}

int64_t Symbol::bytes() const { return elements * bits_of(type) / 8; }

const Function* Module::find(std::string_view name) const {
  const auto found =
      std::find_if(functions.begin(), functions.end(), [&](const Function& f) { return f.name == name; });
  return found == functions.end() ? nullptr : &*found;
}

}  // namespace tandem::vgpu::ptx
