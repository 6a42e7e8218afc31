#include "kvant/backends/cuda/runtime/device_properties.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {
namespace {

constexpr size_t kKiB = 1024;

constexpr int kRegisters = 64 * 1024;
constexpr int kRegistersPerThread = 255;
constexpr int kRegisterUnit = 8;             // of a thread: 256 of a warp
constexpr size_t kSystemSharedBytes = kKiB;  // of each block

struct ArchRow {
  std::string_view arch;
  int major, minor, multiprocessors, warps;
  size_t shared_kib_per_block, shared_kib_per_multiprocessor;
};
constexpr ArchRow kArchs[] = {
    {"sm_80", 8, 0, 108, 64, 163, 164},  {"sm_86", 8, 6, 84, 48, 99, 100},
    {"sm_87", 8, 7, 16, 48, 163, 164},   {"sm_89", 8, 9, 142, 48, 99, 100},
    {"sm_90a", 9, 0, 132, 64, 227, 228}, {"sm_100a", 10, 0, 148, 64, 227, 228},
    {"sm_120", 12, 0, 188, 48, 99, 100},
};

}  // namespace

std::string DeviceProperties::arch() const {
  const bool has_own = minor == 0 && (major == 9 || major == 10);
  return absl::StrCat("sm_", major, minor, has_own ? "a" : "");
}

absl::StatusOr<DeviceProperties> PropertiesOf(std::string_view arch) {
  const auto* row = std::find_if(std::begin(kArchs), std::end(kArchs),
                                 [&](const ArchRow& one) { return one.arch == arch; });
  if (row == std::end(kArchs)) {
    return InvalidArguments("'", arch, "' is not an architecture known here; there are ",
                            absl::StrJoin(kArchs, ", ", [](std::string* out, const ArchRow& one) {
                              out->append(one.arch);
                            }));
  }
  DeviceProperties properties;
  properties.name = std::string(arch);
  properties.major = row->major;
  properties.minor = row->minor;
  properties.multiprocessors = row->multiprocessors;
  properties.shared_bytes_per_block = row->shared_kib_per_block * kKiB;
  properties.shared_bytes_per_multiprocessor = row->shared_kib_per_multiprocessor * kKiB;
  properties.threads_per_multiprocessor = row->warps * 32;
  return properties;
}

int RegisterLimit(int threads, int blocks) {
  const int share = kRegisters / (threads * blocks);
  return std::min(kRegistersPerThread, share / kRegisterUnit * kRegisterUnit);
}

int BlocksPerMultiprocessor(const DeviceProperties& device, int threads, int registers,
                            size_t shared_bytes) {
  const int per_thread = (registers + kRegisterUnit - 1) / kRegisterUnit * kRegisterUnit;
  const int by_registers = kRegisters / (per_thread * threads);
  const auto by_shared = static_cast<int>(device.shared_bytes_per_multiprocessor /
                                          (shared_bytes + kSystemSharedBytes));
  return std::min({by_registers, by_shared, device.threads_per_multiprocessor / threads});
}

}  // namespace kvant::cuda
