#include "src/cpu/pool.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <new>
#include <system_error>

namespace sageattn::cpu {

// Lives on the stack of its caller, which leaves run only when no worker looks at it any more.
struct Pool::Job {
  void (*item)(void* self, int64_t index, int slot);
  void* self;
  int64_t count;
  std::atomic<int64_t> next{0};
  int helpers = 0;  // workers that took a slot; guarded by mutex_
  int inside = 0;   // of these, still at work; guarded by mutex_
  Job* following = nullptr;
  std::condition_variable done{};

  void work(int slot) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      item(self, i, slot);
    }
  }
};

// Fewer workers than asked for (the system may refuse threads, or memory for them) only makes jobs
// slower; to throw with workers running would end the process.
Pool::Pool(int threads) : threads_(threads) {
  try {
    workers_.reserve(static_cast<size_t>(threads - 1));
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
}

Pool::~Pool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(int64_t count, void (*item)(void* self, int64_t index, int slot), void* self) {
  if (count <= 0) return;
  Job job{item, self, count};
  if (count == 1 || threads_ == 1) {
    job.work(0);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    Job** last = &first_;
    while (*last != nullptr) last = &(*last)->following;
    *last = &job;
  }
  wake_.notify_all();
  job.work(0);
  std::unique_lock lock(mutex_);
  for (Job** at = &first_; *at != nullptr; at = &(*at)->following) {
    if (*at == &job) {
      *at = job.following;
      break;
    }
  }
  job.done.wait(lock, [&job] { return job.inside == 0; });
}

void Pool::work() {
  std::fesetenv(FE_DFL_ENV);  // a thread inherits its creator's
  std::unique_lock lock(mutex_);
  for (;;) {
    Job* job = first_;
    while (job != nullptr && job->next.load(std::memory_order_relaxed) >= job->count) {
      job = job->following;
    }
    if (job == nullptr) {
      if (stop_) return;
      wake_.wait(lock);
      continue;
    }
    const int slot = ++job->helpers;
    ++job->inside;
    lock.unlock();
    job->work(slot);
    lock.lock();
    // Each worker joins a job at most once: it comes back only when no item is left.
    if (--job->inside == 0) job->done.notify_all();
  }
}

}  // namespace sageattn::cpu
