// The virtual GPU's library: search, refusals, and use only through its exports. A process keeps a loaded library, so
// that the refusals come first.
#include "gpu/virtual.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "gpu/virtual_library.h"

namespace tandem::test {
namespace {

Status open_from(const char* library, const char* name, std::unique_ptr<gpu::Device>* device) {
  if (library == nullptr) {
    unsetenv("TANDEM_VGPU_LIBRARY");
  } else {
    setenv("TANDEM_VGPU_LIBRARY", library, 1);
  }
  return gpu::open_virtual(name, device);
}

void refuses(const char* library, std::initializer_list<const char*> parts) {
  std::unique_ptr<gpu::Device> device;
  const Status status = open_from(library, "vgpu:h200", &device);
  EXPECT_EQ(status.code, TANDEM_UNSUPPORTED);
  EXPECT_EQ(device, nullptr);
  for (const char* part : parts) EXPECT_NE(status.message.find(part), std::string::npos) << status.message;
}

TEST(VirtualLibrary, IsNotNeededToKnowItsNames) {
  for (const char* name : {"vgpu", "vgpu:", "vgpu:h200", "vgpu:none"}) EXPECT_TRUE(gpu::is_virtual(name)) << name;
  for (const char* name : {"", "cuda:0", "vgpux", "VGPU:h200"}) EXPECT_FALSE(gpu::is_virtual(name)) << name;
}

TEST(VirtualLibrary, ReportsWhereItWasSearched) {
  refuses(nullptr, {"libtandem_vgpu.so.0", "/tests/unit/gpu/libtandem_vgpu.so.0", "install libtandem_vgpu.so.0 next to",
                    "TANDEM_VGPU_LIBRARY"});
  refuses("/nowhere/libtandem_vgpu.so.0", {"/nowhere/libtandem_vgpu.so.0 cannot be loaded", "No such file"});
}

TEST(VirtualLibrary, OfAnotherKindOrVersionIsRefused) {
  refuses(FAKE_CUDA, {FAKE_CUDA, "set TANDEM_VGPU_LIBRARY to the virtual GPU's library"});
  refuses(OTHER_VGPU, {OTHER_VGPU, "belongs to Tandem 9.9.9", gpu::kVirtualLibraryTag});
}

TEST(VirtualLibrary, RefusesAnotherTandem) {
  void* library = dlopen(TANDEM_VGPU, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  const auto entry = reinterpret_cast<gpu::VirtualLibraryEntry*>(dlsym(library, gpu::kVirtualLibraryEntry));
  ASSERT_NE(entry, nullptr);
  gpu::Device* device = nullptr;
  char sentence[256];
  EXPECT_EQ(entry("0.0.1", "vgpu:h200", &device, sentence, sizeof sentence), TANDEM_UNSUPPORTED);
  EXPECT_EQ(device, nullptr);
  EXPECT_NE(std::strstr(sentence, "Tandem 0.0.1 has opened it"), nullptr) << sentence;
  EXPECT_EQ(entry("0.0.1", "vgpu:h200", &device, sentence, 5), TANDEM_UNSUPPORTED);
  EXPECT_STREQ(sentence, "this");
  EXPECT_EQ(entry(gpu::kVirtualLibraryTag, nullptr, nullptr, sentence, sizeof sentence), TANDEM_OK);
  EXPECT_STREQ(sentence, "");
}

constexpr char kKernel[] = R"(
.version 8.0
.target sm_90a
.address_size 64
.visible .entry twice(.param .u64 to)
{
  .reg .b32 %r<2>;
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [to];
  ld.global.u32 %r1, [%rd1];
  add.u32 %r1, %r1, %r1;
  st.global.u32 [%rd1], %r1;
  ret;
})";

class Virtual : public testing::Test {
 protected:
  void SetUp() override {
    const Status status = open_from(TANDEM_VGPU, "vgpu", &device);
    ASSERT_TRUE(status.ok()) << status.message;
    ASSERT_TRUE(device->load(std::as_bytes(std::span(kKernel)).first(sizeof kKernel - 1), &module).ok());
    ASSERT_TRUE(module->find("twice", 0, &kernel).ok());
    ASSERT_TRUE(device->allocate(sizeof(uint32_t), &memory).ok());
  }
  void TearDown() override { ASSERT_TRUE(device->free(memory).ok()); }

  Status launch(std::span<const gpu::NamedBuffer> buffers) {
    void* args[] = {&memory};
    return device->launch({.kernel = kernel, .grid = {}, .block = {}, .cluster = {}, .args = args, .buffers = buffers});
  }

  std::unique_ptr<gpu::Device> device;
  std::unique_ptr<gpu::Module> module;
  gpu::Kernel kernel = nullptr;
  void* memory = nullptr;
};

TEST_F(Virtual, ServesThroughWhatItsLibraryExports) {
  EXPECT_EQ(device->properties().opened_as, "vgpu:h200");
  std::string path;
  EXPECT_TRUE(gpu::find_virtual(&path).ok());
  EXPECT_EQ(path, TANDEM_VGPU);
  uint32_t value = 21;
  ASSERT_TRUE(device->copy_to_device(memory, &value, sizeof value, nullptr).ok());
  const Status launched = launch({});
  ASSERT_TRUE(launched.ok()) << launched.message;
  ASSERT_TRUE(device->copy_to_host(&value, memory, sizeof value, nullptr).ok());
  EXPECT_EQ(value, 42u);
}

TEST_F(Virtual, RefusesInSentences) {
  std::unique_ptr<gpu::Device> none;
  const Status unknown = open_from(TANDEM_VGPU, "vgpu:h300", &none);
  EXPECT_EQ(unknown.code, TANDEM_INVALID_ARGUMENT);
  EXPECT_NE(unknown.message.find("\"vgpu:h200\""), std::string::npos) << unknown.message;
  EXPECT_EQ(none, nullptr);
  EXPECT_FALSE(module->find("thrice", 0, &kernel).ok());
  EXPECT_FALSE(device->load(std::as_bytes(std::span("no PTX")), &module).ok());
}

TEST_F(Virtual, LetsNoExceptionOut) {
  const gpu::NamedBuffer nameless[] = {{.name = nullptr, .address = memory, .bytes = 4, .writable = true}};
  EXPECT_EQ(launch(nameless).code, TANDEM_INTERNAL_ERROR);
}

Status opened_here(std::string_view, std::unique_ptr<gpu::Device>*) { return {TANDEM_DEVICE_ERROR, "linked"}; }

TEST(VirtualLibrary, IsNotLoadedWhereItIsLinkedIn) {
  std::unique_ptr<gpu::Device> device;
  gpu::use_linked_virtual(opened_here);
  EXPECT_EQ(gpu::open_virtual("vgpu:h200", &device).message, "linked");
  gpu::use_linked_virtual(nullptr);
}

}  // namespace
}  // namespace tandem::test
