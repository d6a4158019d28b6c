// The store of kernels as far as it needs no compiler. Kernels come from blobs and from disk here;
// tests/test_jit_nvrtc.cpp compiles some.
#include <array>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "src/jit/blob.h"
#include "src/jit/options.h"
#include "src/jit/store.h"
#include "tests/catch.h"
#include "tests/jit_helpers.h"

using namespace sageattn::jit;
using namespace jit_test;
using sageattn::to_hex;

namespace {

const std::string kId(64, 'a');
const KernelSpec kKernels[] = {
    {"k", "ptx/kernels/k.cu", "sageattn_k", "80 90a", "D=64,128", false, 12000},
    {"l", "ptx/kernels/none.cu", "sageattn_l", "80", "", true, 12000}};
const unsigned char kText[] = "";
const SourceFile kSources[] = {{"ptx/kernels/k.cu", kText, 0}};
const KernelRequest kRequest = {"k", 90, {{"D", 64}}};

StoreConfig config(const Folder& folder, uint32_t flags = 0) {
  StoreConfig result;
  result.flags = flags;
  result.cache_dir = folder.path("cache");
  result.nvrtc_path = folder.path("no-nvrtc");
  result.source_id = kId;
  result.kernels = kKernels;
  result.sources = kSources;
  return result;
}

KernelCode code_of(const KernelRequest& request, const std::string& id = kId) {
  const KernelSpec& kernel = find_kernel(kKernels, request.kernel);
  const std::string arch = arch_name(kernel, request.arch);
  const auto macros = resolve_macros(kernel, request.macros);
  return sample_code(key_text(id, kernel, arch, compile_options(kernel, arch, macros)));
}

Bytes blob_of(const KernelCode& code) {
  const std::shared_ptr<const KernelCode> kernels[] = {std::make_shared<KernelCode>(code)};
  return write_blob(kernels, kId);
}

void put_on_disk(const Folder& folder, const KernelCode& code) {
  DiskCache cache(folder.path("cache"), DiskCache::Mode::kReadWrite, {}, {});
  cache.store(code.key(), code);
}

TEST_CASE("store: memory before blobs before disk") {
  const Folder folder;
  const KernelCode code = code_of(kRequest);
  put_on_disk(folder, code);

  KernelStore from_disk(config(folder));
  auto image = from_disk.get(kRequest);
  CHECK(image->origin == SAGEATTN_ORIGIN_DISK);
  CHECK(same(*image->code, code));
  CHECK(image->entry == "sageattn_k");
  CHECK(image->compile_ms == 0);
  const auto again = from_disk.get(kRequest);
  CHECK(again->origin == SAGEATTN_ORIGIN_MEMORY);
  CHECK(again->code == image->code);

  KernelStore from_blob(config(folder));
  from_blob.import_blob(blob_of(code));
  CHECK(from_blob.imported_count() == 1);
  image = from_blob.get(kRequest);
  CHECK(image->origin == SAGEATTN_ORIGIN_BLOB);
  CHECK(from_blob.get(kRequest)->origin == SAGEATTN_ORIGIN_MEMORY);

  KernelStore without_disk(config(folder, SAGEATTN_CONTEXT_NO_DISK_CACHE));
  CHECK(error_of([&] { without_disk.get(kRequest); }).status == SAGEATTN_E_NVRTC_NOT_FOUND);
  KernelStore read_only(config(folder, SAGEATTN_CONTEXT_CACHE_READ_ONLY));
  CHECK(read_only.get(kRequest)->origin == SAGEATTN_ORIGIN_DISK);
}

TEST_CASE("store: a blob carries the kernels of a plan to a context that must not compile") {
  const Folder folder;
  put_on_disk(folder, code_of(kRequest));
  put_on_disk(folder, code_of({"l", 80, {}}));
  KernelStore writer(config(folder));
  const std::shared_ptr<const KernelImage> images[] = {writer.get(kRequest),
                                                       writer.get({"l", 80, {}})};
  const Bytes blob = writer.export_blob(images);

  KernelStore reader(config(folder, SAGEATTN_CONTEXT_NO_JIT | SAGEATTN_CONTEXT_NO_DISK_CACHE));
  CHECK(error_of([&] { reader.get(kRequest); }).status == SAGEATTN_E_KERNEL_MISSING);
  Bytes damaged = blob;
  damaged[damaged.size() / 2] ^= 1;
  CHECK(error_of([&] { reader.import_blob(damaged); }).status == SAGEATTN_E_BAD_BLOB);
  CHECK(reader.imported_count() == 0);
  reader.import_blob(blob);
  reader.import_blob(blob);
  CHECK(reader.imported_count() == 2);
  for (const auto& image : images) {
    const KernelRequest request = image == images[0] ? kRequest : KernelRequest{"l", 80, {}};
    const auto found = reader.get(request);
    CHECK(found->origin == SAGEATTN_ORIGIN_BLOB);
    CHECK(same(*found->code, *image->code));
  }
}

TEST_CASE("store: NO_JIT says which kernel is missing and where it was looked for") {
  const Folder folder;
  KernelStore store(config(folder, SAGEATTN_CONTEXT_NO_JIT));
  put_on_disk(folder, code_of({"k", 90, {{"D", 128}}}));
  const auto check = [&](KernelStore& from, const std::vector<std::string>& words) {
    const sageattn::Error error = error_of([&] { from.get(kRequest); });
    INFO(error.message);
    CHECK(error.status == SAGEATTN_E_KERNEL_MISSING);
    for (const std::string& word : words) CHECK(contains(error.message, word));
  };
  const std::string file = to_hex(code_of(kRequest).key()) + ".kernel";
  check(store, {"kernel k for sm_90a (D=64)", "NO_JIT", "0 imported", folder.path("cache"),
                file + ": no entry"});
  write_file(folder.path("cache") + "/" + file, {1, 2, 3});
  check(store, {file + ": is cut short"});
  KernelStore no_disk(config(folder, SAGEATTN_CONTEXT_NO_JIT | SAGEATTN_CONTEXT_NO_DISK_CACHE));
  no_disk.import_blob(blob_of(code_of({"k", 80, {{"D", 64}}})));
  check(no_disk, {"1 imported", "off (SAGEATTN_CONTEXT_NO_DISK_CACHE)"});
  // Nothing is remembered of a failure.
  put_on_disk(folder, code_of(kRequest));
  CHECK(store.get(kRequest)->origin == SAGEATTN_ORIGIN_DISK);
}

TEST_CASE("store: without NVRTC, the error says what was tried") {
  const Folder folder;
  KernelStore store(config(folder));
  sageattn::Error error = error_of([&] { store.get(kRequest); });
  INFO(error.message);
  CHECK(error.status == SAGEATTN_E_NVRTC_NOT_FOUND);
  CHECK(contains(error.message, "kernel k for sm_90a (D=64)"));
  CHECK(contains(error.message, "nvrtc_path = " + folder.path("no-nvrtc")));

  StoreConfig searching = config(folder);
  searching.nvrtc_path = "";
  const std::string nothing = folder.path("nothing");
  const Variable variable("SAGEATTN_NVRTC", nothing.c_str());
  KernelStore by_variable(searching);
  error = error_of([&] { by_variable.get(kRequest); });
  CHECK(error.status == SAGEATTN_E_NVRTC_NOT_FOUND);
  CHECK(contains(error.message, "$SAGEATTN_NVRTC = " + nothing));

  // It is named as well where there is something, but no NVRTC.
  fs::create_directory(nothing);
  CHECK(contains(by_variable.nvrtc().tried_text(), "$SAGEATTN_NVRTC = " + nothing + ": holds no"));
  write_file(nothing + "/libnvrtc.so", {'x'});
  CHECK(contains(by_variable.nvrtc().tried_text(),
                 "$SAGEATTN_NVRTC = " + nothing + "/libnvrtc.so: "));

  // A library that is something else, and a file that is no library.
  searching.nvrtc_path = folder.path("libnvrtc.so");
  write_file(searching.nvrtc_path, {'x'});
  KernelStore no_library(searching);
  error = error_of([&] { no_library.get(kRequest); });
  INFO(error.message);
  CHECK(contains(error.message, searching.nvrtc_path));
  CHECK(no_library.nvrtc().nvrtc == nullptr);
  CHECK(no_library.nvrtc().tried.size() == 1);
  searching.nvrtc_path = folder.path();
  KernelStore by_folder(searching);
  CHECK(contains(by_folder.nvrtc().tried_text(), folder.path("libnvrtc.so")));
}

TEST_CASE("store: several at once, each from where it is, or the first error") {
  const Folder folder;
  const KernelRequest requests[] = {{"k", 80, {{"D", 64}}}, {"l", 80, {}}, kRequest, {"l", 80, {}}};
  KernelStore store(config(folder));
  CHECK(store.get_all({}).empty());
  put_on_disk(folder, code_of(requests[1]));
  put_on_disk(folder, code_of(requests[2]));
  const sageattn::Error error = error_of([&] { store.get_all(requests); });
  CHECK(error.status == SAGEATTN_E_NVRTC_NOT_FOUND);
  CHECK(contains(error.message, "kernel k for sm_80 (D=64)"));
  store.import_blob(blob_of(code_of(requests[0])));
  const auto images = store.get_all(requests);
  REQUIRE(images.size() == 4);
  for (size_t i = 0; i < images.size(); ++i) CHECK(same(*images[i]->code, code_of(requests[i])));
  CHECK(images[0]->origin == SAGEATTN_ORIGIN_BLOB);
  for (const auto& image : store.get_all(requests)) CHECK(image->origin == SAGEATTN_ORIGIN_MEMORY);
  CHECK(read_blob(store.export_blob(), kId).size() == 3);
  KernelStore reader(config(folder, SAGEATTN_CONTEXT_NO_JIT | SAGEATTN_CONTEXT_NO_DISK_CACHE));
  CHECK(read_blob(reader.export_blob(), kId).empty());
  reader.import_blob(store.export_blob());
  for (const auto& image : reader.get_all(requests)) CHECK(image->origin != SAGEATTN_ORIGIN_DISK);
  const KernelRequest nonsense[] = {kRequest, {"none", 80, {}}};
  CHECK(error_of([&] { store.get_all(nonsense); }).status == SAGEATTN_E_INTERNAL);
}

TEST_CASE("store: requests that make no sense") {
  const Folder folder;
  KernelStore store(config(folder));
  CHECK(error_of([&] { store.get({"none", 80, {}}); }).status == SAGEATTN_E_INTERNAL);
  CHECK(error_of([&] { store.get({"k", 80, {}}); }).status == SAGEATTN_E_INTERNAL);
  CHECK(error_of([&] { store.get({"k", 80, {{"E", 1}}}); }).status == SAGEATTN_E_INTERNAL);
  CHECK(error_of([&] { store.get({"l", 80, {}}); }).status == SAGEATTN_E_INTERNAL);
  const sageattn::Error error = error_of([&] { store.get({"k", 86, {{"D", 64}}}); });
  CHECK(error.status == SAGEATTN_E_UNSUPPORTED);
  CHECK(contains(error.message, "sm_86"));
}

TEST_CASE("store: blobs of a bad compiler are refused") {
  const Folder folder;
  const std::array<BadBuild, 1> bad = {{{12080, "", "swaps operands"}}};
  StoreConfig rejecting = config(folder);
  rejecting.bad_builds = bad;
  KernelStore store(rejecting);
  const sageattn::Error error = error_of([&] { store.import_blob(blob_of(code_of(kRequest))); });
  CHECK(error.status == SAGEATTN_E_BAD_BLOB);
  CHECK(contains(error.message, "swaps operands"));
}

TEST_CASE("store: many threads, hits and misses") {
  const Folder folder;
  put_on_disk(folder, code_of(kRequest));
  KernelStore store(config(folder));
  std::vector<std::thread> threads;
  std::array<int, 8> good{};
  for (size_t i = 0; i < good.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 50; ++round) {
        good[i] += store.get(kRequest)->code->registers == 168;
        const auto error = error_of([&] { store.get({"k", 80, {{"D", 64}}}); });
        good[i] += error.status == SAGEATTN_E_NVRTC_NOT_FOUND;
        store.import_blob(blob_of(code_of({"l", 80, {}})));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int count : good) CHECK(count == 100);
}

}  // namespace
