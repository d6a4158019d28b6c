// A progress bar on stderr.
#pragma once

#include <chrono>
#include <cstdint>

namespace sageattn_cli {

// Shows itself only if stderr is a terminal and the work has taken a second.
class Progress {
 public:
  explicit Progress(int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance();

 private:
  const int64_t total_;
  const bool terminal_;
  const std::chrono::steady_clock::time_point start_;
  int64_t done_ = 0;
  bool shown_ = false;
};

}  // namespace sageattn_cli
