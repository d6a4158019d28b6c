// Lifetimes, allocator and log hooks, and calls from many threads.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "sageattn.h"
#include "tests/catch.h"

namespace {

template <class T>
T sized() {
  T value{};
  value.struct_size = sizeof value;
  return value;
}

sageattn_context_desc cpu_desc(int32_t num_threads = 2) {
  sageattn_context_desc desc = sized<sageattn_context_desc>();
  desc.backend = SAGEATTN_BACKEND_CPU;
  desc.num_threads = num_threads;
  return desc;
}

sageattn_context* create_context(const sageattn_context_desc& desc) {
  sageattn_context* ctx = nullptr;
  REQUIRE(sageattn_context_create(&desc, &ctx, nullptr) == SAGEATTN_OK);
  return ctx;
}

constexpr int kTokens = 70, kHeads = 2, kDim = 32;

sageattn_attn_desc make_desc() {
  sageattn_attn_desc desc = sized<sageattn_attn_desc>();
  desc.q_dtype = SAGEATTN_F32;
  desc.head_dim = kDim;
  desc.num_qo_heads = kHeads;
  desc.mask = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  desc.max_qo_len = desc.max_kv_len = kTokens;
  return desc;
}

sageattn_plan* create_plan(sageattn_context* ctx) {
  const sageattn_attn_desc desc = make_desc();
  sageattn_plan* plan = nullptr;
  REQUIRE(sageattn_plan_create(ctx, &desc, &plan, nullptr) == SAGEATTN_OK);
  return plan;
}

// Runs the plan on fixed inputs that `seed` chooses. An empty result is a failure: threads other
// than the test's must not use the macros of the test framework.
std::vector<float> run(const sageattn_plan* plan, uint32_t seed) {
  sageattn_plan_info info = sized<sageattn_plan_info>();
  if (sageattn_plan_get_info(plan, &info, nullptr) != SAGEATTN_OK) return {};
  const auto size = static_cast<size_t>(info.min_workspace);
  const auto alignment = static_cast<size_t>(info.workspace_alignment);
  std::vector<char> memory(size + alignment);
  void* workspace = memory.data();
  size_t space = memory.size();
  std::align(alignment, size, workspace, space);

  std::vector<float> inputs[3];
  uint32_t state = seed;
  for (std::vector<float>& input : inputs) {
    for (int i = 0; i < kTokens * kHeads * kDim; ++i) {
      state = state * 1664525u + 1013904223u;
      input.push_back(static_cast<float>(state >> 8) * 0x1p-23f - 1.0f);
    }
  }
  std::vector<float> out(kTokens * kHeads * kDim);
  sageattn_execute_args args = sized<sageattn_execute_args>();
  args.batch = 1;
  args.qo_len = args.kv_len = kTokens;
  args.q.data = inputs[0].data();
  args.k.data = inputs[1].data();
  args.v.data = inputs[2].data();
  args.out.data = out.data();
  if (sageattn_execute(plan, &args, workspace, size, nullptr, nullptr) != SAGEATTN_OK) return {};
  return out;
}

TEST_CASE("handles may be destroyed in any order") {
  sageattn_context_destroy(nullptr);
  sageattn_plan_destroy(nullptr);

  sageattn_context* ctx = create_context(cpu_desc());
  sageattn_plan* first = create_plan(ctx);
  sageattn_plan* second = create_plan(ctx);
  const std::vector<float> expected = run(first, 1);
  REQUIRE(!expected.empty());
  sageattn_plan_destroy(first);
  sageattn_context_destroy(ctx);
  CHECK((run(second, 1) == expected));  // the plan kept the context's threads alive
  sageattn_plan_destroy(second);

  ctx = create_context(cpu_desc());
  first = create_plan(ctx);
  sageattn_plan_destroy(first);
  sageattn_context_destroy(ctx);

  sageattn_context_destroy(create_context(cpu_desc()));  // no plan, no thread was started
}

TEST_CASE("strings are copied") {
  std::string cache_dir = "/somewhere/else";
  sageattn_context_desc desc = cpu_desc();
  desc.cache_dir = cache_dir.c_str();
  sageattn_context* ctx = create_context(desc);
  cache_dir.assign(cache_dir.size(), 'x');
  char text[4096];
  REQUIRE(sageattn_context_report(ctx, text, sizeof text, nullptr, nullptr) == SAGEATTN_OK);
  CHECK(std::string(text).find("cache_dir: /somewhere/else (no effect") != std::string::npos);
  sageattn_context_destroy(ctx);
}

TEST_CASE("the report says what was chosen and why") {
  const auto report = [](const sageattn_context_desc& desc) {
    sageattn_context* ctx = create_context(desc);
    char text[4096];
    REQUIRE(sageattn_context_report(ctx, text, sizeof text, nullptr, nullptr) == SAGEATTN_OK);
    sageattn_context_destroy(ctx);
    return std::string(text);
  };
  const auto contains = [](const std::string& text, const char* line) {
    INFO(text);
    CHECK(("\n" + text).find(std::string("\n") + line) != std::string::npos);
  };
  sageattn_context_desc desc = sized<sageattn_context_desc>();
  std::string text = report(desc);
  contains(text, "version: 0.1.0\n");
  contains(text, (std::string("source_id: ") + sageattn_source_id() + "\n").c_str());
  contains(text, "backend: CPU (AUTO: ");
  contains(text, "arch: 90 (emulated, default)\n");
  contains(text, "threads: ");
  contains(text, "driver_library: ");
  contains(text, "nvrtc: ");
  desc.nvrtc_path = "/somewhere/libnvrtc.so";
  text = report(desc);
  contains(text, "nvrtc: none");
  contains(text, "nvrtc_tried: nvrtc_path = /somewhere/libnvrtc.so: no such file or folder\n");

  desc = cpu_desc(3);
  desc.target_arch = 89;
  desc.flags = SAGEATTN_CONTEXT_NO_JIT;
  desc.nvrtc_path = "/somewhere/libnvrtc.so";
  text = report(desc);
  contains(text, "backend: CPU (asked for)\n");
  contains(text, "arch: 89 (emulated, asked for)\n");
  contains(text, "threads: 3 (asked for)\n");
  contains(text, "flag: NO_JIT (no effect");
  contains(text, "nvrtc_path: /somewhere/libnvrtc.so (no effect");
}

// An allocator that knows its blocks, and fails on request.
class Allocator {
 public:
  void attach(sageattn_context_desc& desc) {
    desc.alloc = &Allocator::alloc;
    desc.free = &Allocator::free;
    desc.allocator_user = this;
  }

  int fail_after = -1;  // allocations that succeed; -1: all
  std::mutex mutex;
  std::map<void*, size_t> blocks;
  int allocations = 0;
  bool wrong = false;

 private:
  static void* alloc(void* user, size_t size, size_t alignment) {
    Allocator& self = *static_cast<Allocator*>(user);
    const std::lock_guard lock(self.mutex);
    if (self.fail_after >= 0 && self.allocations >= self.fail_after) return nullptr;
    self.wrong |= size == 0 || alignment == 0 || (alignment & (alignment - 1)) != 0;
    ++self.allocations;
    void* memory = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    std::memset(memory, 0x5a, size);
    self.blocks[memory] = size;
    return memory;
  }
  static void free(void* user, void* memory) {
    Allocator& self = *static_cast<Allocator*>(user);
    const std::lock_guard lock(self.mutex);
    self.wrong |= self.blocks.erase(memory) != 1;
    std::free(memory);
  }
};

TEST_CASE("allocator hooks are balanced") {
  Allocator allocator;
  sageattn_context_desc desc = cpu_desc();
  allocator.attach(desc);
  desc.cache_dir = "/a/path/that/is/too/long/for/any/small/string/optimisation";
  sageattn_context* ctx = create_context(desc);
  const int for_context = allocator.allocations;
  CHECK(for_context >= 1);
  sageattn_plan* plan = create_plan(ctx);
  CHECK(allocator.allocations > for_context);

  const int before_execute = allocator.allocations;
  REQUIRE(!run(plan, 1).empty());
  CHECK(allocator.allocations == before_execute);

  const sageattn_attn_desc attn_desc = make_desc();
  CHECK(sageattn_plan_query(ctx, &attn_desc, nullptr, nullptr) == SAGEATTN_OK);
  CHECK(allocator.allocations == before_execute);  // creates nothing

  sageattn_context_destroy(ctx);
  CHECK(!allocator.blocks.empty());
  sageattn_plan_destroy(plan);
  CHECK(allocator.blocks.empty());
  CHECK_FALSE(allocator.wrong);
}

TEST_CASE("every allocation may fail") {
  for (int fail_after = 0;; ++fail_after) {
    Allocator allocator;
    allocator.fail_after = fail_after;
    sageattn_context_desc desc = cpu_desc();
    allocator.attach(desc);
    sageattn_context* ctx = nullptr;
    sageattn_plan* plan = nullptr;
    const sageattn_attn_desc attn_desc = make_desc();
    sageattn_error err = sized<sageattn_error>();
    int32_t status = sageattn_context_create(&desc, &ctx, &err);
    if (status == SAGEATTN_OK) status = sageattn_plan_create(ctx, &attn_desc, &plan, &err);
    CHECK((plan != nullptr) == (status == SAGEATTN_OK));
    sageattn_plan_destroy(plan);
    sageattn_context_destroy(ctx);
    CHECK(allocator.blocks.empty());
    CHECK_FALSE(allocator.wrong);
    if (status == SAGEATTN_OK) break;
    CHECK(status == SAGEATTN_E_OUT_OF_MEMORY);
    CHECK(err.status == SAGEATTN_E_OUT_OF_MEMORY);
    CHECK(err.message[0] != 0);
    REQUIRE(fail_after < 100);
  }
}

TEST_CASE("log hook") {
  struct Log {
    std::vector<std::string> lines;
    bool wrong = false;
  } log;
  sageattn_context_desc desc = cpu_desc();
  desc.log = [](void* user, int32_t level, const char* message) {
    Log& self = *static_cast<Log*>(user);
    self.wrong |= level != SAGEATTN_LOG_INFO && level != SAGEATTN_LOG_WARNING;
    self.wrong |= std::strchr(message, '\n') != nullptr;
    self.lines.push_back(message);
  };
  desc.log_user = &log;
  sageattn_context* ctx = create_context(desc);
  REQUIRE(log.lines.size() == 1);
  CHECK(log.lines[0].find("CPU") != std::string::npos);
  sageattn_plan* plan = create_plan(ctx);
  REQUIRE(log.lines.size() == 2);
  CHECK(log.lines[1].find("cpu_wgmma_i8_e4m3") != std::string::npos);
  REQUIRE(!run(plan, 1).empty());
  sageattn_plan_destroy(plan);
  sageattn_context_destroy(ctx);
  CHECK(log.lines.size() == 2);
  CHECK_FALSE(log.wrong);
}

void in_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

TEST_CASE("eight threads share one plan") {
  sageattn_context* ctx = create_context(cpu_desc(3));
  sageattn_plan* plan = create_plan(ctx);
  std::vector<std::vector<float>> expected;
  for (uint32_t seed = 0; seed < 8; ++seed) expected.push_back(run(plan, seed));
  REQUIRE(!expected[0].empty());
  CHECK((expected[0] != expected[1]));
  std::atomic<int> wrong = 0;
  in_threads(8, [&](int i) {
    for (int repeat = 0; repeat < 10; ++repeat) {
      const auto seed = static_cast<uint32_t>(i + repeat) % 8;
      if (run(plan, seed) != expected[seed]) ++wrong;
    }
  });
  CHECK(wrong == 0);
  sageattn_context_destroy(ctx);
  sageattn_plan_destroy(plan);
}

TEST_CASE("threads create, query, run and destroy at once") {
  Allocator allocator;
  sageattn_context_desc desc = cpu_desc(2);
  allocator.attach(desc);
  sageattn_context* ctx = create_context(desc);
  sageattn_plan* plan = create_plan(ctx);
  const std::vector<float> expected = run(plan, 5);
  REQUIRE(!expected.empty());
  sageattn_plan_destroy(plan);

  std::atomic<int> wrong = 0;
  std::vector<sageattn_plan*> kept(8);
  in_threads(8, [&](int i) {
    const sageattn_attn_desc attn_desc = make_desc();
    for (int repeat = 0; repeat < 10; ++repeat) {
      sageattn_plan* own = nullptr;
      wrong += sageattn_plan_create(ctx, &attn_desc, &own, nullptr) != SAGEATTN_OK;
      wrong += sageattn_plan_query(ctx, &attn_desc, nullptr, nullptr) != SAGEATTN_OK;
      wrong += own == nullptr || run(own, 5) != expected;
      char text[4096];
      wrong += sageattn_context_report(ctx, text, sizeof text, nullptr, nullptr) != SAGEATTN_OK;
      sageattn_plan_destroy(own);
    }
    wrong += sageattn_plan_create(ctx, &attn_desc, &kept[static_cast<size_t>(i)], nullptr) !=
             SAGEATTN_OK;
  });
  CHECK(wrong == 0);
  sageattn_context_destroy(ctx);
  in_threads(8, [&](int i) {  // the last plan to go takes the context with it
    wrong += run(kept[static_cast<size_t>(i)], 5) != expected;
    sageattn_plan_destroy(kept[static_cast<size_t>(i)]);
  });
  CHECK(wrong == 0);
  CHECK(allocator.blocks.empty());
  CHECK_FALSE(allocator.wrong);
}

TEST_CASE("the thread count does not change a bit") {
  std::vector<float> expected;
  for (const int32_t threads : {1, 2, 5}) {
    sageattn_context* ctx = create_context(cpu_desc(threads));
    sageattn_plan* plan = create_plan(ctx);
    const std::vector<float> got = run(plan, 9);
    REQUIRE(!got.empty());
    if (expected.empty()) expected = got;
    CHECK((got == expected));
    sageattn_plan_destroy(plan);
    sageattn_context_destroy(ctx);
  }
}

#ifdef __SSE__
TEST_CASE("the caller's floating-point environment does not change a bit, and stays") {
  for (const int threads : {1, 3}) {
    sageattn_context* ctx = create_context(cpu_desc(threads));
    sageattn_plan* plan = create_plan(ctx);
    const std::vector<float> expected = run(plan, 7);
    REQUIRE(!expected.empty());
    const unsigned normal = _mm_getcsr();
    // Flush to zero with denormals are zero; rounding down.
    for (const unsigned mode : {normal | 0x8040u, (normal & ~0x6000u) | 0x2000u}) {
      _mm_setcsr(mode);
      sageattn_context* other_ctx = nullptr;
      const sageattn_context_desc desc = cpu_desc(threads);
      sageattn_context_create(&desc, &other_ctx, nullptr);  // its workers inherit the mode
      sageattn_plan* other_plan = create_plan(other_ctx);
      const std::vector<float> got = run(plan, 7), other = run(other_plan, 7);
      const unsigned after = _mm_getcsr();
      _mm_setcsr(normal);
      CHECK((after & 0xE040u) == (mode & 0xE040u));
      CHECK((got == expected));
      CHECK((other == expected));
      sageattn_plan_destroy(other_plan);
      sageattn_context_destroy(other_ctx);
    }
    sageattn_context_destroy(ctx);
    sageattn_plan_destroy(plan);
  }
}
#endif

TEST_CASE("self-test on every arch") {
  for (const int32_t arch : {80, 86, 89, 90, 120}) {
    sageattn_context_desc desc = cpu_desc();
    desc.target_arch = arch;
    sageattn_context* ctx = create_context(desc);
    sageattn_error err = sized<sageattn_error>();
    const int32_t status = sageattn_selftest(ctx, &err);
    INFO(err.message);
    CHECK(status == SAGEATTN_OK);
    sageattn_context_destroy(ctx);
  }
}

}  // namespace
