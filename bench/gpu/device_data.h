// What a benchmark does on a GPU beside attention: fills memory with random numbers, and reads it.
#ifndef KVANT_BENCH_GPU_DEVICE_DATA_H_
#define KVANT_BENCH_GPU_DEVICE_DATA_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvant/backends/cuda/runtime/launcher.h"

namespace kvant {

// How 32-bit words are drawn: as they come, or as floats (pairs of them) or bytes in [low, high].
enum class Random : int32_t { kBits, kF32, kF16, kBF16, kBytes };

class DeviceData {
 public:
  static absl::StatusOr<DeviceData> Create(std::shared_ptr<cuda::Launcher> launcher);

  struct Range {
    Random kind = Random::kBits;
    float low = 0, high = 1;
  };
  // `bytes` is rounded down to words. Puts onto `stream`, as Read does.
  absl::Status Fill(void* to, size_t bytes, uint32_t seed, const Range& range, void* stream) const;
  // Reads all of it, 16 bytes at a time, and writes next to nothing.
  absl::Status Read(const void* from, size_t bytes, void* stream) const;

  const cuda::Launcher& launcher() const { return *launcher_; }
  // The kernels, as NVRTC gets them.
  static std::string SourceText();

 private:
  std::shared_ptr<cuda::Launcher> launcher_;
  std::shared_ptr<const cuda::LoadedKernel> fill_, read_;
  // Where Read leaves a sum that nobody needs.
  std::shared_ptr<void> sink_;
};

}  // namespace kvant

#endif  // KVANT_BENCH_GPU_DEVICE_DATA_H_
