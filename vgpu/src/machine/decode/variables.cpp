// Global and constant variables: one memory per module, shared by its kernels. The last kernel frees it.
#include <cstring>
#include <map>
#include <mutex>

#include "vgpu/src/machine/code.h"

namespace tandem::vgpu::machine {

std::shared_ptr<ModuleMemory> memory_of(const std::shared_ptr<const ptx::Module>& module) {
  static std::mutex mutex;
  static std::map<const ptx::Module*, std::weak_ptr<ModuleMemory>> all;
  const std::lock_guard lock(mutex);
  if (auto known = all[module.get()].lock()) return known;
  std::erase_if(all, [&](const auto& entry) { return entry.second.expired() && entry.first != module.get(); });

  constexpr size_t kAlignment = 256;
  auto made = std::make_shared<ModuleMemory>();
  made->module = module;
  std::vector<size_t> offsets;
  size_t bytes = 0;
  for (const ptx::Symbol& v : module->variables) {
    const size_t alignment = std::max<size_t>(static_cast<size_t>(v.alignment), 1);
    bytes = (bytes + alignment - 1) / alignment * alignment;
    offsets.push_back(bytes);
    if (v.space == ptx::Space::global || v.space == ptx::Space::constant) bytes += static_cast<size_t>(v.bytes());
  }
  made->size = bytes + kAlignment;
  made->bytes = std::make_unique<std::byte[]>(made->size);
  const auto begin = reinterpret_cast<uintptr_t>(made->bytes.get());
  std::byte* const base = made->bytes.get() + ((begin + kAlignment - 1) / kAlignment * kAlignment - begin);
  for (size_t i = 0; i < offsets.size(); ++i) {
    const ptx::Symbol& v = module->variables[i];
    const bool here = v.space == ptx::Space::global || v.space == ptx::Space::constant;
    made->address.push_back(here ? base + offsets[i] : nullptr);
    if (here && !v.initial.empty()) std::memcpy(base + offsets[i], v.initial.data(), v.initial.size());
  }
  for (size_t i = 0; i < offsets.size(); ++i)
    for (const ptx::AddressValue& value : module->variables[i].addresses) {
      const auto of = static_cast<size_t>(value.variable);
      const uint64_t address = reinterpret_cast<uintptr_t>(made->address[of]) + value.offset;
      std::memcpy(base + offsets[i] + value.at, &address, sizeof address);
    }
  all[module.get()] = made;
  return made;
}

}  // namespace tandem::vgpu::machine
