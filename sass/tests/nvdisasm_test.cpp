#include "sass/src/nvdisasm.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace tandem::machine_code {
namespace {

namespace fs = std::filesystem;

class MachineCodeNvdisasm : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "/nvdisasm-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    places_.temporary = root_;
  }
  void TearDown() override { fs::remove_all(root_); }

  // Writes a program that runs `line` with the file in $1.
  std::string program(const std::string& folder, const std::string& line) const {
    fs::create_directories(root_ / folder);
    const fs::path path = root_ / folder / "nvdisasm";
    std::ofstream(path) << "#!/bin/sh\n" << line << "\n";
    fs::permissions(path, fs::perms::owner_all);
    return path;
  }
  std::string folder(const std::string& name) const { return root_ / name; }

  fs::path root_;
  Places places_;
  std::string text_;
};

TEST_F(MachineCodeNvdisasm, IsLookedForInOrder) {
  const std::string in_path = program("tools", ""), in_home = program("cuda/bin", ""),
                    in_wheel = program("venv/lib/python3.11/site-packages/nvidia/cu13/bin", ""),
                    older = program("venv/lib/python3.11/site-packages/nvidia/cuda_nvdisasm/bin", ""),
                    in_conda = program("conda/lib/python3.12/site-packages/nvidia/cu13/bin", "");
  fs::create_directories(root_ / "empty");
  places_.path = folder("empty") + "::" + folder("tools");
  places_.cuda_home = folder("cuda");
  places_.virtual_env = folder("venv");
  places_.conda_prefix = folder("conda");
  EXPECT_EQ(nvdisasm_candidates(places_), (std::vector<std::string>{in_path, older, in_wheel, in_conda, in_home}));
  places_.nvdisasm = "/nowhere/nvdisasm";
  EXPECT_EQ(nvdisasm_candidates(places_), std::vector<std::string>{"/nowhere/nvdisasm"});
}

TEST_F(MachineCodeNvdisasm, FilesThatCannotBeExecutedAreNone) {
  fs::permissions(program("tools", ""), fs::perms::owner_read);
  places_.path = folder("tools");
  EXPECT_TRUE(nvdisasm_candidates(places_).empty());
  places_.path = folder("nowhere");
  EXPECT_TRUE(nvdisasm_candidates(places_).empty());
}

TEST_F(MachineCodeNvdisasm, PrintsBytesInMemory) {
  places_.nvdisasm = program("tools", "cat \"$1\"; echo end");
  std::string bytes(200000, 'x');
  bytes[7] = '\0';
  ASSERT_TRUE(disassemble_bytes(bytes, places_, &text_).ok());
  EXPECT_EQ(text_, bytes + "end\n");
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), {}), 1) << "the temporary file is still there";
}

TEST_F(MachineCodeNvdisasm, TheNextIsTriedWhenOneFails) {
  program("old", "echo too old; exit 1");
  program("new", "echo fine");
  places_.path = folder("old") + ":" + folder("new");
  ASSERT_TRUE(disassemble_bytes("cubin", places_, &text_).ok());
  EXPECT_EQ(text_, "fine\n");
}

TEST_F(MachineCodeNvdisasm, Refusals) {
  places_.nvdisasm = program("tools", "echo 'fatal: no ELF' >&2; exit 3");
  Status status = disassemble_bytes("no cubin", places_, &text_);
  EXPECT_EQ(status.code, TANDEM_INVALID_ARGUMENT);
  EXPECT_NE(status.message.find("fatal: no ELF"), std::string::npos) << status.message;
  status = disassemble(folder("missing.cubin"), places_, &text_);
  EXPECT_NE(status.message.find("missing.cubin: No such file"), std::string::npos) << status.message;
  places_.nvdisasm = "/nowhere/nvdisasm";
  status = disassemble_bytes("cubin", places_, &text_);
  EXPECT_NE(status.message.find("/nowhere/nvdisasm does not run"), std::string::npos) << status.message;
  places_.nvdisasm.clear();
  status = disassemble_bytes("cubin", places_, &text_);
  EXPECT_EQ(status.code, TANDEM_NO_COMPILER);
  EXPECT_NE(status.message.find("pip install nvidia-cuda-nvdisasm"), std::string::npos) << status.message;
}

}  // namespace
}  // namespace tandem::machine_code
