#include "src/util/file.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace sageattn {

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

bool write_all(int fd, const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  while (size > 0) {
    const ssize_t written = ::write(fd, bytes, size);
    if (written < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    bytes += written;
    size -= static_cast<size_t>(written);
  }
  return true;
}

bool read_all(int fd, size_t limit, Bytes& bytes) {
  bytes.clear();
  for (;;) {
    const size_t done = bytes.size();
    bytes.resize(done + (done == 0 ? 64 * 1024 : done));
    const ssize_t count = ::read(fd, bytes.data() + done, bytes.size() - done);
    const int code = errno;
    bytes.resize(done + static_cast<size_t>(std::max<ssize_t>(count, 0)));
    if (count == 0) return true;
    if (count < 0 && code != EINTR) {
      errno = code;
      return false;
    }
    if (bytes.size() > limit) {
      errno = EFBIG;
      return false;
    }
  }
}

bool make_folders(const std::string& path) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string folder = path.substr(0, end);
    // An existing folder may also answer EROFS or EACCES; whether it exists, open() will tell.
    if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
      const int code = errno;
      struct stat info;
      if (::stat(folder.c_str(), &info) != 0) {
        errno = code;
        return false;
      }
    }
    if (end == std::string::npos) return true;
  }
}

std::vector<std::string> list_folder(const std::string& path) {
  std::vector<std::string> names;
  DIR* folder = ::opendir(path.c_str());
  if (folder == nullptr) return names;
  while (const dirent* item = ::readdir(folder)) {
    const std::string name = item->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  ::closedir(folder);
  std::sort(names.begin(), names.end());
  return names;
}

std::string error_text(int code) { return std::generic_category().message(code); }

}  // namespace sageattn
