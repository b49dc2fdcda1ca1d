// Kernels on demand: the time, the process and the number of their compilations. The compiler is a fake that counts.
#include "jit/builder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "unit/jit/temporary.h"

extern char** environ;

namespace tandem::jit {
Sources fake_kernels();
}

namespace tandem::test {
namespace {

using jit::Code;
using jit::KernelBuilder;
using jit::Output;
using jit::Request;

class Build : public testing::Test {
 protected:
  Env env() const {
    Env result;
    result.nvrtc = FAKE_NVRTC;
    result.temporary = folder.path();
    return result;
  }
  std::unique_ptr<KernelBuilder> builder(const std::string& cache_folder) const {
    return std::make_unique<KernelBuilder>(jit::Search{}, env(), jit::Cache::Options{.folder = cache_folder},
                                           jit::fake_kernels());
  }
  // A source whose compilations are counted in the counted() file.
  std::string counting(const std::string& more = "") const { return "//count:" + (folder / "count") + "\n" + more; }
  size_t counted() const { return read_file(folder / "count").size(); }
  void wait_until_counted(size_t count) const {
    const auto start = std::chrono::steady_clock::now();
    while (counted() < count) {
      ASSERT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  static std::shared_ptr<const Code> build(KernelBuilder& with, const Request& request) {
    std::shared_ptr<const Code> code;
    const Status status = with.build(request, &code);
    EXPECT_TRUE(status.ok()) << status.message;
    return code;
  }

  pid_t start_worker(const std::string& threads, const std::string& source) const {
    const std::string arguments[] = {JIT_WORKER, FAKE_NVRTC, cache, threads, source};
    std::vector<char*> argv;
    for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    pid_t pid = 0;
    EXPECT_EQ(posix_spawn(&pid, JIT_WORKER, nullptr, nullptr, argv.data(), environ), 0);
    return pid;
  }
  static int exit_code(pid_t pid) {
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  TemporaryFolder folder;
  const std::string cache = folder / "cache";
  Request request{"kernel", "", "sm_90a", {"-x"}, Output::cubin};
};

TEST_F(Build, CompilesAgainWhereProductsAreSerialised) {
  request.source = counting("//serialised:2\n");
  (void)build(*builder(cache), request);
  EXPECT_EQ(counted(), 3u);
  (void)build(*builder(cache), request);
  EXPECT_EQ(counted(), 3u);  // from disk
}

TEST_F(Build, SerialisedProductsAreUsedButNotKept) {
  request.source = counting("//serialised:100\n");
  const auto first = builder(cache);
  EXPECT_NE(build(*first, request), nullptr);
  EXPECT_EQ(counted(), 3u);
  (void)build(*first, request);
  EXPECT_EQ(counted(), 3u);  // from memory
  (void)build(*builder(cache), request);
  EXPECT_EQ(counted(), 6u);
}

TEST_F(Build, CompilesThenFindsInMemoryThenOnDisk) {
  request.source = counting();
  const auto first = builder(cache);
  const auto code = build(*first, request);
  EXPECT_EQ(code->bytes, "compiled kernel --gpu-architecture=sm_90a -x");
  EXPECT_EQ(build(*first, request), code);  // the same object
  const auto second = builder(cache);
  EXPECT_EQ(build(*second, request)->bytes, code->bytes);
  EXPECT_EQ(build(*second, request)->key, code->key);
  EXPECT_EQ(counted(), 1u);
  const auto a = first->counters(), b = second->counters();
  EXPECT_EQ((std::vector{a.compiled, a.from_memory, a.from_disk}), (std::vector<int64_t>{1, 1, 0}));
  EXPECT_EQ((std::vector{b.compiled, b.from_memory, b.from_disk}), (std::vector<int64_t>{0, 1, 1}));
  EXPECT_EQ(first->cache().list().at(0).description, "kernel, sm_90a, cubin, NVRTC 13.7");
}

TEST_F(Build, WithoutADiskItCompilesPerProcess) {
  request.source = counting();
  for (const char* nowhere : {"", "/dev/null/tandem"}) {
    const auto with = builder(nowhere);
    EXPECT_EQ(build(*with, request), build(*with, request));
    EXPECT_EQ(with->counters().compiled, 1);
    EXPECT_EQ(with->counters().from_memory, 1);
  }
  EXPECT_EQ(counted(), 2u);
}

TEST_F(Build, KeyIsEverythingTheCompilerReads) {
  const auto with = builder(cache);
  std::vector<Request> different(9, request);
  different[1].source = " ";
  different[2].arch = "sm_100a";
  different[3].options = {"-y"};
  different[4].options = {"-x", ""};
  different[5].options = {};
  different[6].output = Output::ptx;
  different[7].name = "other";
  different[8].source = "#include \"tile/types.h\"\n";
  std::map<jit::Digest, size_t> keys;
  for (size_t i = 0; i < different.size(); ++i) {
    const auto [place, inserted] = keys.emplace(build(*with, different[i])->key, i);
    EXPECT_TRUE(inserted) << i << " has the key of " << place->second;
  }

  // A header changes the key if a source includes it, directly or not.
  const jit::Text before[] = {{"a.h", "#include \"b.h\""}, {"b.h", "1"}};
  const jit::Text after[] = {{"a.h", "#include \"b.h\""}, {"b.h", "2"}};
  for (const char* source : {"#include \"a.h\"", "unrelated"}) {
    request.source = source;
    KernelBuilder old_headers({}, env(), {}, before), new_headers({}, env(), {}, after);
    EXPECT_EQ(build(old_headers, request)->key != build(new_headers, request)->key, source[0] == '#');
  }
}

TEST_F(Build, HeadersComeFromMemory) {
  const auto with = builder(cache);
  request.source = jit::fake_kernels()[0].text;
  const std::string code = build(*with, request)->bytes;
  EXPECT_NE(code.find("tile/add.h=#pragma once"), std::string::npos) << code;
  EXPECT_NE(code.find("tile/types.h=#pragma once"), std::string::npos) << code;
  EXPECT_EQ(code.find("tile/unused.h="), std::string::npos) << code;
}

TEST_F(Build, DamagedEntryIsBuiltAgain) {
  request.source = counting();
  const auto code = build(*builder(cache), request);
  write_file(cache + "/" + jit::hex(code->key) + ".kernel", "rubbish");
  EXPECT_EQ(build(*builder(cache), request)->bytes, code->bytes);
  EXPECT_EQ(counted(), 2u);
  EXPECT_EQ(build(*builder(cache), request)->bytes, code->bytes);
  EXPECT_EQ(counted(), 2u);
}

TEST_F(Build, ErrorsAreNotKept) {
  const auto with = builder(cache);
  request.source = counting("//fail:error: no\n");
  std::shared_ptr<const Code> code;
  for (int i = 0; i < 2; ++i) {
    const Status status = with->build(request, &code);
    EXPECT_EQ(status.code, TANDEM_INTERNAL_ERROR);
    EXPECT_NE(status.message.find("error: no"), std::string::npos);
    EXPECT_EQ(code, nullptr);
  }
  EXPECT_EQ(counted(), 2u);
  EXPECT_EQ(with->counters().compiled, 0);
  EXPECT_TRUE(with->cache().list().empty());

  Env absent;
  absent.nvrtc = "/nowhere";
  KernelBuilder none({}, absent, {.folder = cache}, {});
  EXPECT_EQ(none.build(request, &code).code, TANDEM_NO_COMPILER);
}

TEST_F(Build, ThreadsShareOneCompilation) {
  for (const std::string& where : {cache, std::string()}) {
    const auto with = builder(where);
    request.source = counting("//sleep_ms:50\n") + where;
    const size_t before = counted();
    std::vector<std::thread> threads;
    std::vector<std::shared_ptr<const Code>> codes(16);
    for (auto& code : codes) threads.emplace_back([&] { code = build(*with, request); });
    for (std::thread& thread : threads) thread.join();
    for (const auto& code : codes) EXPECT_EQ(code, codes[0]);
    EXPECT_EQ(counted(), before + 1);
    EXPECT_EQ(with->counters().from_memory, 15);
  }
}

TEST_F(Build, ProcessesShareOneCompilation) {
  std::vector<pid_t> workers;
  for (int i = 0; i < 8; ++i) workers.push_back(start_worker("8", counting("//sleep_ms:300\n")));
  for (const pid_t worker : workers) EXPECT_EQ(exit_code(worker), 0);
  EXPECT_EQ(counted(), 1u);
  size_t files = 0;
  for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator(cache)) ++files;
  EXPECT_EQ(files, 1u);  // the entry, without locks and temporary files
}

// A worker compiles, holding the lock, until the file "go" exists.
TEST_F(Build, AKilledCompilerLeavesNoLock) {
  const std::string source = counting("//wait_for:" + (folder / "go") + "\n");
  const pid_t first = start_worker("1", source);
  wait_until_counted(1);
  const pid_t second = start_worker("1", source);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(counted(), 1u) << "the second worker did not wait";
  kill(first, SIGKILL);
  EXPECT_EQ(exit_code(first), -SIGKILL);
  wait_until_counted(2);
  write_file(folder / "go", "");
  EXPECT_EQ(exit_code(second), 0);
  EXPECT_EQ(counted(), 2u);
}

TEST_F(Build, PatienceWithAStoppedCompilerEnds) {
  request = {"worker", counting("//wait_for:" + (folder / "go") + "\n"), "sm_90a", {}, Output::cubin};
  const pid_t worker = start_worker("1", request.source);
  wait_until_counted(1);
  kill(worker, SIGSTOP);
  write_file(folder / "go", "");
  KernelBuilder impatient({}, env(), {.folder = cache, .patience = std::chrono::milliseconds(50)}, {});
  build(impatient, request);
  EXPECT_EQ(impatient.counters().compiled, 1);
  kill(worker, SIGCONT);
  EXPECT_EQ(exit_code(worker), 0);
  build(*builder(cache), request);
  EXPECT_EQ(counted(), 2u);
}

}  // namespace
}  // namespace tandem::test
