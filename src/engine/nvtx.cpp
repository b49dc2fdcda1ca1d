#include "engine/nvtx.h"

#include <dlfcn.h>

#include <cstdint>
#include <iterator>

#include "base/env.h"

namespace tandem::nvtx {

struct Attributes {
  uint16_t version = 3, size = sizeof(Attributes);
  uint32_t category = 0;
  int32_t color_type = 0;
  uint32_t color = 0;
  int32_t payload_type = 0, reserved = 0;
  uint64_t payload = 0;
  int32_t message_type = 1;  // text in UTF-8
  const char* message = nullptr;
};
static_assert(sizeof(Attributes) == 48);

namespace {

// The handshake: for each module a tool requests a table of pointers to our function pointers and overwrites some of
// them. The tables have all functions of NVTX 3, because tools expect them, although Tandem uses few.
using Function = void (*)();
constexpr unsigned kSizes[] = {0, 16, 9, 15, 7, 16, 7};  // entries per module, including the unused slot 0
constexpr int kModules = static_cast<int>(std::size(kSizes)), kMaxSlots = 16;
constexpr int kDomains = 5;  // index of the module of domains
constexpr int kPush = 4, kPop = 5, kCreate = 12;

Function functions[kModules][kMaxSlots];
Function* slots[kModules][kMaxSlots + 1];  // ends with null

int module_table(int module, Function*** table, unsigned* size) {
  if (module < 1 || module >= kModules) return 0;
  if (table != nullptr) *table = slots[module];
  if (size != nullptr) *size = kSizes[module];
  return 1;
}

const void* export_table(uint32_t id) {
  static constexpr struct {
    size_t bytes;
    int (*module_table)(int, Function***, unsigned*);
  } callbacks{sizeof callbacks, module_table};
  static constexpr struct {
    size_t bytes;
    uint32_t version, reserved;
    void (*set_tool_version)(uint32_t);
  } version{sizeof version, 3, 0, [](uint32_t) {}};
  return id == 1 ? static_cast<const void*>(&callbacks) : id == 3 ? &version : nullptr;
}

template <class Signature>
Signature attached(int id) {
  return reinterpret_cast<Signature>(functions[kDomains][id]);
}

}  // namespace

Tool attach(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) return {};
  using Initialise = int (*)(const void* (*)(uint32_t));
  const auto initialise = reinterpret_cast<Initialise>(dlsym(handle, "InitializeInjectionNvtx2"));
  for (int module = 1; module < kModules; ++module) {
    for (unsigned id = 1; id < kSizes[module]; ++id) slots[module][id] = &functions[module][id];
  }
  if (initialise == nullptr || initialise(export_table) == 0) {
    dlclose(handle);
    return {};
  }
  const auto create = attached<void* (*)(const char*)>(kCreate);
  return {.domain = create != nullptr ? create("tandem") : nullptr,
          .push = attached<decltype(Tool::push)>(kPush),
          .pop = attached<decltype(Tool::pop)>(kPop)};
}

const Tool* tool() {
  static const Tool found = [] {
    const std::string& library = Env::get().nvtx;
    return library.empty() ? Tool{} : attach(library);
  }();
  return found.push != nullptr && found.pop != nullptr ? &found : nullptr;
}

void Range::push(const char* name) const {
  Attributes attributes;
  attributes.message = name;
  (void)tool_->push(tool_->domain, &attributes);
}

}  // namespace tandem::nvtx
