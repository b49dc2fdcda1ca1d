// The compiler's sentences with a fake NVRTC, and real kernels with a real one if available.
#include "jit/compiler.h"

#include <gtest/gtest.h>

#include <regex>

#include "unit/jit/temporary.h"

namespace tandem::jit {
Sources fake_kernels();
}

namespace tandem::test {
namespace {

using jit::Compiler;
using jit::Output;
using jit::Request;

std::unique_ptr<Compiler> fake_compiler(const std::string& temporary) {
  Env env;
  env.nvrtc = FAKE_NVRTC;
  env.temporary = temporary;
  std::unique_ptr<Compiler> compiler;
  const Status status = Compiler::open({}, env, &compiler);
  EXPECT_TRUE(status.ok()) << status.message;
  return compiler;
}

bool says(const Status& status, const std::string& fragment) {
  return status.message.find(fragment) != std::string::npos;
}

TEST(Compiler, PassesEverythingOn) {
  const TemporaryFolder folder;
  const auto compiler = fake_compiler(folder.path());
  EXPECT_EQ(compiler->major(), 13);
  EXPECT_EQ(compiler->minor(), 7);
  EXPECT_TRUE(compiler->identity().starts_with("NVRTC 13.7, "));
  EXPECT_FALSE(compiler->identity().ends_with(" 0 bytes"));
  const jit::Text headers[] = {{"a.h", "A"}, {"b.h", "B"}};
  Request request{"name", "", "sm_90a", {"-option"}, Output::cubin};
  std::string code, log;
  ASSERT_TRUE(compiler->compile(request, headers, &code, &log).ok());
  EXPECT_EQ(code, "compiled name a.h=A b.h=B --gpu-architecture=sm_90a -option");
  request.output = Output::ptx;
  ASSERT_TRUE(compiler->compile(request, {}, &code, &log).ok());
  EXPECT_EQ(code, "compiled name --gpu-architecture=compute_90a -option");
}

TEST(Compiler, AbsentIsASentence) {
  Env env;
  env.nvrtc = "/nowhere/libnvrtc.so";
  std::unique_ptr<Compiler> compiler;
  const Status status = Compiler::open({}, env, &compiler);
  EXPECT_EQ(status.code, TANDEM_NO_COMPILER);
  EXPECT_TRUE(says(status, "TANDEM_NVRTC (\"/nowhere/libnvrtc.so\") must name NVRTC 12.0 or newer")) << status.message;
  EXPECT_EQ(compiler, nullptr);

  // No NVRTC is that old, so that the search skips every NVRTC of this machine.
  if (const Status none = Compiler::open({{}, 1}, {}, &compiler); !none.ok()) {
    EXPECT_EQ(none.code, TANDEM_NO_COMPILER);
    EXPECT_TRUE(says(none, "pip install nvidia-cuda-nvrtc")) << none.message;
    EXPECT_TRUE(says(none, "TANDEM_NVRTC")) << none.message;
  }
}

TEST(Compiler, UnknownArchIsASentence) {
  const TemporaryFolder folder;
  const auto compiler = fake_compiler(folder.path());
  std::string code, log;
  const Status newer = compiler->compile({"k", "", "sm_120a", {}, Output::cubin}, {}, &code, &log);
  EXPECT_EQ(newer.code, TANDEM_NO_COMPILER);
  EXPECT_TRUE(says(newer, "NVRTC 13.7 (")) << newer.message;
  EXPECT_TRUE(says(newer, ") must support sm_120a: install a newer NVRTC: pip install")) << newer.message;
  EXPECT_EQ(compiler->compile({"k", "", "90a", {}, Output::cubin}, {}, &code, &log).code, TANDEM_INTERNAL_ERROR);
  EXPECT_EQ(compiler->compile({"k", "", "sm_x", {}, Output::cubin}, {}, &code, &log).code, TANDEM_INTERNAL_ERROR);
}

TEST(Compiler, FirstErrorIsInTheSentenceAndTheRestInAFile) {
  const TemporaryFolder folder;
  const auto compiler = fake_compiler(folder.path());
  const Request request{"sm90/forward", "//fail:k.cu(3): error: no", "sm_90a", {"-o1"}, Output::cubin};
  std::string code, log;
  const Status status = compiler->compile(request, {}, &code, &log);
  EXPECT_EQ(status.code, TANDEM_INTERNAL_ERROR);
  const std::regex sentence(
      "kernel \"sm90/forward\" does not compile for sm_90a with NVRTC 13\\.7: k\\.cu\\(3\\): error: no "
      "\\(the whole log: (.*tandem-sm90_forward-.{6}\\.log)\\)");
  std::smatch match;
  ASSERT_TRUE(std::regex_match(status.message, match, sentence)) << status.message;
  const std::string file = read_file(match[1]);
  for (const char* part : {"kernel sm90/forward, sm_90a -o1", "a warning", "k.cu(3): error: no\nmore", "//fail:"}) {
    EXPECT_NE(file.find(part), std::string::npos) << file;
  }

  const Status unwritable = fake_compiler("/nowhere")->compile(request, {}, &code, &log);
  EXPECT_TRUE(unwritable.message.ends_with("error: no")) << unwritable.message;
}

// ---- A real NVRTC: TANDEM_NVRTC, VIRTUAL_ENV or CUDA_HOME lead to it ----

class RealCompiler : public testing::Test {
 protected:
  void SetUp() override {
    Env env = Env::get();
    env.temporary = folder.path();
    if (const Status status = Compiler::open({}, env, &compiler); !status.ok()) {
      GTEST_SKIP() << "NOT RUN, no compiler: " << status.message;
    }
  }

  Status compile(const std::string& source, const std::string& arch, Output output,
                 const std::vector<std::string>& more = {}) {
    const jit::Sources sources = jit::fake_kernels();
    Request request{"add.cu", source, arch, {"--std=c++20", "-default-device"}, output};
    request.options.insert(request.options.end(), more.begin(), more.end());
    return compiler->compile(request, jit::included_by(source, sources), &code, &log);
  }

  TemporaryFolder folder;
  std::unique_ptr<Compiler> compiler;
  std::string code, log;
};

TEST_F(RealCompiler, PtxAndCubinForBothArchitectures) {
  const std::string source(jit::fake_kernels()[0].text);
  for (const char* arch : {"sm_90a", "sm_100a"}) {
    if (Status status = compile(source, arch, Output::ptx); !status.ok()) {
      EXPECT_EQ(status.code, TANDEM_NO_COMPILER) << status.message;
      GTEST_SKIP() << "NOT RUN: " << status.message;
    }
    EXPECT_NE(code.find(std::string(".target ") + arch), std::string::npos) << code;
    EXPECT_NE(code.find(".entry add("), std::string::npos) << code;
    EXPECT_NE(code.back(), '\0');
    const Status status = compile(source, arch, Output::cubin);
    ASSERT_TRUE(status.ok()) << status.message;
    EXPECT_EQ(code.substr(0, 4), "\177ELF");
  }
}

// The result must not depend on the working directory.
TEST_F(RealCompiler, LinesAreOfFilesInTheSourceTree) {
  const std::string source(jit::fake_kernels()[0].text);
  const Status status = compile(source, "sm_90a", Output::ptx, {"--generate-line-info"});
  ASSERT_TRUE(status.ok()) << status.message;
  EXPECT_NE(code.find(".file\t1 \"add.cu\""), std::string::npos) << code;
  EXPECT_NE(code.find("\"kernels/tile/add.h\""), std::string::npos) << code;
  EXPECT_EQ(code.find("\"/"), std::string::npos) << code;
}

TEST_F(RealCompiler, ErrorsNameTheLine) {
  const Status status = compile("#include \"tile/add.h\"\nint x = y;\n", "sm_90a", Output::cubin);
  EXPECT_EQ(status.code, TANDEM_INTERNAL_ERROR);
  EXPECT_TRUE(says(status, "add.cu(2): error: identifier \"y\" is undefined")) << status.message;
  EXPECT_TRUE(says(compile("#include \"absent.h\"\n", "sm_90a", Output::cubin), "absent.h"));
  EXPECT_TRUE(says(compile("#include <cstdio>\n", "sm_90a", Output::cubin), "cstdio")) << "no folder is to be searched";
  const std::string bad_asm = "extern \"C\" __global__ void k() { asm volatile(\"nonsense.op;\"); }";
  EXPECT_TRUE(says(compile(bad_asm, "sm_90a", Output::cubin), "ptxas application ptx input, line"));
}

}  // namespace
}  // namespace tandem::test
