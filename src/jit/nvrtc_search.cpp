// Where NVRTC may be, and loading it from there.
#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>

#include "src/jit/nvrtc.h"

namespace sageattn::jit {
namespace {

constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};

// Every copy ever loaded, by its dlopen handle. Never freed: copies outlive static destructors.
struct Loaded {
  std::mutex mutex;
  std::map<void*, std::unique_ptr<const Nvrtc>> copies;
};

Loaded& loaded() {
  static auto* const table = new Loaded;
  return *table;
}

std::string environment(const char* name) {
  const char* value = ::secure_getenv(name);
  return value != nullptr ? value : "";
}

bool contains(const std::string& text, const char* piece) {
  return text.find(piece) != std::string::npos;
}

bool is_folder(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

bool is_file(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

// Shorter than dlerror(), which repeats the name and spells out the commonest reason: messages have
// little room.
std::string loader_error(const std::string& name) {
  const char* text = ::dlerror();
  std::string error = text != nullptr ? text : "unknown error";
  // Without the name in front it is a library that this one needs.
  if (error.rfind(name + ": ", 0) != 0) return error;
  return contains(error, "No such file or directory") ? "not found" : error.substr(name.size() + 2);
}

std::string path_of(void* handle, const std::string& fallback) {
  link_map* map = nullptr;
  if (::dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr || map->l_name == nullptr ||
      map->l_name[0] == '\0') {
    return fallback;
  }
  return map->l_name;
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

std::string below(std::string folder, const std::string& name) {
  return folder.append("/").append(name);
}

// NVRTC loads its builtins by soname when it compiles, and does not find them beside itself in
// every kind of installation; once they are in the process, it does.
void load_builtins(const std::string& folder) {
  if (folder.empty()) return;
  for (const std::string& name : list_folder(folder)) {
    if (name.rfind("libnvrtc-builtins.so.", 0) == 0) {
      ::dlopen(below(folder, name).c_str(), RTLD_NOW | RTLD_LOCAL);
    }
  }
  ::dlerror();
}

// The name of a required function that is missing, or null.
const char* resolve(void* handle, NvrtcFunctions& functions) {
  constexpr bool REQUIRED = true;
  constexpr bool OPTIONAL = false;
  const char* missing = nullptr;
#define SAGEATTN_NVRTC(name, need, arguments)                                          \
  functions.name = reinterpret_cast<decltype(functions.name)>(::dlsym(handle, #name)); \
  if (need && functions.name == nullptr && missing == nullptr) missing = #name;
#define SAGEATTN_NVRTC_TEXT SAGEATTN_NVRTC
#include "src/jit/nvrtc.def"
#undef SAGEATTN_NVRTC
#undef SAGEATTN_NVRTC_TEXT
  return missing;
}

class Search {
 public:
  NvrtcSearch result;
  std::string chosen_by;  // what made this search look where it does, as in "nvrtc_path = "

  bool found() const { return result.nvrtc != nullptr; }

  void miss(const std::string& where, const std::string& why) {
    const std::string item = chosen_by + where + ": " + why;
    if (std::find(result.tried.begin(), result.tried.end(), item) == result.tried.end()) {
      result.tried.push_back(item);
    }
  }

  void process() {
    for (const char* name : kNames) {
      if (found()) return;
      if (void* handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) adopt(handle, name);
    }
    ::dlerror();
    if (!found()) miss("this process", "no copy loaded yet");
  }

  void sonames() {
    for (const char* name : kNames) {
      if (!found()) load(name);
    }
  }

  void file(const std::string& path) {
    if (found()) return;
    load_builtins(folder_of(path));
    load(path);
  }

  void folder(const std::string& path) {
    if (found()) return;
    if (!is_folder(path)) return miss(path, "no such folder");
    bool any = false;
    for (const char* name : kNames) {
      const std::string candidate = below(path, name);
      if (found() || !is_file(candidate)) continue;
      any = true;
      file(candidate);
    }
    if (!any) miss(path, "holds no libnvrtc.so.13, libnvrtc.so.12 or libnvrtc.so");
  }

  // Folders `parent`/<name that starts with prefix>`rest`, the last in order first. Returns whether
  // there are any.
  bool folders(const std::string& parent, const std::string& prefix, const std::string& rest) {
    std::vector<std::string> names = list_folder(parent);
    std::reverse(names.begin(), names.end());
    bool any = false;
    for (const std::string& name : names) {
      const std::string path = below(parent, name).append(rest);
      if (name.rfind(prefix, 0) != 0 || !is_folder(path)) continue;
      any = true;
      folder(path);
    }
    return any;
  }

  void toolkits() {
    for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
      const std::string root = environment(variable);
      if (!root.empty()) folder(root + "/lib64");
    }
    folder("/usr/local/cuda/lib64");
    if (!found() && !folders("/usr/local", "cuda-", "/lib64")) {
      miss("/usr/local/cuda-*/lib64", "no such folder");
    }
  }

  // `root`/python3*/{site,dist}-packages: where pip puts the wheels of NVIDIA.
  void wheels(const std::string& root) {
    if (found()) return;
    bool any = false;
    for (const char* packages : {"/site-packages", "/dist-packages"}) {
      for (const char* wheel : {"/nvidia/cu13/lib", "/nvidia/cuda_nvrtc/lib"}) {
        any |= folders(root, "python3", std::string(packages) + wheel);
      }
    }
    if (!any) miss("NVIDIA's wheels in " + root + "/python3*/*-packages", "none");
  }

 private:
  void load(const std::string& name) {
    void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return miss(name, loader_error(name));
    adopt(handle, name);
  }

  // Takes a handle into the table, or says why not. Never closes it: what a library leaves behind
  // when it is unloaded is not worth finding out.
  void adopt(void* handle, const std::string& name) {
    Loaded& table = loaded();
    const auto known = table.copies.find(handle);
    if (known != table.copies.end()) {
      result.nvrtc = known->second.get();
      return;
    }
    NvrtcFunctions functions;
    if (const char* missing = resolve(handle, functions)) {
      return miss(name, std::string("has no ") + missing);
    }
    const std::string path = path_of(handle, name);
    load_builtins(folder_of(path));
    auto copy = std::make_unique<const Nvrtc>(path, functions);
    result.nvrtc = table.copies.emplace(handle, std::move(copy)).first->second.get();
  }
};

void explicit_choice(Search& search, const std::string& path, const char* chosen_by) {
  search.chosen_by = chosen_by;
  char* absolute = ::realpath(path.c_str(), nullptr);
  if (absolute == nullptr) return search.miss(path, "no such file or folder");
  const std::unique_ptr<char, decltype(&std::free)> owner(absolute, &std::free);
  if (is_folder(absolute)) {
    search.folder(absolute);
  } else {
    search.file(absolute);
  }
}

}  // namespace

std::string NvrtcSearch::tried_text() const {
  std::string text;
  for (const std::string& item : tried) text += (text.empty() ? "" : "; ") + item;
  return text;
}

NvrtcSearch find_nvrtc(const std::string& path) {
  Search search;
  const std::lock_guard lock(loaded().mutex);
  if (!path.empty()) {
    explicit_choice(search, path, "nvrtc_path = ");
    return search.result;
  }
  const std::string chosen = environment("SAGEATTN_NVRTC");
  if (!chosen.empty()) {
    explicit_choice(search, chosen, "$SAGEATTN_NVRTC = ");
    return search.result;
  }
  search.process();
  search.sonames();
  search.toolkits();
  for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    const std::string root = environment(variable);
    if (root.empty()) continue;
    search.wheels(root + "/lib");
    search.folder(root + "/lib");
  }
  const std::string user = environment("HOME");
  if (!user.empty()) search.wheels(user + "/.local/lib");
  search.wheels("/usr/local/lib");
  search.wheels("/usr/lib");
  return search.result;
}

}  // namespace sageattn::jit
