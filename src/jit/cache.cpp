#include "jit/cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include "base/text.h"
#include "jit/entry.h"

namespace tandem::jit {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::string_view kEntrySuffix = ".kernel", kLockSuffix = ".lock", kTemporarySuffix = ".tmp";
constexpr int64_t kMaxFileBytes = int64_t{256} << 20;
constexpr seconds kHour{3600};

std::string text_of(int error) { return std::generic_category().message(error); }

Status without(std::string message) {
  return Status::unsupported("no kernels are cached on disk: " + std::move(message));
}

// All files are opened through the folder's descriptor, which has been checked. Therefore no process can replace the
// folder by another folder or a link.
File open_in(const File& folder, const std::string& name, int flags) {
  return File(openat(folder.fd(), name.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
}
void remove_in(const File& folder, const std::string& name) { (void)unlinkat(folder.fd(), name.c_str(), 0); }

seconds age_of(const struct stat& file) { return seconds(std::max<int64_t>(0, time(nullptr) - file.st_mtim.tv_sec)); }

struct Named {
  std::string name;
  struct stat file;
};

// The regular files of a folder, least recently used first.
std::vector<Named> files_in(const File& folder) {
  std::vector<Named> files;
  DIR* stream = fdopendir(openat(folder.fd(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (stream == nullptr) return files;
  while (const dirent* entry = readdir(stream)) {
    Named named{entry->d_name, {}};
    if (fstatat(folder.fd(), entry->d_name, &named.file, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (S_ISREG(named.file.st_mode)) files.push_back(std::move(named));
  }
  closedir(stream);
  const auto used = [](const Named& f) { return std::pair(f.file.st_mtim.tv_sec, f.file.st_mtim.tv_nsec); };
  std::ranges::sort(files, {}, used);
  return files;
}

bool is_entry(const Named& named) { return named.name.ends_with(kEntrySuffix); }
bool is_ours(const Named& named) {
  return is_entry(named) || named.name.ends_with(kLockSuffix) || named.name.ends_with(kTemporarySuffix);
}

// Reads at most limit bytes from the beginning of a file.
std::string read_from(const File& file, size_t limit) {
  std::string bytes(limit, '\0');
  size_t size = 0;
  while (size < limit) {
    const ssize_t count = read(file.fd(), bytes.data() + size, limit - size);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    size += static_cast<size_t>(count);
  }
  bytes.resize(size);
  return bytes;
}

// Returns 0, or errno on failure.
int write_all(const File& file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = write(file.fd(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return fsync(file.fd()) == 0 ? 0 : errno;
}

std::string entry_name(const Digest& key) { return hex(key).append(kEntrySuffix); }

}  // namespace

File& File::operator=(File&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}
File::~File() {
  if (fd_ >= 0) ::close(fd_);
}
int File::release() { return std::exchange(fd_, -1); }

Cache::Options Cache::options(const Env& env) {
  Options options;
  if (env.cache == "off") return options;
  if (!env.cache_dir.empty()) {
    options.folder = env.cache_dir;
  } else if (env.xdg_cache_home.starts_with('/')) {  // the specification ignores relative paths
    options.folder = env.xdg_cache_home + "/tandem";
  } else if (!env.home.empty()) {
    options.folder = env.home + "/.cache/tandem";
  }
  return options;
}

Status Cache::open_folder(File* folder) const {
  const std::string& path = options_.folder;
  if (path.empty()) return without("TANDEM_CACHE is off or HOME is not set; set TANDEM_CACHE_DIR to a folder");
  std::error_code ignored;  // the open below reports a folder that was not created
  fs::create_directories(fs::path(path).parent_path(), ignored);
  (void)mkdir(path.c_str(), 0700);
  File opened(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!opened.open()) {
    return without(str_cat("\"", path, "\" cannot be opened as a folder (", text_of(errno),
                           "); set TANDEM_CACHE_DIR to a folder that is not a link"));
  }
  struct stat state {};
  if (fstat(opened.fd(), &state) != 0) return without(str_cat("\"", path, "\": ", text_of(errno)));
  if (state.st_uid != geteuid()) {
    return without(str_cat("\"", path, "\" belongs to user ", state.st_uid, " and the process to user ", geteuid(),
                           "; set TANDEM_CACHE_DIR to a folder of this user"));
  }
  if ((state.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return without(str_cat("\"", path, "\" is writable by other users; run chmod go-w on the folder, or set ",
                           "TANDEM_CACHE_DIR to a private folder"));
  }
  *folder = std::move(opened);
  return {};
}

Status Cache::usable() const {
  File folder;
  return open_folder(&folder);
}

std::optional<std::string> Cache::lookup(const Digest& key) const {
  File folder;
  if (!open_folder(&folder).ok()) return std::nullopt;
  const std::string name = entry_name(key);
  const File file = open_in(folder, name, O_RDONLY);
  struct stat state {};
  if (!file.open() || fstat(file.fd(), &state) != 0) return std::nullopt;
  const bool plausible = S_ISREG(state.st_mode) && state.st_size <= kMaxFileBytes;
  const std::string bytes = plausible ? read_from(file, static_cast<size_t>(state.st_size)) : "";
  const std::optional<std::string_view> payload = read_payload(bytes, key);
  if (!payload) {
    remove_in(folder, name);
    return std::nullopt;
  }
  // trim() reads the modification time to find entries in use. One update per hour suffices and spares network file
  // systems.
  if (age_of(state) > kHour) (void)futimens(file.fd(), nullptr);
  return std::string(*payload);
}

Status Cache::publish(const Digest& key, std::string_view description, std::string_view payload) const {
  File folder;
  TANDEM_TRY(open_folder(&folder));
  // Avoids std::random_device, which would need a newer C library if it were linked statically.
  uint32_t random = 0;
  (void)!getrandom(&random, sizeof random, GRND_NONBLOCK);
  const std::string name = entry_name(key);
  const std::string temporary = str_cat(hex(key), ".", getpid(), ".", random).append(kTemporarySuffix);
  const auto failed = [&](int error) {
    remove_in(folder, temporary);
    return without(str_cat("a kernel could not be written to \"", options_.folder, "\" (", text_of(error),
                           "); free space there, or set TANDEM_CACHE_DIR"));
  };
  const File file = open_in(folder, temporary, O_WRONLY | O_CREAT | O_EXCL);
  if (!file.open()) return failed(errno);
  if (const int error = write_all(file, write_entry(key, description, payload)); error != 0) return failed(error);
  if (renameat(folder.fd(), temporary.c_str(), folder.fd(), name.c_str()) != 0) return failed(errno);
  trim(folder);
  return {};
}

void Cache::trim(const File& folder) const {
  int64_t total = 0;
  std::vector<Named> files = files_in(folder);
  for (const Named& named : files) {
    if (is_entry(named)) total += named.file.st_size;
  }
  for (const Named& named : files) {
    if (is_entry(named)) {
      if (total <= options_.max_bytes) continue;
      remove_in(folder, named.name);
      total -= named.file.st_size;
    } else if (is_ours(named) && age_of(named.file) > kHour) {
      remove_in(folder, named.name);  // left over from a killed process
    }
  }
}

Cache::Lock::Lock(File folder, File file, std::string name)
    : folder_(std::move(folder)), file_(std::move(file)), name_(std::move(name)) {}

Cache::Lock::~Lock() {
  // Removing the file releases the right even if a forked child keeps the descriptor and its lock.
  if (held()) remove_in(folder_, name_);
}

Cache::Lock Cache::lock(const Digest& key) const {
  File folder;
  if (!open_folder(&folder).ok()) return {};
  const std::string name = hex(key).append(kLockSuffix), entry = entry_name(key);
  const auto deadline = std::chrono::steady_clock::now() + options_.patience;
  for (milliseconds pause{1};; pause = std::min(2 * pause, milliseconds(50))) {
    File file = open_in(folder, name, O_RDWR | O_CREAT);
    if (!file.open()) return {};
    if (flock(file.fd(), LOCK_EX | LOCK_NB) == 0) {
      // The last holder may have removed the file between the two calls. Then this lock excludes no other process.
      struct stat ours {
      }, named{};
      const bool stands = fstat(file.fd(), &ours) == 0 &&
                          fstatat(folder.fd(), name.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0 &&
                          ours.st_ino == named.st_ino && ours.st_dev == named.st_dev;
      if (stands) return {std::move(folder), std::move(file), name};
    } else if (errno != EWOULDBLOCK && errno != EINTR) {
      return {};
    }
    const bool published = faccessat(folder.fd(), entry.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0;
    if (published || std::chrono::steady_clock::now() >= deadline) return {};
    std::this_thread::sleep_for(pause);
  }
}

std::vector<Cache::Listed> Cache::list() const {
  std::vector<Listed> listed;
  File folder;
  if (!open_folder(&folder).ok()) return listed;
  for (const Named& named : files_in(folder)) {
    if (!is_entry(named)) continue;
    const File file = open_in(folder, named.name, O_RDONLY);
    if (!file.open()) continue;
    const std::optional<EntryHead> head = read_head(read_from(file, kMaxHead));
    listed.push_back({head ? head->description : "(damaged)", named.file.st_size, age_of(named.file)});
  }
  std::ranges::reverse(listed);
  return listed;
}

int64_t Cache::clear() const {
  int64_t entries = 0;
  File folder;
  if (!open_folder(&folder).ok()) return entries;
  for (const Named& named : files_in(folder)) {
    if (!is_ours(named)) continue;
    remove_in(folder, named.name);
    entries += is_entry(named);
  }
  return entries;
}

}  // namespace tandem::jit
