// A fixed set of worker threads that share out the items of a job. Any number of threads may run
// jobs at once; a job makes progress on its caller even if every worker is busy elsewhere.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace sageattn::cpu {

class Pool {
 public:
  // `threads` counts the caller of run: threads - 1 workers are started.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Calls item(index, slot) once for each index in [0, count); slot in [0, threads()) is never in
  // use by two calls of one job at a time. Returns when all have returned. item must not throw.
  // Does not allocate.
  void run(int64_t count, void (*item)(void* self, int64_t index, int slot), void* self);

 private:
  struct Job;
  void work();

  const int threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  Job* first_ = nullptr;  // jobs with items left, oldest first
  bool stop_ = false;
};

}  // namespace sageattn::cpu
