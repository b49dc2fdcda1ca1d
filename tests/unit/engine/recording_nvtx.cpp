// An NVTX tool for NVTX_INJECTION64_PATH. Each begin or end of a range is a line of the file TANDEM_TEST_NVTX: "push
// <domain>: <name>" or "pop <domain>". With TANDEM_TEST_NVTX=refuse the tool does not attach.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace {

// The struct of nvToolsExt.h, version 3.
struct Attributes {
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  uint64_t payload;
  int32_t message_type;
  const char* message;
};
using Function = void (*)();
struct Callbacks {
  size_t bytes;
  int (*module_table)(int module, Function*** table, unsigned* size);
};

std::mutex mutex;

void line(const char* what, const void* domain, const char* name) {
  const std::lock_guard lock(mutex);
  const char* path = std::getenv("TANDEM_TEST_NVTX");
  std::FILE* file = path != nullptr ? std::fopen(path, "a") : nullptr;
  if (file == nullptr) return;
  std::fprintf(file, "%s %s%s%s\n", what, static_cast<const char*>(domain), *name != '\0' ? ": " : "", name);
  std::fclose(file);
}

// A domain handle is the domain's name.
void* create(const char* name) { return strdup(name); }
int push(void* domain, const void* attributes) {
  const auto* a = static_cast<const Attributes*>(attributes);
  const bool known = a->version == 3 && a->size == sizeof(Attributes) && a->message_type == 1;
  line("push", domain, known ? a->message : "(no text)");
  return 0;
}
int pop(void* domain) { return line("pop", domain, ""), 0; }

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(const void* (*export_table)(uint32_t)) {
  constexpr int domains = 5;
  const char* path = std::getenv("TANDEM_TEST_NVTX");
  const auto* callbacks = static_cast<const Callbacks*>(export_table(1));
  Function** table = nullptr;
  unsigned size = 0;
  if (path == nullptr || std::strcmp(path, "refuse") == 0) return 0;
  if (callbacks == nullptr || callbacks->bytes < sizeof(Callbacks)) return 0;
  if (callbacks->module_table(domains, &table, &size) == 0 || size != 16 || table[size] != nullptr) return 0;
  *table[4] = reinterpret_cast<Function>(push);
  *table[5] = reinterpret_cast<Function>(pop);
  *table[12] = reinterpret_cast<Function>(create);
  return 1;
}
