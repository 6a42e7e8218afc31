// SHA-256 (FIPS 180-4): the keys and checksums of kernels on disk.
#ifndef KVANT_BACKENDS_CUDA_RUNTIME_SHA256_H_
#define KVANT_BACKENDS_CUDA_RUNTIME_SHA256_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvant::cuda {

using Sha256Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void Update(std::string_view bytes);
  // Once, at the end.
  Sha256Digest Finish();

 private:
  void Block(const uint8_t* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> pending_;
  size_t pending_bytes_ = 0;
  uint64_t total_bytes_ = 0;
};

Sha256Digest Sha256Of(std::string_view bytes);
// Lower-case hexadecimal.
std::string ToHex(const Sha256Digest& digest);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_RUNTIME_SHA256_H_
