// The disk cache: which folder, whom it trusts, and that nothing found there can do harm.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "src/jit/disk_cache.h"
#include "tests/catch.h"
#include "tests/jit_helpers.h"

using namespace sageattn::jit;
using namespace jit_test;
using sageattn::FileDescriptor;
using sageattn::to_hex;
using Mode = DiskCache::Mode;

namespace {

const KernelCode kCode = sample_code("format 1\nsource_id x\nkernel k\n");

std::string entry_path(const Folder& folder, const KernelCode& code = kCode) {
  return folder.path(to_hex(code.key()) + ".kernel");
}

bool holds(DiskCache& cache, const KernelCode& code = kCode) {
  const auto found = cache.load(code.key(), code.text);
  return found && same(*found, code);
}

TEST_CASE("disk cache: choice of the folder") {
  struct Row {
    const char *cache_dir, *own, *xdg, *home, *expected;
  };
  const Row rows[] = {
      {"/a", "/b", "/c", "/d", "/a"},
      {"rel", "/b", "/c", "/d", "rel"},
      {"", "/b", "/c", "/d", "/b"},
      {"", "rel", "/c", "/d", "rel"},
      {"", nullptr, "/c", "/d", "/c/sageattn"},
      {"", "", "/c", "/d", "/c/sageattn"},
      {"", nullptr, "rel", "/d", "/d/.cache/sageattn"},
      {"", nullptr, "", "/d", "/d/.cache/sageattn"},
      {"", nullptr, nullptr, "/d", "/d/.cache/sageattn"},
      {"", nullptr, nullptr, "rel", ""},
      {"", nullptr, nullptr, "", ""},
      {"", nullptr, nullptr, nullptr, ""},
  };
  for (const Row& row : rows) {
    const Variable own("SAGEATTN_CACHE_DIR", row.own);
    const Variable xdg("XDG_CACHE_HOME", row.xdg);
    const Variable home("HOME", row.home);
    INFO(row.expected);
    CHECK(choose_cache_dir(row.cache_dir) == row.expected);
    if (row.expected[0] == '\0') {
      Lines lines;
      DiskCache cache(row.cache_dir, Mode::kReadWrite, lines.log(), {});
      cache.store(kCode.key(), kCode);
      CHECK_FALSE(holds(cache));
      CHECK(contains(cache.state(), "off (no folder"));
      CHECK(lines.count() == 1);
      CHECK(contains(lines.text(), "kernel cache off: no folder"));
    }
  }
}

TEST_CASE("disk cache: folders are made for nobody else, and only when needed") {
  const Folder folder;
  const std::string path = folder.path("not/yet/there");
  DiskCache reader(path, Mode::kRead, {}, {});
  CHECK_FALSE(holds(reader));
  CHECK(contains(reader.state(), "off ("));
  DiskCache idle(path, Mode::kReadWrite, {}, {});
  CHECK_FALSE(fs::exists(folder.path("not")));

  const mode_t mask = ::umask(0);
  DiskCache cache(path, Mode::kReadWrite, {}, {});
  cache.store(kCode.key(), kCode);
  ::umask(mask);
  CHECK(holds(cache));
  CHECK(cache.state() == path);
  for (const char* made : {"not", "not/yet", "not/yet/there"}) {
    CHECK(fs::status(folder.path(made)).permissions() == fs::perms::owner_all);
  }
  for (const auto& file : fs::directory_iterator(path)) {
    CHECK(file.status().permissions() == (fs::perms::owner_read | fs::perms::owner_write));
  }
  DiskCache again(path, Mode::kRead, {}, {});
  CHECK(holds(again));
  CHECK(again.state() == path + " (read only)");
}

TEST_CASE("disk cache: folders that others control are not used") {
  const Folder folder;
  {
    DiskCache cache(folder.path(), Mode::kReadWrite, {}, {});
    cache.store(kCode.key(), kCode);
    REQUIRE(holds(cache));
  }
  const auto refused = [&](const std::string& path, const char* why) {
    Lines lines;
    DiskCache cache(path, Mode::kReadWrite, lines.log(), {});
    CHECK_FALSE(holds(cache));
    CHECK_FALSE(holds(cache));
    cache.store(kCode.key(), kCode);
    INFO(cache.state());
    CHECK(contains(cache.state(), why));
    CHECK(lines.count() == 1);
    CHECK(contains(lines.text(), why));
  };
  for (const mode_t mode : {0720, 0702, 0777, 01777}) {
    REQUIRE(::chmod(folder.path().c_str(), mode) == 0);
    refused(folder.path(), "others may write to it");
  }
  REQUIRE(::chmod(folder.path().c_str(), 0755) == 0);
  fs::create_symlink(folder.path(), folder.path("link"));
  {
    DiskCache readable(folder.path(), Mode::kReadWrite, {}, {});
    CHECK(holds(readable));
    DiskCache linked(folder.path("link"), Mode::kReadWrite, {}, {});
    CHECK(holds(linked));
  }
  write_file(folder.path("file"), {1});
  refused(folder.path("file"), "file: ");
  refused(folder.path("file/below"), "file/below cannot be made");
  if (::geteuid() == 0) {
    REQUIRE(::chown(entry_path(folder).c_str(), 12345, 12345) == 0);
    DiskCache cache(folder.path(), Mode::kReadWrite, {}, {});
    CHECK_FALSE(holds(cache));
    REQUIRE(::chown(folder.path().c_str(), 12345, 12345) == 0);
    refused(folder.path(), "another user");
    fs::create_symlink(folder.path(), folder.path("link2"));
    refused(folder.path("link2"), "another user");
    REQUIRE(::chown(folder.path().c_str(), 0, 0) == 0);
  }
}

TEST_CASE("disk cache: bad entries are misses, logged once, and replaced") {
  const Folder folder;
  const std::string path = entry_path(folder);
  {
    DiskCache cache(folder.path(), Mode::kReadWrite, {}, {});
    cache.store(kCode.key(), kCode);
  }
  const Bytes good = read_file(path);
  const auto check = [&](const char* why) {
    INFO(why);
    Lines lines;
    DiskCache cache(folder.path(), Mode::kReadWrite, lines.log(), {});
    std::string reason;
    CHECK_FALSE(cache.load(kCode.key(), kCode.text, &reason));
    CHECK(contains(reason, why));
    CHECK_FALSE(holds(cache));
    CHECK(lines.count() == 1);
    cache.store(kCode.key(), kCode);
    CHECK(holds(cache));
    CHECK(read_file(path) == good);
    CHECK(lines.count() == 1);
  };
  for (const size_t size : {size_t{0}, size_t{1}, size_t{100}, size_t{200}, good.size() - 1}) {
    write_file(path, Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)));
    check("is cut short");
  }
  for (size_t at = 0; at < good.size(); at += 37) {
    Bytes bytes = good;
    bytes[at] ^= 0x10;
    write_file(path, bytes);
    check("");
  }
  Bytes longer = good;
  longer.push_back(0);
  write_file(path, longer);
  check("is too long");
  Bytes foreign;
  append_entry(sample_code("format 1\nsource_id y\nkernel k\n"), foreign);
  write_file(path, foreign);
  check("holds another kernel");
  write_file(path, Bytes(3000, 'x'));
  check("is not a kernel");
  write_file(path, good);
  REQUIRE(::chmod(path.c_str(), 0602) == 0);
  check("cannot be trusted: others may write to it");
  fs::remove(path);
  fs::create_symlink("/dev/zero", path);
  check("");
  fs::remove(path);
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  check("is not a file");
  // A folder in the way cannot be replaced. That is no error either.
  fs::remove(path);
  fs::create_directory(path);
  DiskCache cache(folder.path(), Mode::kReadWrite, {}, {});
  cache.store(kCode.key(), kCode);
  CHECK_FALSE(holds(cache));
}

TEST_CASE("disk cache: entries of a bad compiler are misses") {
  const Folder folder;
  const std::array<BadBuild, 1> exact = {{{12080, "CL-1234", "swaps operands"}}};
  const std::array<BadBuild, 1> whole = {{{12080, "", "swaps operands"}}};
  const std::array<BadBuild, 2> others = {{{12080, "CL-1235", "x"}, {12090, "", "x"}}};
  DiskCache cache(folder.path(), Mode::kReadWrite, {}, others);
  cache.store(kCode.key(), kCode);
  CHECK(holds(cache));
  for (const auto& table : {exact, whole}) {
    DiskCache rejecting(folder.path(), Mode::kReadWrite, {}, table);
    std::string why;
    CHECK_FALSE(rejecting.load(kCode.key(), kCode.text, &why));
    CHECK(contains(why, "swaps operands"));
  }
}

TEST_CASE("disk cache: modes, and a folder that vanishes") {
  const Folder folder;
  Lines lines;
  DiskCache off(folder.path(), Mode::kOff, lines.log(), {});
  off.store(kCode.key(), kCode);
  CHECK(contains(off.state(), "SAGEATTN_CONTEXT_NO_DISK_CACHE"));
  DiskCache reader(folder.path(), Mode::kRead, lines.log(), {});
  reader.store(kCode.key(), kCode);
  FileDescriptor claim;
  CHECK_FALSE(reader.load_or_claim(kCode.key(), kCode.text, claim));
  CHECK(fs::is_empty(folder.path()));

  DiskCache writer(folder.path("sub"), Mode::kReadWrite, lines.log(), {});
  CHECK_FALSE(writer.load_or_claim(kCode.key(), kCode.text, claim));
  fs::remove_all(folder.path("sub"));
  writer.store(kCode.key(), kCode);
  writer.store(kCode.key(), kCode);
  CHECK_FALSE(holds(writer));
  CHECK(contains(lines.text(), "cannot write to"));
}

TEST_CASE("disk cache: a claim is waited for, and given up with its holder") {
  const Folder folder;
  DiskCache cache(folder.path(), Mode::kReadWrite, {}, {});
  FileDescriptor claim;
  REQUIRE_FALSE(cache.load_or_claim(kCode.key(), kCode.text, claim));
  // Another key is free.
  FileDescriptor other;
  CHECK_FALSE(cache.load_or_claim(sample_code("b").key(), "b", other));

  const auto started = std::chrono::steady_clock::now();
  std::thread worker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    cache.store(kCode.key(), kCode);  // and still holds the claim
  });
  Lines lines;
  DiskCache second(folder.path(), Mode::kReadWrite, lines.log(), {});
  FileDescriptor none;
  const auto found = second.load_or_claim(kCode.key(), kCode.text, none);
  worker.join();
  CHECK(lines.count() == 1);
  CHECK(contains(lines.text(), "waiting up to 120 s"));
  CHECK(contains(lines.text(), entry_path(folder)));
  CHECK(found);
  CHECK(std::chrono::steady_clock::now() - started >= std::chrono::milliseconds(100));

  fs::remove(entry_path(folder));
  std::thread loser([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    claim = FileDescriptor();  // without publishing
  });
  FileDescriptor next;
  CHECK_FALSE(second.load_or_claim(kCode.key(), kCode.text, next));
  loser.join();
}

TEST_CASE("disk cache: processes killed while they publish leave a working cache") {
  const Folder folder;
  std::vector<KernelCode> codes;
  for (int i = 0; i < 4; ++i) codes.push_back(sample_code("kernel " + std::to_string(i), 300000));
  std::mt19937 random(3);
  Lines lines;
  for (int round = 0; round < 60; ++round) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      DiskCache cache(folder.path(), Mode::kReadWrite, {}, {});
      for (;;) {
        for (const KernelCode& code : codes) cache.store(code.key(), code);
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
    REQUIRE(::kill(child, SIGKILL) == 0);
    REQUIRE(::waitpid(child, nullptr, 0) == child);
    DiskCache cache(folder.path(), Mode::kReadWrite, lines.log(), {});
    for (const KernelCode& code : codes) {
      std::string why;
      const auto found = cache.load(code.key(), code.text, &why);
      INFO(why);
      REQUIRE((found ? same(*found, code) : why == "no entry"));
    }
  }
  CHECK(lines.text().empty());
  DiskCache cache(folder.path(), Mode::kReadWrite, {}, {});
  for (const KernelCode& code : codes) cache.store(code.key(), code);
  for (const KernelCode& code : codes) CHECK(holds(cache, code));

  // What they left behind goes once it is old, and not before. Files of others stay.
  const std::string name = to_hex(kCode.key()) + ".kernel";
  const std::string young = name + ".1.tmp", old = name + ".18446744073709551615.tmp";
  const std::set<std::string> foreign = {"thesis.tmp",
                                         "old.1.tmp",
                                         name,
                                         name + ".tmp",
                                         name + "..tmp",
                                         name + ".1a.tmp",
                                         name + ".1.tmp.gz",
                                         name.substr(1) + ".1.tmp",
                                         "0" + name + ".1.tmp",
                                         "A" + name.substr(1) + ".1.tmp",
                                         to_hex(kCode.key()) + ".1.tmp"};
  for (const std::string& file : foreign) write_file(folder.path(file), {1});
  write_file(folder.path(old), {1});
  for (const auto& file : fs::directory_iterator(folder.path())) {
    fs::last_write_time(file.path(), fs::file_time_type::clock::now() - std::chrono::hours(2));
  }
  write_file(folder.path(young), {1});
  cache.store(codes[0].key(), codes[0]);
  std::set<std::string> expected = foreign;
  expected.insert(young);
  for (const KernelCode& code : codes) expected.insert(to_hex(code.key()) + ".kernel");
  std::set<std::string> left;
  for (const auto& file : fs::directory_iterator(folder.path())) {
    left.insert(file.path().filename().string());
  }
  CHECK(left == expected);
}

}  // namespace
