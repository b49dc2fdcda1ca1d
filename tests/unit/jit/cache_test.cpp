// The disk cache: its entries, its checks of ownership, and its tolerance of every fault of the folder.
#include "jit/cache.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "jit/entry.h"
#include "unit/jit/temporary.h"

namespace tandem::test {
namespace {

namespace fs = std::filesystem;
using jit::Cache;
using std::chrono::hours;

jit::Digest key(int number) { return jit::sha256("key " + std::to_string(number)); }

void make_older(const std::string& path, hours age) {
  fs::last_write_time(path, fs::file_time_type::clock::now() - age);
}

bool says(const Status& status, const std::string& fragment) {
  return status.message.find(fragment) != std::string::npos;
}

class DiskCache : public testing::Test {
 protected:
  std::string entry(int number) const { return path + "/" + jit::hex(key(number)) + ".kernel"; }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& file : fs::directory_iterator(path)) names.push_back(file.path().filename().string());
    return names;
  }
  void publish(const Cache& target, int number, const std::string& payload) {
    const Status status = target.publish(key(number), "kernel " + std::to_string(number), payload);
    ASSERT_TRUE(status.ok()) << status.message;
  }

  TemporaryFolder folder;
  const std::string path = folder / "home/cache/tandem";
  const Cache cache{{.folder = path}};
};

TEST_F(DiskCache, FolderFromTheEnvironment) {
  Env env;
  EXPECT_EQ(Cache::options(env).folder, "");
  env.home = "/home/u";
  EXPECT_EQ(Cache::options(env).folder, "/home/u/.cache/tandem");
  env.xdg_cache_home = "relative";
  EXPECT_EQ(Cache::options(env).folder, "/home/u/.cache/tandem");
  env.xdg_cache_home = "/x";
  EXPECT_EQ(Cache::options(env).folder, "/x/tandem");
  env.cache_dir = "/c";
  EXPECT_EQ(Cache::options(env).folder, "/c");
  env.cache = "off";
  EXPECT_EQ(Cache::options(env).folder, "");
  EXPECT_EQ(Cache::options(env).max_bytes, int64_t{512} << 20);
}

TEST_F(DiskCache, FindsWhatWasPublished) {
  EXPECT_TRUE(cache.usable().ok());
  EXPECT_FALSE(cache.lookup(key(1)));
  publish(cache, 1, "payload");
  publish(cache, 2, "");
  EXPECT_EQ(cache.lookup(key(1)), "payload");
  EXPECT_EQ(cache.lookup(key(2)), "");
  publish(cache, 1, "payload again");
  EXPECT_EQ(cache.lookup(key(1)), "payload again");
  EXPECT_EQ(files().size(), 2u);
  struct stat state {};
  ASSERT_EQ(stat(path.c_str(), &state), 0);
  EXPECT_EQ(state.st_mode & 0777, 0700u);
  ASSERT_EQ(stat(entry(1).c_str(), &state), 0);
  EXPECT_EQ(state.st_mode & 0777, 0600u);
}

TEST_F(DiskCache, DamagedEntriesAreRemoved) {
  const std::string payload(1000, 'p');
  publish(cache, 1, payload);
  const std::string good = read_file(entry(1));
  std::string flipped = good;
  flipped[500] ^= 1;
  for (const std::string& bad :
       {std::string(), good.substr(0, 30), good.substr(0, good.size() - 1), good + "x", flipped}) {
    write_file(entry(1), bad);
    EXPECT_FALSE(cache.lookup(key(1)));
    EXPECT_FALSE(fs::exists(entry(1)));
  }
  write_file(entry(2), good);  // the content of a different key
  EXPECT_FALSE(cache.lookup(key(2)));
  publish(cache, 1, payload);
  EXPECT_EQ(cache.lookup(key(1)), payload);
}

TEST_F(DiskCache, LinksAreNotFollowed) {
  ASSERT_TRUE(cache.usable().ok());
  write_file(folder / "elsewhere", jit::write_entry(key(1), "", "planted"));
  fs::create_symlink(folder / "elsewhere", entry(1));
  EXPECT_FALSE(cache.lookup(key(1)));
  fs::create_directory_symlink(path, folder / "link");
  const Status status = Cache({.folder = folder / "link"}).usable();
  EXPECT_TRUE(says(status, "cannot be opened as a folder")) << status.message;
  write_file(folder / "file", "");
  EXPECT_FALSE(Cache({.folder = folder / "file"}).usable().ok());
  EXPECT_FALSE(Cache({.folder = folder / "file/tandem"}).usable().ok());

  // A FIFO blocks every process that opens it.
  fs::remove(entry(1));
  ASSERT_EQ(mkfifo(entry(1).c_str(), 0600), 0);
  EXPECT_FALSE(cache.lookup(key(1)));
}

TEST_F(DiskCache, FoldersOthersMayWriteAreRefused) {
  publish(cache, 1, "payload");
  for (const mode_t mode : {0720, 0702, 0777}) {
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
    EXPECT_TRUE(says(cache.usable(), "is writable by other users")) << cache.usable().message;
    EXPECT_FALSE(cache.lookup(key(1)));
    EXPECT_FALSE(cache.publish(key(2), "", "").ok());
    EXPECT_FALSE(cache.lock(key(2)).held());
    EXPECT_TRUE(cache.list().empty());
  }
  ASSERT_EQ(chmod(path.c_str(), 0755), 0);
  EXPECT_EQ(cache.lookup(key(1)), "payload");
}

TEST_F(DiskCache, FoldersOfOtherUsersAreRefused) {
  std::string others = "/usr";
  if (geteuid() == 0) {
    others = path;
    ASSERT_TRUE(cache.usable().ok());
    ASSERT_EQ(chown(path.c_str(), 65534, 65534), 0);
  }
  const Status status = Cache({.folder = others}).usable();
  EXPECT_TRUE(says(status, "belongs to user")) << status.message;
  EXPECT_FALSE(Cache({.folder = others}).publish(key(1), "", "").ok());
}

TEST_F(DiskCache, ReadOnlyFolderIsStillRead) {
  publish(cache, 1, "payload");
  const bool root = geteuid() == 0;
  for (const std::string& open : {folder.path(), folder / "home", folder / "home/cache"}) {
    ASSERT_EQ(chmod(open.c_str(), 0755), 0);
  }
  if (root) {
    for (const std::string& file : {path, entry(1)}) ASSERT_EQ(chown(file.c_str(), 65534, 65534), 0);
    ASSERT_EQ(seteuid(65534), 0);  // permissions do not bind root
  }
  const bool reachable = access(path.c_str(), F_OK) == 0 || !root;
  if (chmod(path.c_str(), 0500) == 0) {
    EXPECT_EQ(cache.lookup(key(1)), "payload");
    EXPECT_FALSE(cache.lookup(key(2)));
    const Status status = cache.publish(key(2), "", "");
    EXPECT_TRUE(says(status, "could not be written to")) << status.message;
    EXPECT_FALSE(cache.lock(key(2)).held());
    EXPECT_EQ(cache.list().size(), 1u);
  }
  ASSERT_EQ(seteuid(root ? 0 : geteuid()), 0);
  EXPECT_TRUE(reachable);
  ASSERT_EQ(chmod(path.c_str(), 0700), 0);
}

TEST_F(DiskCache, NoFolderIsNoCache) {
  for (const char* nowhere : {"", "/proc/tandem", "/dev/null/tandem"}) {
    const Cache none({.folder = nowhere});
    EXPECT_FALSE(none.usable().ok());
    EXPECT_FALSE(none.lookup(key(1)));
    EXPECT_FALSE(none.publish(key(1), "", "").ok());
    EXPECT_FALSE(none.lock(key(1)).held());
    EXPECT_TRUE(none.list().empty());
    EXPECT_EQ(none.clear(), 0);
  }
}

// The limit on file sizes stands in for a full disk: writing fails half-way.
TEST_F(DiskCache, FullDiskLeavesNothingBehind) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{1000, before.rlim_max};
  std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = cache.publish(key(1), "", std::string(5000, 'p'));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, SIG_DFL);
  EXPECT_TRUE(says(status, "could not be written to")) << status.message;
  EXPECT_TRUE(files().empty());
}

TEST_F(DiskCache, RemovesWhatWasUsedLeastRecently) {
  const Cache small({.folder = path, .max_bytes = 3500});
  for (int i = 0; i < 3; ++i) {
    publish(small, i, std::string(1000, 'p'));
    make_older(entry(i), hours(10 - i));
  }
  EXPECT_TRUE(small.lookup(key(0)));  // used again: now 1 is the oldest
  publish(small, 3, std::string(1000, 'p'));
  EXPECT_TRUE(small.lookup(key(0)));
  EXPECT_FALSE(small.lookup(key(1)));
  EXPECT_TRUE(small.lookup(key(2)));
  EXPECT_TRUE(small.lookup(key(3)));
}

TEST_F(DiskCache, AHitTouchesOnceAnHour) {
  publish(cache, 1, "payload");
  const auto recent = fs::file_time_type::clock::now() - std::chrono::minutes(50);
  fs::last_write_time(entry(1), recent);
  EXPECT_TRUE(cache.lookup(key(1)));
  EXPECT_EQ(fs::last_write_time(entry(1)), recent);
  make_older(entry(1), hours(2));
  EXPECT_TRUE(cache.lookup(key(1)));
  EXPECT_GT(fs::last_write_time(entry(1)), recent);
}

TEST_F(DiskCache, RemovesWhatKilledProcessesLeft) {
  ASSERT_TRUE(cache.usable().ok());
  for (const char* name : {"/old.lock", "/old.tmp", "/old.txt", "/new.lock", "/new.tmp"}) {
    write_file(path + name, "");
    if (std::string_view(name).starts_with("/old")) make_older(path + name, hours(2));
  }
  publish(cache, 1, "payload");
  EXPECT_FALSE(fs::exists(path + "/old.lock"));
  EXPECT_FALSE(fs::exists(path + "/old.tmp"));
  EXPECT_TRUE(fs::exists(path + "/old.txt"));  // a file of another program
  EXPECT_TRUE(fs::exists(path + "/new.lock"));
  EXPECT_TRUE(fs::exists(path + "/new.tmp"));
}

TEST_F(DiskCache, ListsAndClears) {
  publish(cache, 1, "payload");
  publish(cache, 2, std::string(1000, 'p'));
  make_older(entry(1), hours(3));
  write_file(entry(3), "rubbish");
  make_older(entry(3), hours(5));
  write_file(path + "/note.txt", "not ours");
  const auto listed = cache.list();
  ASSERT_EQ(listed.size(), 3u);
  EXPECT_EQ(listed[0].description, "kernel 2");
  EXPECT_GT(listed[0].bytes, 1000);
  EXPECT_LT(listed[0].age, hours(1));
  EXPECT_EQ(listed[1].description, "kernel 1");
  EXPECT_NEAR(static_cast<double>(listed[1].age.count()), 3 * 3600, 60);
  EXPECT_EQ(listed[2].description, "(damaged)");
  EXPECT_EQ(cache.clear(), 3);
  EXPECT_TRUE(cache.list().empty());
  EXPECT_EQ(files(), std::vector<std::string>{"note.txt"});
}

TEST_F(DiskCache, OneHoldsTheLock) {
  const Cache impatient({.folder = path, .patience = std::chrono::milliseconds(20)});
  {
    const Cache::Lock first = impatient.lock(key(1));
    EXPECT_TRUE(first.held());
    EXPECT_FALSE(impatient.lock(key(1)).held());  // the timeout is over
    EXPECT_TRUE(impatient.lock(key(2)).held());
  }
  EXPECT_TRUE(files().empty());  // locks are removed
  EXPECT_TRUE(impatient.lock(key(1)).held());
}

TEST_F(DiskCache, AForkedChildDoesNotKeepTheLock) {
  pid_t child = 0;
  {
    const Cache::Lock lock = cache.lock(key(1));
    ASSERT_TRUE(lock.held());
    child = fork();
    if (child == 0) {
      for (;;) pause();
    }
  }
  EXPECT_TRUE(Cache({.folder = path, .patience = std::chrono::milliseconds(500)}).lock(key(1)).held());
  kill(child, SIGKILL);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

TEST_F(DiskCache, WaitersLeaveWhenTheEntryIsThere) {
  const Cache::Lock held = cache.lock(key(1));
  ASSERT_TRUE(held.held());
  std::thread waiter([&] {
    EXPECT_FALSE(cache.lock(key(1)).held());
    EXPECT_EQ(cache.lookup(key(1)), "payload");
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  publish(cache, 1, "payload");
  waiter.join();
}

TEST_F(DiskCache, ThreadsTakeTurns) {
  std::atomic<int> inside{0}, turns{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        const Cache::Lock lock = cache.lock(key(1));
        EXPECT_TRUE(lock.held());
        EXPECT_EQ(++inside, 1);
        ++turns;
        std::this_thread::sleep_for(std::chrono::microseconds(20 * (i % 3)));
        --inside;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(turns, 2400);
}

}  // namespace
}  // namespace tandem::test
