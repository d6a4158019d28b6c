// The worker pool: every index once, a slot of one's own, any number of jobs at a time.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "src/cpu/pool.h"
#include "tests/catch.h"

namespace {

using sageattn::cpu::Pool;

// Watches one job. Catch2's assertions are for one thread, so items only count what is wrong.
class Watch {
 public:
  Watch(int64_t count, int threads)
      : calls_(static_cast<size_t>(count)), slots_(static_cast<size_t>(threads)) {}

  static void item(void* self, int64_t index, int slot) {
    static_cast<Watch*>(self)->enter(index, slot);
  }

  // Nothing out of range, no slot used twice at a time, every index exactly once.
  bool good() const {
    for (const std::atomic<int>& calls : calls_) {
      if (calls.load() != 1) return false;
    }
    return faults_.load() == 0 && total_.load() == static_cast<int64_t>(calls_.size());
  }

 private:
  void enter(int64_t index, int slot) {
    ++total_;
    if (index < 0 || index >= static_cast<int64_t>(calls_.size()) || slot < 0 ||
        slot >= static_cast<int>(slots_.size())) {
      ++faults_;
      return;
    }
    if (slots_[static_cast<size_t>(slot)].fetch_add(1) != 0) ++faults_;
    ++calls_[static_cast<size_t>(index)];
    if (index % 5 == 0) std::this_thread::yield();
    --slots_[static_cast<size_t>(slot)];
  }

  std::vector<std::atomic<int>> calls_, slots_;
  std::atomic<int> faults_{0};
  std::atomic<int64_t> total_{0};
};

bool run_watched(Pool& pool, int64_t count) {
  Watch watch(count, pool.threads());
  pool.run(count, Watch::item, &watch);
  return watch.good();
}

// A door that opens when `expected` threads have come; gives up after a while, so that a pool that
// does not work in parallel fails the test instead of hanging it.
class Door {
 public:
  explicit Door(int expected) : expected_(expected) {}

  bool pass() {
    std::unique_lock lock(mutex_);
    if (++come_ >= expected_) opened_.notify_all();
    return opened_.wait_for(lock, std::chrono::seconds(60), [this] { return come_ >= expected_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  int come_ = 0;
  const int expected_;
};

}  // namespace

TEST_CASE("A job calls every index once, each slot by one thread at a time", "[pool]") {
  for (const int threads : {1, 2, 3, 8}) {
    CAPTURE(threads);
    Pool pool(threads);
    CHECK(pool.threads() == threads);
    for (const int64_t count : {0, 1, 2, 3, 7, 64, 1000, 1 << 19}) {
      CAPTURE(count);
      CHECK(run_watched(pool, count));
    }
    int faults = 0;
    for (int i = 0; i < 500; ++i) {
      if (!run_watched(pool, i % 11)) ++faults;
    }
    CHECK(faults == 0);
  }
}

TEST_CASE("No items, nothing called", "[pool]") {
  Pool pool(3);
  int calls = 0;
  const auto count_call = [](void* self, int64_t, int) { ++*static_cast<int*>(self); };
  pool.run(0, count_call, &calls);
  pool.run(-1, count_call, &calls);
  pool.run(INT64_MIN, count_call, &calls);
  CHECK(calls == 0);
  pool.run(1, count_call, &calls);
  CHECK(calls == 1);
}

TEST_CASE("All threads of the pool work, the caller among them", "[pool]") {
  struct Job {
    explicit Job(int threads) : door(threads) {}
    Door door;
    std::mutex mutex;
    std::set<int> slots;
    std::set<std::thread::id> threads;
    bool parallel = true;
  };
  Pool pool(4);
  for (int repeat = 0; repeat < 20; ++repeat) {
    Job job(4);
    pool.run(
        4,
        [](void* self, int64_t, int slot) {
          Job& j = *static_cast<Job*>(self);
          const bool passed = j.door.pass();
          const std::lock_guard lock(j.mutex);
          if (!passed) j.parallel = false;
          j.slots.insert(slot);
          j.threads.insert(std::this_thread::get_id());
        },
        &job);
    REQUIRE(job.parallel);
    REQUIRE(job.slots == std::set<int>{0, 1, 2, 3});
    REQUIRE(job.threads.size() == 4);
    REQUIRE(job.threads.count(std::this_thread::get_id()) == 1);
  }
}

TEST_CASE("run returns only when the last call has returned", "[pool]") {
  Pool pool(4);
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::atomic<int> returned{0};
    pool.run(
        8,
        [](void* self, int64_t index, int) {
          std::this_thread::sleep_for(std::chrono::milliseconds(index == 7 ? 5 : 0));
          ++*static_cast<std::atomic<int>*>(self);
        },
        &returned);
    REQUIRE(returned.load() == 8);
  }
}

TEST_CASE("Many threads run jobs on one pool", "[pool]") {
  for (const int threads : {1, 2, 4}) {
    CAPTURE(threads);
    Pool pool(threads);
    std::atomic<int> faults{0}, jobs{0};
    std::vector<std::thread> callers;
    for (int c = 0; c < 8; ++c) {
      callers.emplace_back([&pool, &faults, &jobs, c] {
        for (int i = 0; i < 150; ++i) {
          if (!run_watched(pool, (i * 7 + c * 13) % 40)) ++faults;
          ++jobs;
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK(faults.load() == 0);
    CHECK(jobs.load() == 8 * 150);
  }
}

TEST_CASE("A job goes on while every worker is busy with another", "[pool]") {
  // The first job holds the caller and both workers until the second job is done.
  struct Blocker {
    Door entered{4};
    std::mutex mutex;
    std::condition_variable changed;
    bool release = false;
    std::atomic<bool> released_in_time{true};
  } blocker;
  Pool pool(3);
  std::thread first([&] {
    pool.run(
        3,
        [](void* self, int64_t, int) {
          Blocker& b = *static_cast<Blocker*>(self);
          b.entered.pass();
          std::unique_lock lock(b.mutex);
          if (!b.changed.wait_for(lock, std::chrono::seconds(60), [&b] { return b.release; })) {
            b.released_in_time = false;
          }
        },
        &blocker);
  });
  CHECK(blocker.entered.pass());
  CHECK(run_watched(pool, 100));
  {
    const std::lock_guard lock(blocker.mutex);
    blocker.release = true;
  }
  blocker.changed.notify_all();
  first.join();
  CHECK(blocker.released_in_time.load());
}

TEST_CASE("Pools come and go while idle, also inside each other's items", "[pool]") {
  for (int i = 0; i < 60; ++i) {
    const Pool never_used(1 + i % 4);
    REQUIRE(never_used.threads() == 1 + i % 4);
  }
  int faults = 0;
  for (int i = 0; i < 60; ++i) {
    auto outer = std::make_unique<Pool>(1 + i % 3);
    Pool inner(2 + i % 3);
    if (!run_watched(*outer, 20) || !run_watched(inner, 20)) ++faults;
    outer.reset();  // the other one goes on
    if (!run_watched(inner, 20)) ++faults;
  }
  CHECK(faults == 0);

  std::atomic<int> nested_faults{0};
  Pool pool(3);
  pool.run(
      12,
      [](void* self, int64_t index, int) {
        Pool nested(2);
        if (!run_watched(nested, 10 + index)) ++*static_cast<std::atomic<int>*>(self);
      },
      &nested_faults);
  CHECK(nested_faults.load() == 0);

  // Items may run jobs of their own on the same pool.
  struct Nested {
    Pool& pool;
    std::atomic<int> faults{0};
  } nested{pool};
  pool.run(
      9,
      [](void* self, int64_t index, int) {
        Nested& n = *static_cast<Nested*>(self);
        if (!run_watched(n.pool, 5 + index)) ++n.faults;
      },
      &nested);
  CHECK(nested.faults.load() == 0);
}
