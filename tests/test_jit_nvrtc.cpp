// NVRTC for real: finding it, compiling, and the disk cache between cold processes. No GPU.
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "src/jit/nvrtc.h"
#include "src/jit/store.h"
#include "tests/catch.h"
#include "tests/jit_helpers.h"

#if __has_include(<nvrtc.h>)
#include <nvrtc.h>
#define SAGEATTN_HAVE_NVRTC_H 1
#endif

extern char** environ;

using namespace sageattn::jit;
using namespace jit_test;

namespace {

// ---- Declarations ------------------------------------------------------------------------------

#ifdef SAGEATTN_HAVE_NVRTC_H
// nvrtc.h's types as ours: the enum is an int, the handle is a pointer to something else.
template <class T>
struct AsOurs {
  using type = T;
};
template <>
struct AsOurs<nvrtcResult> {
  using type = int;
};
template <>
struct AsOurs<nvrtcProgram> {
  using type = Program;
};
template <>
struct AsOurs<nvrtcProgram*> {
  using type = Program*;
};
template <class Result, class... Arguments>
struct AsOurs<Result (*)(Arguments...)> {
  using type = typename AsOurs<Result>::type (*)(typename AsOurs<Arguments>::type...);
};
static_assert(sizeof(nvrtcResult) == sizeof(int));
#define SAGEATTN_NVRTC(name, need, arguments) \
  static_assert(std::is_same_v<AsOurs<decltype(&name)>::type, decltype(NvrtcFunctions::name)>);
#define SAGEATTN_NVRTC_TEXT SAGEATTN_NVRTC
#include "src/jit/nvrtc.def"
#undef SAGEATTN_NVRTC
#undef SAGEATTN_NVRTC_TEXT
#endif

// ---- A kernel of our own -----------------------------------------------------------------------

const KernelSpec kKernels[] = {
    {"small", "tests/nvrtc/small.cu", "sageattn_small", "80 86 89 90 120", "SCALE=2,3 OFFSET=*",
     false, 12000},
    {"small_own", "tests/nvrtc/small.cu", "sageattn_small", "90a", "SCALE=2 OFFSET=1", true, 12000},
    {"broken", "tests/nvrtc/broken.cu", "sageattn_broken", "80", "", false, 12000},
    {"misnamed", "tests/nvrtc/small.cu", "sageattn_other", "80", "SCALE=2 OFFSET=1", false, 12000},
    {"future", "tests/nvrtc/small.cu", "sageattn_small", "80", "SCALE=2 OFFSET=1", false, 99000},
    {"unknown_arch", "tests/nvrtc/small.cu", "sageattn_small", "990", "SCALE=2 OFFSET=1", false,
     12000},
    {"instruction", "tests/nvrtc/instruction.cu", "sageattn_instruction", "75 80 86 89 90 120",
     "INSTRUCTION=0,1,2", false, 12040},
    {"instruction_own", "tests/nvrtc/instruction.cu", "sageattn_instruction", "90a",
     "INSTRUCTION=0,1,2", false, 12040}};

// Keeps the bytes that SourceFile points to.
class Sources {
 public:
  Sources() {
    add("tests/nvrtc/small.cu", from_file("small.cu"));
    add("tests/nvrtc/small.h", from_file("small.h"));
    add("tests/nvrtc/instruction.cu", from_file("instruction.cu"));
    add("tests/nvrtc/broken.h",
        "#pragma once\n\n__device__ int broken() { return no_such_name; }\n");
    add("tests/nvrtc/broken.cu",
        "#include \"tests/nvrtc/broken.h\"\nextern \"C\" __global__ void sageattn_broken() {}\n");
    for (const SourceFile& source : embedded_sources()) files_.push_back(source);
  }
  std::span<const SourceFile> files() const { return files_; }

 private:
  static std::string from_file(const char* name) {
    const Bytes bytes = read_file(std::string(SAGEATTN_TEST_DIR) + "/nvrtc/" + name);
    return {bytes.begin(), bytes.end()};
  }
  void add(const char* name, const std::string& text) {
    texts_.push_back(std::make_unique<std::string>(text));
    const auto* bytes = reinterpret_cast<const unsigned char*>(texts_.back()->c_str());
    files_.push_back({name, bytes, text.size()});
  }
  std::vector<std::unique_ptr<std::string>> texts_;
  std::vector<SourceFile> files_;
};

const Sources& sources() {
  static const Sources result;
  return result;
}

StoreConfig config(const std::string& cache_dir, uint32_t flags = 0) {
  StoreConfig result;
  result.flags = flags;
  result.cache_dir = cache_dir;
  result.source_id = std::string(64, 'd');
  result.kernels = kKernels;
  result.sources = sources().files();
  return result;
}

KernelRequest request(int arch, int64_t scale = 2, int64_t offset = 1) {
  return {"small", arch, {{"SCALE", scale}, {"OFFSET", offset}}};
}

// Machine (EM_CUDA = 190) and, in the low byte of the flags, or the next one since the ABI of CUDA
// 13, the number of the arch.
bool is_cubin_for(const Bytes& cubin, int arch) {
  if (cubin.size() < 64 || std::memcmp(cubin.data(), "\177ELF", 4) != 0) return false;
  const bool machine = cubin[18] == 190 && cubin[19] == 0;
  return machine && (cubin[48] == arch || cubin[49] == arch);
}

// ---- Loading -----------------------------------------------------------------------------------

TEST_CASE("nvrtc: found, and the same copy each time") {
  const NvrtcSearch first = find_nvrtc("");
  REQUIRE(first.nvrtc != nullptr);
  CHECK(find_nvrtc("").nvrtc == first.nvrtc);
  const Nvrtc& nvrtc = *first.nvrtc;
  INFO(nvrtc.path());
  CHECK(nvrtc.version() >= 11000);
  CHECK(fs::exists(nvrtc.path()));
  // By file and by folder it is the same, however it was found before.
  CHECK(find_nvrtc(nvrtc.path()).nvrtc == first.nvrtc);
  const NvrtcSearch by_folder = find_nvrtc(fs::path(nvrtc.path()).parent_path().string());
  REQUIRE(by_folder.nvrtc != nullptr);
  CHECK(by_folder.nvrtc->version() == nvrtc.version());
  {
    const Variable variable("SAGEATTN_NVRTC", nvrtc.path().c_str());
    CHECK(find_nvrtc("").nvrtc == first.nvrtc);
  }
  // A path that is wrong is not replaced by a search.
  const NvrtcSearch wrong = find_nvrtc("/no/such/place");
  CHECK(wrong.nvrtc == nullptr);
  CHECK(contains(wrong.tried_text(), "/no/such/place: no such file or folder"));
  // Nor is a library that is not NVRTC.
  const NvrtcSearch other = find_nvrtc("/proc/self/exe");
  CHECK(other.nvrtc == nullptr);
  CHECK(other.tried.size() == 1);
}

TEST_CASE("nvrtc: found by many threads at once") {
  std::vector<std::thread> threads;
  std::array<const Nvrtc*, 8> found{};
  std::array<int, 8> versions{};
  for (size_t i = 0; i < found.size(); ++i) {
    threads.emplace_back([&, i] {
      found[i] = find_nvrtc("").nvrtc;
      versions[i] = found[i]->version();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < found.size(); ++i) {
    CHECK(found[i] == found[0]);
    CHECK(versions[i] == versions[0]);
  }
}

// ---- Compiling ---------------------------------------------------------------------------------

TEST_CASE("compile: every arch, cold, without a GPU") {
  const Folder folder;
  KernelStore store(config(folder.path("cache")));
  for (const int arch : {80, 86, 89, 90, 120}) {
    CAPTURE(arch);
    const std::vector<int>& known = store.nvrtc().nvrtc->archs();
    if (std::find(known.begin(), known.end(), arch) == known.end()) {
      const sageattn::Error error = error_of([&] { store.get(request(arch)); });
      CHECK(error.status == SAGEATTN_E_NVRTC_TOO_OLD);
      continue;
    }
    const auto image = store.get(request(arch));
    CHECK(image->origin == SAGEATTN_ORIGIN_COMPILED);
    CHECK(image->compile_ms > 0);
    CHECK(image->entry == "sageattn_small");
    CHECK(is_cubin_for(image->code->cubin, arch));
    CHECK(image->code->registers > 0);
    CHECK(image->code->registers < 64);
    CHECK(image->code->spill_bytes == 0);
    CHECK(image->code->smem_bytes >= 512);  // 1 KiB more is the system's on newer archs
    CHECK(image->code->nvrtc_version == store.nvrtc().nvrtc->version());
    CHECK(image->code->nvrtc_build.rfind("CL-", 0) == 0);
  }
  const auto own = store.get({"small_own", 90, {}});
  CHECK(contains(own->code->text, "option --gpu-architecture=sm_90a\n"));
  CHECK(is_cubin_for(own->code->cubin, 90));
}

TEST_CASE("compile: memory, then disk, with the same bytes") {
  const Folder folder;
  KernelStore store(config(folder.path("cache")));
  const auto compiled = store.get(request(80));
  const auto again = store.get(request(80));
  CHECK(again->origin == SAGEATTN_ORIGIN_MEMORY);
  CHECK(again->compile_ms == 0);
  KernelStore second(config(folder.path("cache")));
  const auto loaded = second.get(request(80));
  CHECK(loaded->origin == SAGEATTN_ORIGIN_DISK);
  CHECK(same(*loaded->code, *compiled->code));
  // Compiled anew, the bytes are the same: the key tells all.
  KernelStore fresh(config("", SAGEATTN_CONTEXT_NO_DISK_CACHE));
  const auto anew = fresh.get(request(80));
  CHECK(anew->origin == SAGEATTN_ORIGIN_COMPILED);
  CHECK(anew->code->cubin == compiled->code->cubin);
  // Read only: nothing new is written.
  KernelStore reader(config(folder.path("cache"), SAGEATTN_CONTEXT_CACHE_READ_ONLY));
  CHECK(reader.get(request(80))->origin == SAGEATTN_ORIGIN_DISK);
  CHECK(reader.get(request(80, 3))->origin == SAGEATTN_ORIGIN_COMPILED);
  KernelStore third(config(folder.path("cache"), SAGEATTN_CONTEXT_NO_JIT));
  CHECK(error_of([&] { third.get(request(80, 3)); }).status == SAGEATTN_E_KERNEL_MISSING);
  CHECK(third.get(request(80))->origin == SAGEATTN_ORIGIN_DISK);
}

TEST_CASE("compile: a damaged entry is compiled again and replaced") {
  const Folder folder;
  KernelStore(config(folder.path())).get(request(80));
  std::string path;
  for (const auto& file : fs::directory_iterator(folder.path())) {
    if (file.path().extension() == ".kernel") path = file.path().string();
  }
  const Bytes good = read_file(path);
  Bytes bad = good;
  bad[bad.size() - 100] ^= 4;
  write_file(path, bad);
  Lines lines;
  StoreConfig logging = config(folder.path());
  logging.log = lines.log();
  CHECK(KernelStore(logging).get(request(80))->origin == SAGEATTN_ORIGIN_COMPILED);
  CHECK(contains(lines.text(), "has a damaged cubin"));
  CHECK(lines.count() == 2);  // and that it was compiled
  CHECK(read_file(path) == good);
  CHECK(KernelStore(logging).get(request(80))->origin == SAGEATTN_ORIGIN_DISK);
}

TEST_CASE("compile: errors say what NVRTC says") {
  Lines lines;
  StoreConfig logging = config("", SAGEATTN_CONTEXT_NO_DISK_CACHE);
  logging.log = lines.log();
  KernelStore store(logging);
  sageattn::Error error = error_of([&] { store.get({"broken", 80, {}}); });
  INFO(error.message);
  CHECK(error.status == SAGEATTN_E_COMPILE);
  CHECK(contains(error.message, "kernel broken for sm_80"));
  CHECK(contains(error.message, "tests/nvrtc/broken.h(3): error: "));
  CHECK(contains(error.message, "no_such_name"));
  CHECK(contains(lines.text(), "tests/nvrtc/broken.h(3): error: "));

  error = error_of([&] { store.get({"misnamed", 80, {}}); });
  CHECK(error.status == SAGEATTN_E_COMPILE);
  CHECK(contains(error.message, "tests/nvrtc/small.cu has no function sageattn_other"));

  error = error_of([&] { store.get({"future", 80, {}}); });
  CHECK(error.status == SAGEATTN_E_NVRTC_TOO_OLD);
  CHECK(contains(error.message, "needs NVRTC 99.0 or newer"));
  error = error_of([&] { store.get({"unknown_arch", 990, {}}); });
  CHECK(error.status == SAGEATTN_E_NVRTC_TOO_OLD);

  const std::array<BadBuild, 1> bad = {{{store.nvrtc().nvrtc->version(), "", "swaps operands"}}};
  logging.bad_builds = bad;
  error = error_of([&] { KernelStore(logging).get(request(80)); });
  CHECK(error.status == SAGEATTN_E_COMPILE);
  CHECK(contains(error.message, "swaps operands"));
}

TEST_CASE("compile: instructions that an arch lacks are refused by name") {
  KernelStore store(config("", SAGEATTN_CONTEXT_NO_DISK_CACHE));
  if (store.nvrtc().nvrtc->version() < 12080) return;  // does not know all of these archs
  struct Row {
    const char* kernel;
    int arch, instruction;
    const char* lacks;  // what the error names; null: the arch has it
  };
  const Row rows[] = {
      {"instruction", 80, 0, nullptr},     {"instruction", 75, 0, ".m16n8k64"},
      {"instruction", 89, 1, nullptr},     {"instruction", 120, 1, nullptr},
      {"instruction", 80, 1, "FP8"},       {"instruction", 86, 1, "FP8"},
      {"instruction_own", 90, 2, nullptr}, {"instruction", 80, 2, "wgmma"},
      {"instruction", 90, 2, "wgmma"},   // sm_90 without its own instructions
      {"instruction", 120, 2, "wgmma"},  // a later arch has not those of sm_90a
  };
  for (const Row& row : rows) {
    const KernelRequest wanted = {row.kernel, row.arch, {{"INSTRUCTION", row.instruction}}};
    const sageattn::Error error = error_of([&] { store.get(wanted); });
    INFO(row.kernel << " " << row.arch << " " << row.instruction << ": " << error.message);
    if (row.lacks == nullptr) {
      CHECK(error.status == SAGEATTN_OK);
      continue;
    }
    CHECK(error.status == SAGEATTN_E_COMPILE);
    CHECK(contains(error.message, "kernel instruction for sm_" + std::to_string(row.arch)));
    CHECK(contains(error.message, row.lacks));
  }
}

TEST_CASE("compile: kernels that are not made for sm_80 do not compile for it") {
  for (const KernelSpec& kernel : kernel_list()) {
    if (!arch_name(kernel, 80).empty()) continue;
    std::array<KernelSpec, 1> forced = {kernel};
    forced[0].archs = "80";
    StoreConfig forcing = config("", SAGEATTN_CONTEXT_NO_DISK_CACHE);
    forcing.kernels = forced;
    KernelStore store(forcing);
    const auto macros = macro_sets(kernel).front();
    const sageattn::Error error = error_of([&] { store.get({kernel.name, 80, macros}); });
    INFO(kernel.name << ": " << error.message);
    if (error.status == SAGEATTN_E_NVRTC_TOO_OLD) continue;
    CHECK(error.status == SAGEATTN_E_COMPILE);
    CHECK(contains(error.message, kernel.name + std::string(" for sm_80")));
  }
}

TEST_CASE("compile: threads that want one kernel compile it once; others need not wait") {
  for (const uint32_t flags : {0u, uint32_t{SAGEATTN_CONTEXT_NO_DISK_CACHE}}) {
    const Folder folder;
    KernelStore store(config(folder.path(), flags));
    std::array<std::shared_ptr<const KernelImage>, 12> images;
    std::vector<std::thread> threads;
    for (size_t i = 0; i < images.size(); ++i) {
      threads.emplace_back(
          [&, i] { images[i] = store.get(request(80, 2, static_cast<int64_t>(i % 3))); });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t kernel = 0; kernel < 3; ++kernel) {
      int compiled = 0;
      for (size_t i = kernel; i < images.size(); i += 3) {
        compiled += images[i]->origin == SAGEATTN_ORIGIN_COMPILED;
        CHECK(images[i]->code == images[kernel]->code);
      }
      CHECK(compiled == 1);
    }
    // A failure reaches everyone who waited.
    threads.clear();
    std::array<int32_t, 4> status{};
    for (int32_t& one : status) {
      threads.emplace_back([&] { one = error_of([&] { store.get({"broken", 80, {}}); }).status; });
    }
    for (std::thread& thread : threads) thread.join();
    for (const int32_t one : status) CHECK(one == SAGEATTN_E_COMPILE);
  }
}

TEST_CASE("compile: several at once, each once, and a failure is the caller's") {
  const Folder folder;
  KernelStore store(config(folder.path()));
  std::vector<KernelRequest> requests;
  for (int i = 0; i < 6; ++i) requests.push_back(request(80, 2, i % 3));
  const auto images = store.get_all(requests);
  int compiled = 0;
  for (size_t i = 0; i < images.size(); ++i) {
    compiled += images[i]->origin == SAGEATTN_ORIGIN_COMPILED;
    CHECK(images[i]->code == images[i % 3]->code);
    CHECK(contains(images[i]->code->text, "option -DOFFSET=" + std::to_string(i % 3) + "\n"));
  }
  CHECK(compiled == 3);
  requests.insert(requests.begin() + 1, {"broken", 80, {}});
  requests.push_back(request(86));
  CHECK(error_of([&] { store.get_all(requests); }).status == SAGEATTN_E_COMPILE);
}

TEST_CASE("compile: NVRTC's own cache is not asked") {
  // With a driver, NVRTC would answer the second time without ptxas's figures.
  for (int round = 0; round < 2; ++round) {
    KernelStore store(config("", SAGEATTN_CONTEXT_NO_DISK_CACHE));
    CHECK(store.get(request(80))->code->registers > 0);
  }
}

// ---- Processes ---------------------------------------------------------------------------------

struct Process {
  pid_t id = 0;
  std::string result_path, output_path;

  // What it wrote as its result; fails if it printed anything.
  std::string wait() const {
    int status = 0;
    REQUIRE(::waitpid(id, &status, 0) == id);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    const Bytes output = read_file(output_path);
    CHECK(std::string(output.begin(), output.end()).empty());
    const Bytes result = read_file(result_path);
    return {result.begin(), result.end()};
  }
};

// This program again, as nvrtc_worker(): its memory is cold, and NVRTC is not loaded.
Process start(const Folder& folder, const char* task, int number = 0) {
  Process process;
  const std::string cache = folder.path("cache");
  process.result_path = folder.path(task + std::string(".result") + std::to_string(number));
  process.output_path = folder.path(task + std::string(".output") + std::to_string(number));
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_addopen(&files, 1, process.output_path.c_str(), O_WRONLY | O_CREAT,
                                     0600);
  ::posix_spawn_file_actions_adddup2(&files, 1, 2);
  const char* arguments[] = {"test", "--worker", task, cache.c_str(), process.result_path.c_str(),
                             nullptr};
  REQUIRE(::posix_spawn(&process.id, "/proc/self/exe", &files, nullptr,
                        const_cast<char* const*>(arguments), environ) == 0);
  ::posix_spawn_file_actions_destroy(&files);
  return process;
}

bool nvrtc_loaded() {
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) {
    if (::dlopen(name, RTLD_LAZY | RTLD_NOLOAD) != nullptr) return true;
  }
  return false;
}

TEST_CASE("processes: 16 with a cold cache compile each kernel once") {
  const Folder folder;
  std::vector<Process> processes;
  for (int i = 0; i < 16; ++i) processes.push_back(start(folder, "two", i));
  int compiled = 0;
  int loaded = 0;
  for (const Process& process : processes) {
    const std::string result = process.wait();
    INFO(result);
    REQUIRE(result.size() == 2);
    for (const char origin : result) {
      compiled += origin == '0' + SAGEATTN_ORIGIN_COMPILED;
      loaded += origin == '0' + SAGEATTN_ORIGIN_DISK;
    }
  }
  CHECK(compiled == 2);
  CHECK(loaded == 30);
}

TEST_CASE("processes: a hit does not load NVRTC, and nothing is printed") {
  const Folder folder;
  CHECK(start(folder, "one").wait() == "4loaded");
  CHECK(start(folder, "one").wait() == "3not loaded");
  CHECK(start(folder, "broken").wait() == "401");
  CHECK(start(folder, "missing").wait() == "203");
}

TEST_CASE("processes: killed while compiling, they hold up nobody") {
  const Folder folder;
  for (int round = 0; round < 5; ++round) {
    const Process victim = start(folder, "two");
    std::this_thread::sleep_for(std::chrono::milliseconds(30 * round));
    ::kill(victim.id, SIGKILL);
    ::waitpid(victim.id, nullptr, 0);
    fs::remove(victim.result_path);
    fs::remove(victim.output_path);
  }
  CHECK(start(folder, "two").wait().size() == 2);
}

TEST_CASE("processes: some of those that wait for each other are killed, the others go on") {
  const Folder folder;
  std::mt19937 random(5);
  for (int round = 0; round < 6; ++round) {
    std::error_code ignored;
    fs::remove_all(folder.path("cache"), ignored);
    std::vector<Process> processes;
    for (int i = 0; i < 8; ++i) processes.push_back(start(folder, "two", i));
    const auto started = std::chrono::steady_clock::now();
    for (size_t i = 0; i < 4; ++i) {  // one of them holds the claim, or is publishing
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 60));
      ::kill(processes[i].id, SIGKILL);
    }
    for (size_t i = 0; i < 4; ++i) ::waitpid(processes[i].id, nullptr, 0);
    for (size_t i = 4; i < processes.size(); ++i) {
      const std::string result = processes[i].wait();
      INFO(result);
      CHECK(result.size() == 2);
      CHECK(result.find_first_not_of("34") == std::string::npos);
    }
    // Far below the two minutes after which a holder counts as stuck.
    CHECK(std::chrono::steady_clock::now() - started < std::chrono::seconds(60));
    for (const Process& process : processes) {
      fs::remove(process.result_path);
      fs::remove(process.output_path);
    }
    CHECK(start(folder, "two").wait() == "33");
  }
}

TEST_CASE("processes: bad entries are misses to all, and replaced") {
  const Folder folder;
  CHECK(start(folder, "two").wait() == "44");
  std::vector<std::string> paths;
  for (const auto& file : fs::directory_iterator(folder.path("cache"))) {
    if (file.path().extension() == ".kernel") paths.push_back(file.path().string());
  }
  REQUIRE(paths.size() == 2);
  const Bytes good[] = {read_file(paths[0]), read_file(paths[1])};
  using Change = Bytes (*)(const Bytes& entry, const Bytes& other);
  const Change changes[] = {
      [](const Bytes& entry, const Bytes&) {
        return Bytes(entry.begin(), entry.begin() + static_cast<std::ptrdiff_t>(entry.size() / 2));
      },
      [](const Bytes& entry, const Bytes&) {
        Bytes bytes = entry;
        bytes[bytes.size() - 200] ^= 1;
        return bytes;
      },
      [](const Bytes&, const Bytes& other) { return other; },
      [](const Bytes& entry, const Bytes&) {  // of another build
        Bytes bytes;
        KernelCode code;
        size_t used = 0;
        REQUIRE(read_entry(entry, code, used) == nullptr);
        code.text[code.text.find(std::string(64, 'd'))] = 'e';
        append_entry(code, bytes);
        return bytes;
      },
  };
  for (const Change change : changes) {
    write_file(paths[0], change(good[0], good[1]));
    write_file(paths[1], change(good[1], good[0]));
    std::vector<Process> processes;
    for (int i = 0; i < 4; ++i) processes.push_back(start(folder, "two", i));
    int compiled = 0;
    for (const Process& process : processes) {
      const std::string result = process.wait();
      INFO(result);
      CHECK(result.find_first_not_of("34") == std::string::npos);
      compiled += static_cast<int>(std::count(result.begin(), result.end(), '4'));
    }
    CHECK(compiled == 2);
    CHECK(read_file(paths[0]) == good[0]);
    CHECK(read_file(paths[1]) == good[1]);
  }
}

}  // namespace

int nvrtc_worker(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string task = argv[0];
  std::string result;
  StoreConfig worker = config(argv[1]);
  if (task == "missing") worker.nvrtc_path = "/no/such/place";
  KernelStore store(worker);
  try {
    if (task == "broken") store.get({"broken", 80, {}});
    if (task == "missing") store.get(request(89));
    result += std::to_string(store.get(request(80))->origin);
    if (task == "two") result += std::to_string(store.get(request(86))->origin);
    if (task == "one") result += nvrtc_loaded() ? "loaded" : "not loaded";
  } catch (const sageattn::Error& error) {
    result = std::to_string(error.status);
  }
  write_file(argv[2], Bytes(result.begin(), result.end()));
  return 0;
}
