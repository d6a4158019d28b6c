#include "src/jit/disk_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string_view>
#include <thread>

#include "include/sageattn.h"
#include "src/jit/little_endian.h"

namespace sageattn::jit {
namespace {

constexpr size_t kMaxFile = 256u << 20;  // no kernel comes near
constexpr char kSuffix[] = ".kernel";
constexpr char kTemporary[] = ".tmp";
constexpr char kLockName[] = "lock";
constexpr time_t kLeftoverAge = 3600;  // seconds; by then nobody is still writing it
constexpr auto kPatience = std::chrono::seconds(120);

constexpr std::array<BadBuild, 0> kBadBuilds{};

std::string environment(const char* name) {
  const char* value = ::secure_getenv(name);
  return value != nullptr ? value : "";
}

std::string file_name(const Digest& key) { return to_hex(key) + kSuffix; }

// Names of publish(), `<64 hex digits>.kernel.<number>.tmp`: the folder may hold other people's
// files.
bool is_temporary(std::string_view name) {
  const auto take = [&](std::string_view characters, size_t count) {
    const size_t length = std::min(name.find_first_not_of(characters), name.size());
    if (length == 0 || (count != 0 && length != count)) return false;
    name.remove_prefix(length);
    return true;
  };
  const auto take_text = [&](std::string_view text) {
    if (!name.starts_with(text)) return false;
    name.remove_prefix(text.size());
    return true;
  };
  return take("0123456789abcdef", 2 * sizeof(Digest)) && take_text(kSuffix) && take_text(".") &&
         take("0123456789", 0) && name == kTemporary;
}

uint64_t random_number() {
  uint8_t bytes[8] = {};
  if (::getrandom(bytes, sizeof bytes, GRND_NONBLOCK) != sizeof bytes) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    return static_cast<uint64_t>(now) * 0x9e3779b97f4a7c15;
  }
  return read_integer<uint64_t>(bytes);
}

// Why what the descriptor refers to must not be used as a folder of code; "" if it may.
std::string distrust(int fd) {
  struct stat info;
  if (::fstat(fd, &info) != 0) return error_text(errno);
  if (info.st_uid != ::geteuid()) return "it belongs to another user";
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) return "others may write to it";
  return "";
}

}  // namespace

std::span<const BadBuild> known_bad_builds() { return kBadBuilds; }

const BadBuild* find_bad_build(std::span<const BadBuild> builds, const KernelCode& code) {
  for (const BadBuild& bad : builds) {
    if (bad.version == code.nvrtc_version &&
        (bad.build[0] == '\0' || code.nvrtc_build == bad.build)) {
      return &bad;
    }
  }
  return nullptr;
}

std::string choose_cache_dir(const std::string& cache_dir) {
  if (!cache_dir.empty()) return cache_dir;
  std::string own = environment("SAGEATTN_CACHE_DIR");
  if (!own.empty()) return own;
  const std::string caches = environment("XDG_CACHE_HOME");
  if (!caches.empty() && caches[0] == '/') return caches + "/sageattn";
  const std::string home = environment("HOME");
  if (!home.empty() && home[0] == '/') return home + "/.cache/sageattn";
  return "";
}

DiskCache::DiskCache(std::string cache_dir, Mode mode, Log log,
                     std::span<const BadBuild> bad_builds)
    : cache_dir_(std::move(cache_dir)),
      mode_(mode),
      log_(std::move(log)),
      bad_builds_(bad_builds) {}

void DiskCache::log_once(const std::string& line, int32_t level) {
  {
    const std::lock_guard lock(mutex_);
    if (!logged_.insert(line).second) return;
  }
  if (log_) log_(level, line);
}

void DiskCache::open_once() {
  if (mode_ == Mode::kOff) {
    off_ = "SAGEATTN_CONTEXT_NO_DISK_CACHE";
    return;
  }
  path_ = choose_cache_dir(cache_dir_);
  if (path_.empty()) {
    off_ = "no folder: neither cache_dir, $SAGEATTN_CACHE_DIR, $XDG_CACHE_HOME nor $HOME";
  } else if (mode_ == Mode::kReadWrite && !make_folders(path_)) {
    off_ = path_ + " cannot be made: " + error_text(errno);
  } else {
    // What is checked is what is used: entries are reached through this descriptor, so that nobody
    // can put another folder, or a link to one, in between.
    FileDescriptor folder(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!folder) {
      off_ = path_ + ": " + error_text(errno);
    } else if (const std::string why = distrust(folder.get()); !why.empty()) {
      off_ = path_ + " is not used: " + why;
    } else {
      folder_ = std::move(folder);
    }
  }
  if (!off_.empty()) log_once("kernel cache off: " + off_);
}

bool DiskCache::open() {
  std::call_once(opened_, [this] { open_once(); });
  return static_cast<bool>(folder_);
}

std::string DiskCache::state() {
  if (!open()) return "off (" + off_ + ")";
  return mode_ == Mode::kRead ? path_ + " (read only)" : path_;
}

std::optional<KernelCode> DiskCache::load(const Digest& key, const std::string& text,
                                          std::string* why) {
  std::string ignored;
  std::string& reason = why != nullptr ? *why : ignored;
  if (!open()) {
    reason = "off";
    return std::nullopt;
  }
  const std::string name = file_name(key);
  // O_NONBLOCK: a pipe of that name must not stop us.
  const FileDescriptor file(
      ::openat(folder_.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file) {
    const int code = errno;
    reason = code == ENOENT ? "no entry" : error_text(code);
    if (code != ENOENT) log_once("kernel cache: " + path_ + "/" + name + ": " + reason);
    return std::nullopt;
  }
  struct stat info;
  Bytes bytes;
  KernelCode code;
  size_t used = 0;
  if (::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    reason = "is not a file";
  } else if (const std::string fault = distrust(file.get()); !fault.empty()) {
    reason = "cannot be trusted: " + fault;
  } else if (!read_all(file.get(), kMaxFile, bytes)) {
    reason = "cannot be read: " + error_text(errno);
  } else if (const char* damage = read_entry(bytes, code, used)) {
    reason = damage;
  } else if (used != bytes.size()) {
    reason = "is too long";
  } else if (code.text != text) {
    reason = "holds another kernel";
  } else if (const BadBuild* bad = find_bad_build(bad_builds_, code)) {
    reason = std::string("comes from an NVRTC that compiles wrongly: ") + bad->why;
  } else {
    return code;
  }
  log_once("kernel cache: " + path_ + "/" + name + " " + reason + "; it is not used");
  return std::nullopt;
}

// One lock file for all keys, in which each key is one byte: no file is left behind for each key.
// Locks of the open file description belong to this descriptor, not to the process, so that two
// contexts of one process exclude each other too; closing it, also by dying, releases them.
bool DiskCache::claim_now(const Digest& key, FileDescriptor& claim) {
  if (!claim) {
    claim = FileDescriptor(
        ::openat(folder_.get(), kLockName, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!claim) return true;
  }
  struct flock range {};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(read_integer<uint32_t>(key.data()) & 0x3fffffff);
  range.l_len = 1;
  if (::fcntl(claim.get(), F_OFD_SETLK, &range) == 0) return true;
  return errno != EAGAIN && errno != EACCES;  // no locks on this file system: go on without
}

std::optional<KernelCode> DiskCache::load_or_claim(const Digest& key, const std::string& text,
                                                   FileDescriptor& claim) {
  if (!open() || mode_ != Mode::kReadWrite) return load(key, text);
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  auto pause = std::chrono::milliseconds(1);
  for (;;) {
    const bool claimed = claim_now(key, claim);
    // After the claim: whoever held it before may have published.
    if (std::optional<KernelCode> code = load(key, text)) return code;
    if (claimed || std::chrono::steady_clock::now() > deadline) return std::nullopt;
    // Where the holder is stuck, this is all that tells why a plan takes so long.
    log_once("kernel cache: waiting up to " + std::to_string(kPatience.count()) +
                 " s for another process or context to compile " + path_ + "/" + file_name(key),
             SAGEATTN_LOG_INFO);
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(20));
  }
}

bool DiskCache::publish(const std::string& name, const Bytes& bytes) {
  const std::string temporary = name + "." + std::to_string(random_number()) + kTemporary;
  FileDescriptor file(::openat(folder_.get(), temporary.c_str(),
                               O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file) return false;
  // Without fsync, a crash of the machine could leave the name with nothing behind it.
  if (write_all(file.get(), bytes.data(), bytes.size()) && ::fsync(file.get()) == 0 &&
      ::renameat(folder_.get(), temporary.c_str(), folder_.get(), name.c_str()) == 0) {
    return true;
  }
  const int code = errno;
  ::unlinkat(folder_.get(), temporary.c_str(), 0);
  errno = code;
  return false;
}

void DiskCache::store(const Digest& key, const KernelCode& code) {
  if (!open() || mode_ != Mode::kReadWrite) return;
  Bytes bytes;
  append_entry(code, bytes);
  if (!publish(file_name(key), bytes)) {
    log_once("kernel cache: cannot write to " + path_ + ": " + error_text(errno));
    return;
  }
  remove_leftovers();
}

// Temporary files of processes that were killed.
void DiskCache::remove_leftovers() {
  FileDescriptor again(::openat(folder_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!again) return;
  const int copy = ::fcntl(again.get(), F_DUPFD_CLOEXEC, 0);
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(copy >= 0 ? ::fdopendir(copy) : nullptr,
                                                   ::closedir);
  if (folder == nullptr) {
    if (copy >= 0) ::close(copy);
    return;
  }
  const time_t now = ::time(nullptr);
  while (const dirent* item = ::readdir(folder.get())) {
    if (!is_temporary(item->d_name)) continue;
    struct stat info;
    if (::fstatat(again.get(), item->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (S_ISREG(info.st_mode) && now - info.st_mtime > kLeftoverAge) {
      ::unlinkat(again.get(), item->d_name, 0);
    }
  }
}

}  // namespace sageattn::jit
