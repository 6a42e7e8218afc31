#include "kvant/tools/progress.h"

#include <chrono>
#include <cstdio>
#include <utility>

namespace kvant {

Progress::Progress(std::string doing)
    : reporter_([this, doing = std::move(doing)] { Report(doing); }) {}

Progress::~Progress() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
  }
  done_changed_.notify_all();
  reporter_.join();
}

void Progress::Report(const std::string& doing) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto start = std::chrono::steady_clock::now();
  for (int seconds = 1;; seconds *= 2) {
    const auto next = start + std::chrono::seconds(seconds);
    if (done_changed_.wait_until(lock, next, [this] { return done_; })) return;
    std::fprintf(stderr, "kvant: %s ... %d s\n", doing.c_str(), seconds);
  }
}

}  // namespace kvant
