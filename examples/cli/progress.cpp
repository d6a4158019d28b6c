#include "progress.h"

#include <unistd.h>

#include <iostream>
#include <string>

namespace sageattn_cli {
namespace {

constexpr int64_t kWidth = 40;
constexpr const char* kClearLine = "\r\033[K";

}  // namespace

Progress::Progress(int64_t total)
    : total_(total),
      terminal_(isatty(STDERR_FILENO) != 0),
      start_(std::chrono::steady_clock::now()) {}

Progress::~Progress() {
  if (shown_) std::cerr << kClearLine << std::flush;
}

void Progress::advance() {
  ++done_;
  const auto elapsed = std::chrono::steady_clock::now() - start_;
  if (!terminal_ || elapsed < std::chrono::seconds(1)) return;
  const int64_t filled = kWidth * done_ / total_;
  std::cerr << kClearLine << '[' << std::string(filled, '#') << std::string(kWidth - filled, '.')
            << "] " << done_ << '/' << total_ << std::flush;
  shown_ = true;
}

}  // namespace sageattn_cli
