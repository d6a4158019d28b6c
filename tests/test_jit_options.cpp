// The table of kernels, options, keys, floors of NVRTC versions, and the embedded sources.
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "src/jit/kernel_list.h"
#include "src/jit/options.h"
#include "src/jit/sources.h"
#include "tests/catch.h"
#include "tests/jit_helpers.h"

using namespace sageattn::jit;
using jit_test::contains;
using jit_test::error_of;

namespace {

using Strings = std::vector<std::string>;
using Macros = std::vector<Macro>;

const KernelSpec kSpec = {
    "k", "ptx/kernels/k.cu", "sageattn_k", "80 86 90a 120+", "A=1 D=64,128 N=*", false, 12040};

TEST_CASE("kernel list: archs") {
  CHECK(arch_name(kSpec, 80) == "sm_80");
  CHECK(arch_name(kSpec, 86) == "sm_86");
  CHECK(arch_name(kSpec, 89).empty());
  CHECK(arch_name(kSpec, 90) == "sm_90a");
  CHECK(arch_name(kSpec, 100).empty());
  CHECK(arch_name(kSpec, 120) == "sm_120");
  CHECK(arch_name(kSpec, 130) == "sm_130");
}

TEST_CASE("kernel list: macros") {
  const Macros expected = {{"A", 1}, {"D", 128}, {"N", -7}};
  CHECK(resolve_macros(kSpec, Macros{{"N", -7}, {"D", 128}}) == expected);
  CHECK(resolve_macros(kSpec, Macros{{"D", 128}, {"A", 1}, {"N", -7}}) == expected);
  struct Row {
    Macros chosen;
    const char* word;
  };
  const Row rows[] = {
      {{{"D", 128}}, "no N (any integer)"},
      {{{"N", 1}}, "no D (64, 128)"},
      {{{"N", 1}, {"D", 32}}, "D = 32: must be one of 64, 128"},
      {{{"N", 1}, {"D", 64}, {"A", 2}}, "A = 2: must be one of 1"},
      {{{"N", 1}, {"D", 64}, {"E", 2}}, "twice or one that is not"},
      {{{"N", 1}, {"D", 64}, {"D", 64}}, "twice or one that is not"},
  };
  for (const Row& row : rows) {
    const sageattn::Error error = error_of([&] { resolve_macros(kSpec, row.chosen); });
    INFO(error.message);
    CHECK(error.status == SAGEATTN_E_INTERNAL);
    CHECK(contains(error.message, row.word));
  }

  KernelSpec listed = kSpec;
  listed.macros = "A=1 B=0,1 C=3,4,5";
  const auto sets = macro_sets(listed);
  CHECK(sets.size() == 6);
  for (const Macros& set : sets) CHECK(resolve_macros(listed, set) == set);
  listed.macros = "";
  CHECK(macro_sets(listed) == std::vector<Macros>(1));
  CHECK(error_of([] { macro_sets(kSpec); }).status == SAGEATTN_E_INTERNAL);
  for (const char* wrong : {"A", "A=", "=1", "A=x", "A=1,y"}) {
    listed.macros = wrong;
    CHECK(error_of([&] { resolve_macros(listed, {}); }).status == SAGEATTN_E_INTERNAL);
  }
}

TEST_CASE("options") {
  const Macros macros = {{"A", 1}, {"D", 64}, {"N", -7}};
  CHECK(compile_options(kSpec, "sm_90a", macros) ==
        Strings{"--gpu-architecture=sm_90a", "--std=c++17", "--fmad=false", "--ptxas-options=-v",
                "-DA=1", "-DD=64", "-DN=-7"});
  KernelSpec fused = kSpec;
  fused.fmad = true;
  CHECK(compile_options(fused, "sm_80", {}) ==
        Strings{"--gpu-architecture=sm_80", "--std=c++17", "--fmad=true", "--ptxas-options=-v"});
  CHECK(session_options(12080).empty());
  CHECK(session_options(12090) == Strings{"--no-cache"});
  CHECK(kernel_text(kSpec, "sm_90a", macros) == "k for sm_90a (A=1, D=64, N=-7)");
  CHECK(kernel_text(kSpec, "sm_80", {}) == "k for sm_80");
}

TEST_CASE("keys: every ingredient counts") {
  const Strings options = compile_options(kSpec, "sm_90a", Macros{{"A", 1}, {"D", 64}});
  const std::string text = key_text("1234", kSpec, "sm_90a", options);
  CHECK(text == key_text("1234", kSpec, "sm_90a", options));
  std::set<std::string> texts = {text};
  size_t changes = 1;
  const auto changed = [&](const std::string& other) {
    texts.insert(other);
    ++changes;
    INFO(other);
    CHECK(texts.size() == changes);
  };
  changed(key_text("1235", kSpec, "sm_90a", options));
  changed(key_text("1234", kSpec, "sm_90", options));
  KernelSpec spec = kSpec;
  spec.name = "k2";
  changed(key_text("1234", spec, "sm_90a", options));
  spec = kSpec;
  spec.entry = "sageattn_k2";
  changed(key_text("1234", spec, "sm_90a", options));
  spec = kSpec;
  spec.source = "ptx/kernels/k2.cu";
  changed(key_text("1234", spec, "sm_90a", options));
  for (size_t i = 0; i < options.size(); ++i) {
    Strings other = options;
    other[i] += "0";
    changed(key_text("1234", kSpec, "sm_90a", other));
    other.erase(other.begin() + static_cast<std::ptrdiff_t>(i));
    changed(key_text("1234", kSpec, "sm_90a", other));
  }
  Strings swapped = options;
  std::swap(swapped[4], swapped[5]);
  changed(key_text("1234", kSpec, "sm_90a", swapped));
  // The format is in front.
  CHECK(text.rfind("format 1\nsource_id 1234\n", 0) == 0);
}

TEST_CASE("floors of NVRTC versions") {
  KernelSpec spec = kSpec;
  CHECK(required_nvrtc(spec, "sm_80") == 12040);
  CHECK(required_nvrtc(spec, "sm_120") == 12080);
  spec.min_nvrtc = 11000;
  CHECK(required_nvrtc(spec, "sm_80") == 11000);
  CHECK(required_nvrtc(spec, "sm_89") == 11080);
  CHECK(required_nvrtc(spec, "sm_90") == 11080);
  CHECK(required_nvrtc(spec, "sm_90a") == 12000);

  const std::vector<int> known = {75, 80, 86, 89, 90, 100, 120};
  const auto check = [&](const KernelSpec& kernel, const char* arch, int version) {
    return error_of([&] { check_nvrtc(kernel, arch, version, known, "/x/libnvrtc.so"); });
  };
  CHECK(check(kSpec, "sm_80", 12040).status == SAGEATTN_OK);
  CHECK(check(kSpec, "sm_90a", 13000).status == SAGEATTN_OK);
  const sageattn::Error old = check(kSpec, "sm_80", 12030);
  CHECK(old.status == SAGEATTN_E_NVRTC_TOO_OLD);
  CHECK(contains(old.message, "kernel k for sm_80: needs NVRTC 12.4 or newer, found 12.3"));
  CHECK(contains(old.message, "/x/libnvrtc.so"));
  CHECK(check(kSpec, "sm_120", 12040).status == SAGEATTN_E_NVRTC_TOO_OLD);
  CHECK(check(kSpec, "sm_130", 13000).status == SAGEATTN_E_NVRTC_TOO_OLD);
  CHECK(check(spec, "sm_70", 13000).status == SAGEATTN_E_UNSUPPORTED);
  // An NVRTC that does not say what it knows is asked by compiling.
  CHECK(error_of([] { check_nvrtc(kSpec, "sm_130", 13000, {}, "x"); }).status == SAGEATTN_OK);
}

TEST_CASE("embedded sources") {
  std::set<std::string> names;
  for (const SourceFile& source : embedded_sources()) {
    INFO(source.name);
    const std::string name = source.name;
    CHECK(name.rfind("ptx/", 0) == 0);
    CHECK(names.insert(name).second);
    const std::string text(reinterpret_cast<const char*>(source.bytes), source.size);
    CHECK(source.bytes[source.size] == 0);
    CHECK(std::strlen(text.c_str()) == source.size);
    const sageattn::Bytes file =
        jit_test::read_file(std::string(SAGEATTN_TEST_DIR) + "/../" + name);
    CHECK(std::string(file.begin(), file.end()) == text);
  }
  CHECK(names.count("ptx/common/types.h") == 1);
  CHECK(names.count("ptx/kernels/kernels.def") == 0);
}

TEST_CASE("kernels.def is sound") {
  std::set<std::string> names;
  for (const KernelSpec& kernel : kernel_list()) {
    INFO(kernel.name);
    CHECK(names.insert(kernel.name).second);
    bool there = false;
    for (const SourceFile& source : embedded_sources()) {
      there = there || std::strcmp(source.name, kernel.source) == 0;
    }
    CHECK(there);
    bool any_arch = false;
    for (const int arch : {80, 86, 89, 90, 120}) {
      any_arch = any_arch || !arch_name(kernel, arch).empty();
    }
    CHECK(any_arch);
    if (std::strchr(kernel.macros, '*') == nullptr) CHECK_FALSE(macro_sets(kernel).empty());
    CHECK(kernel.min_nvrtc >= 12000);
    // E4M3 on sm_89 (on sm_90 it is older): conversions are of PTX 8.1, products of 8.4.
    const bool converts = std::strstr(kernel.macros, "V_BITS=8") != nullptr;
    if (converts && !arch_name(kernel, 89).empty()) CHECK(kernel.min_nvrtc >= 12010);
    if (std::strcmp(kernel.name, "attn_sm89") == 0) CHECK(kernel.min_nvrtc >= 12040);
    CHECK(&find_kernel(kernel_list(), kernel.name) == &kernel);
  }
  CHECK(error_of([] { find_kernel(kernel_list(), "none such"); }).status == SAGEATTN_E_INTERNAL);
}

}  // namespace
