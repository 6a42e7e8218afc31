#include "kvant/tests/backends/cuda/cuda_testing.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "kvant_test_config.h"

namespace kvant::cuda {

ScopedVariable::ScopedVariable(const char* name, const std::optional<std::string>& value)
    : name_(name) {
  if (const char* before = std::getenv(name)) before_ = before;
  Set(name, value);
}

ScopedVariable::~ScopedVariable() { Set(name_, before_); }

void ScopedVariable::Set(const char* name, const std::optional<std::string>& value) {
  if (value) {
    setenv(name, value->c_str(), 1);
  } else {
    unsetenv(name);
  }
}

TemporaryFolder::TemporaryFolder() {
  path_ = (std::filesystem::temp_directory_path() / "kvant-test-XXXXXX").string();
  if (mkdtemp(path_.data()) == nullptr) std::abort();
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

FakeEnvironment::FakeEnvironment()
    : libcuda_("KVANT_LIBCUDA", KVANT_FAKE_LIBCUDA),
      libnvrtc_("KVANT_LIBNVRTC", KVANT_FAKE_LIBNVRTC),
      nvrtc_version_("KVANT_FAKE_NVRTC", "13.0") {
  void* library = dlopen(KVANT_FAKE_LIBCUDA, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) std::abort();
  cuda_ = reinterpret_cast<FakeCuda* (*)()>(dlsym(library, "KvantFakeCuda"))();
  context_depth_ = reinterpret_cast<size_t (*)()>(dlsym(library, "KvantFakeContextDepth"));
  cuda_->version = 13000;
  cuda_->devices.assign(1, FakeDevice());
  cuda_->failures.clear();
  cuda_->missing_kernel.clear();
  cuda_->calls.clear();
  cuda_->launches.clear();
  cuda_->memory.clear();
  cuda_->modules = 0;
  cuda_->kernel_attributes.clear();
}

std::string ReadWholeFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteWholeFile(const std::string& path, const std::string& contents) {
  std::ofstream(path, std::ios::binary) << contents;
}

int RunInChild(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

}  // namespace kvant::cuda
