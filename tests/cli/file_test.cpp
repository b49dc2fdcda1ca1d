#include "cli/io/file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "cli/io/tensor.h"

namespace tandem::io {
namespace {

namespace fs = std::filesystem;

class FileTest : public testing::Test {
 protected:
  FileTest() { fs::create_directory(folder_); }
  ~FileTest() override { fs::remove_all(folder_); }

  size_t files() const { return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), {})); }

  const fs::path folder_ = fs::temp_directory_path() / ("file-test-" + std::to_string(getpid()));
  const std::string path_ = (folder_ / "target").string();
};

TEST_F(FileTest, AppearsOnCommitOnly) {
  {
    AtomicFile file(path_);
    file.write("half");
    EXPECT_FALSE(fs::exists(path_));
  }
  EXPECT_EQ(files(), 0u);
  {
    AtomicFile file(path_);
    file.write("whole");
    file.commit();
  }
  EXPECT_EQ(files(), 1u);
  const MappedFile read(path_);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(read.bytes().data()), read.bytes().size()), "whole");
  struct stat status;
  ASSERT_EQ(::stat(path_.c_str(), &status), 0);
  const mode_t mask = ::umask(0);
  ::umask(mask);
  EXPECT_EQ(status.st_mode & 0777, 0666 & ~mask);
}

TEST_F(FileTest, SignalsRemoveIt) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    const pid_t child = fork();
    if (child == 0) {
      ::signal(number, SIG_DFL);
      AtomicFile file(path_);
      file.write("half");
      ::raise(number);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status));
    EXPECT_EQ(WTERMSIG(status), number);
    EXPECT_EQ(files(), 0u);
  }
}

TEST_F(FileTest, RefusesWhatIsNoFile) {
  const auto message = [](auto make) -> std::string {
    try {
      make();
    } catch (const InputError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(message([&] { MappedFile{path_}; }),
            path_ + ": cannot be opened: No such file or directory; check the path");
  EXPECT_EQ(message([&] { MappedFile{folder_.string()}; }),
            folder_.string() + ": must be a regular file: pass another path");
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_EQ(message([&] { MappedFile{path_}; }), path_ + ": must be a regular file: pass another path");
  EXPECT_EQ(message([&] { AtomicFile{path_}; }), path_ + ": must be a regular file: pass another path");
  EXPECT_EQ(message([&] { AtomicFile{path_ + "/no/such/folder"}; }),
            path_ + "/no/such/folder: cannot be written: Not a directory; check the folder");
}

TEST_F(FileTest, ReadsEmptyFiles) {
  std::ofstream(path_).close();
  EXPECT_TRUE(MappedFile(path_).bytes().empty());
}

std::string refusal(const std::function<void()>& run) {
  try {
    run();
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

TEST_F(FileTest, AnOutputFileIsTriedAndNotMade) {
  EXPECT_EQ(refusal([&] { check_output_file("--json", path_); }), "accepted");
  EXPECT_EQ(refusal([&] { check_output_file("--json", ""); }), "accepted");
  EXPECT_EQ(files(), 0u);
  EXPECT_EQ(refusal([&] { check_output_file("--json", folder_.string()); }),
            "--json (" + folder_.string() + ") must be a file, not a folder: pass another path");
  EXPECT_NE(refusal([&] { check_output_file("--json", path_ + "/x.json"); }), "accepted");
  EXPECT_EQ(files(), 0u);
}

TEST_F(FileTest, AnOutputFileThatExistsKeepsItsBytes) {
  std::ofstream(path_) << "before";
  EXPECT_EQ(refusal([&] { check_output_file("--json", path_); }), "accepted");
  std::string text;
  std::ifstream(path_) >> text;
  EXPECT_EQ(text, "before");
}

TEST_F(FileTest, AnOutputFolderIsTriedAndNotMade) {
  const auto check = [&](const std::string& name) {
    return refusal([&] { check_output_folder("--out", (folder_ / name).string()); });
  };
  for (const char* name : {"", "result", "result/", "a/b/c", "v1.5/"}) EXPECT_EQ(check(name), "accepted") << name;
  for (const char* name : {"x.npy", "x.npz", "deep/x.pt", "result.v2"})
    EXPECT_NE(check(name).find("add a / to a name with a suffix"), std::string::npos) << name;
  EXPECT_EQ(files(), 0u);
  fs::create_directory(folder_ / "made.before");
  EXPECT_EQ(check("made.before"), "accepted");
  std::ofstream(path_) << "text";
  for (const char* name : {"target", "target/", "target/below"})
    EXPECT_NE(check(name).find(path_ + " is a file"), std::string::npos) << name;
}

}  // namespace
}  // namespace tandem::io
