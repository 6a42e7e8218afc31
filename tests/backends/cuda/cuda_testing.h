// What tests of the CUDA backend's insides share.
#ifndef KVANT_TESTS_BACKENDS_CUDA_CUDA_TESTING_H_
#define KVANT_TESTS_BACKENDS_CUDA_CUDA_TESTING_H_

#include <functional>
#include <optional>
#include <string>

#include "kvant/tests/backends/cuda/runtime/fake_libcuda.h"

namespace kvant::cuda {

// A variable of the environment for as long as this lives; nullopt: unset.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const std::optional<std::string>& value);
  ~ScopedVariable();
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  static void Set(const char* name, const std::optional<std::string>& value);

  const char* name_;
  std::optional<std::string> before_;
};

// A new folder, removed at the end with all in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// The fake libcuda as it is when new, but for one H200, and the fake NVRTC, 13.0; both in the
// environment, so that all that opens a driver or a compiler gets them.
class FakeEnvironment {
 public:
  FakeEnvironment();
  FakeCuda& cuda() { return *cuda_; }
  // Of the calling thread.
  size_t context_depth() const { return context_depth_(); }

 private:
  ScopedVariable libcuda_, libnvrtc_, nvrtc_version_;
  FakeCuda* cuda_;
  size_t (*context_depth_)();
};

std::string ReadWholeFile(const std::string& path);
void WriteWholeFile(const std::string& path, const std::string& contents);

// What body() returns in a child process; -1 where that ended by a signal.
int RunInChild(const std::function<int()>& body);

}  // namespace kvant::cuda

#endif  // KVANT_TESTS_BACKENDS_CUDA_CUDA_TESTING_H_
