// Says on standard error what takes long.
#ifndef KVANT_TOOLS_PROGRESS_H_
#define KVANT_TOOLS_PROGRESS_H_

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace kvant {

// While it lives, prints "kvant: <doing> ... N s" after one second and from then
// on ever more rarely; nothing if it is over sooner.
class Progress {
 public:
  explicit Progress(std::string doing);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

 private:
  void Report(const std::string& doing);
  std::mutex mutex_;
  std::condition_variable done_changed_;
  bool done_ = false;
  std::thread reporter_;
};

}  // namespace kvant

#endif  // KVANT_TOOLS_PROGRESS_H_
