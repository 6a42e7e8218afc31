// What memory a warp's instructions move: the accesses of its lanes, grouped to requests.
#ifndef KVANT_KERNELS_DEVICE_SIMT_TRAFFIC_H_
#define KVANT_KERNELS_DEVICE_SIMT_TRAFFIC_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvant/kernels/device/simt.h"
#include "kvant/kernels/device/simt_calls.h"

namespace kvant::simt {

// Sectors of global memory, and wavefronts of shared memory, of one request. Bit l of `lanes`: lane
// l takes part, with `bytes` bytes at addresses[l].
struct Cost {
  uint64_t actual = 0;
  uint64_t ideal = 0;
};
Cost SectorsOf(const std::array<uint64_t, 32>& addresses, uint32_t lanes, size_t bytes);
Cost WavefrontsOf(const std::array<uint64_t, 32>& addresses, uint32_t lanes, size_t bytes);

class WarpTraffic {
 public:
  enum class Kind : uint8_t { kGlobalLoad, kGlobalStore, kSharedLoad, kSharedStore, kCopy };

  // An access by a lane. A copy reads at `address` (nothing with `reads` false) and writes at `to`.
  void Add(Kind kind, Site site, int lane, size_t bytes, uint64_t address, uint64_t to = 0,
           bool reads = true);
  // Counts the requests so far. Called where all lanes come together, so that lanes which took
  // different branches before are in step again.
  void Flush(Counters* counters);

 private:
  struct Request {
    std::array<uint64_t, 32> addresses;
    std::array<uint64_t, 32> to;
    uint32_t lanes = 0;
    uint32_t readers = 0;
  };
  // The requests of one line of the source with accesses of one size.
  struct Group {
    Kind kind;
    Site site;
    size_t bytes;
    std::array<uint32_t, 32> accesses;  // by each lane since the last Flush
    std::vector<Request> requests;
  };

  Group& Find(Kind kind, Site site, size_t bytes);
  static void Count(const Group& group, const Request& request, Counters* counters);

  std::vector<Group> groups_;
  std::vector<int> table_;  // of groups_ by hash; -1 is free
  std::vector<int> active_;
};

}  // namespace kvant::simt

#endif  // KVANT_KERNELS_DEVICE_SIMT_TRAFFIC_H_
