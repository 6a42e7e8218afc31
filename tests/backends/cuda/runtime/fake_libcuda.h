// A libcuda without a GPU: it records what is called and fails where it is told to. Tests load it
// through KVANT_LIBCUDA and reach its state through the symbol below.
#ifndef KVANT_TESTS_BACKENDS_CUDA_RUNTIME_FAKE_LIBCUDA_H_
#define KVANT_TESTS_BACKENDS_CUDA_RUNTIME_FAKE_LIBCUDA_H_

#include <cstddef>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace kvant::cuda {

struct FakeDevice {
  std::string name = "Fake H200";
  int major = 9, minor = 0;
  int multiprocessors = 132;
  int shared_bytes_per_block = 232448, shared_bytes_per_multiprocessor = 233472;
  int threads_per_multiprocessor = 2048;
  int l2_bytes = 50 << 20;
  size_t memory_bytes = size_t{141} << 30;
  int retained = 0;  // how often its primary context is
};

struct FakeLaunch {
  int device = -1;  // whose context was current
  std::string kernel;
  unsigned blocks = 0, threads = 0, shared_bytes = 0;
  void* stream = nullptr;
  std::string params;  // the bytes
};

enum class FakeMemory { kDevice, kManaged, kPinnedHost };

struct FakeBlock {
  size_t bytes = 0;
  int device = 0;
  FakeMemory kind = FakeMemory::kDevice;
};

struct FakeStream {
  unsigned long long id = 0;
  bool captured = false;
};

// What the library does, and what has been done with it. Memory is the host's.
struct FakeCuda {
  std::mutex mutex;  // of all below, while another thread may call
  int version = 13000;
  std::vector<FakeDevice> devices;
  std::map<std::string, int> failures;  // exported symbol -> the CUresult that it returns
  std::string missing_kernel;           // a name that no module has

  std::map<std::string, int> calls;  // exported symbol -> how often
  std::vector<FakeLaunch> launches;
  std::map<char*, FakeBlock> memory;
  std::map<void*, FakeStream> streams;  // that were created, and the default one
  unsigned long long last_id = 0;       // of a stream
  int modules = 0;                      // loaded and not unloaded
  std::set<void*> held;                 // those, and memory of the host
  std::map<std::string, std::map<int, int>> kernel_attributes;  // kernel -> attribute -> value
};

}  // namespace kvant::cuda

extern "C" kvant::cuda::FakeCuda* KvantFakeCuda();
// How deep the calling thread's stack of contexts is.
extern "C" size_t KvantFakeContextDepth();

#endif  // KVANT_TESTS_BACKENDS_CUDA_RUNTIME_FAKE_LIBCUDA_H_
