// Runs decoded kernels: blocks of warps of 32 lanes, several blocks side by side, in random order.
//
// Environment, read once by Options::FromEnvironment:
//   PTXEMU_SEED           order of blocks and of warps; whether cp.async arrives at once or when
//                         waited for; in which direction approximations are off
//   PTXEMU_RESIDENT       how many blocks run side by side (3)
//   PTXEMU_APPROX_ULPS    by how much ex2, rcp, lg2 and the like are off: up to 2 (the default),
//   and
//                         no more than the ISA states
//   PTXEMU_CONTRACT=1     mul and add (or sub) without .rn become fma, as ptxas may do
//   PTXEMU_TRUNCATE_MMA=1 matrix products are summed as tensor cores are measured to sum: cut off
//                         25 bits below the largest term, then toward zero; else rounded once
//   PTXEMU_RACES=1        look for races in shared memory
//   PTXEMU_HOST_MEMORY=1  kernels may follow pointers of the host, unchecked
#ifndef KVANT_TESTS_PTXEMU_MACHINE_H_
#define KVANT_TESTS_PTXEMU_MACHINE_H_

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvant/tests/ptxemu/device_memory.h"

namespace kvant::ptxemu {

struct Kernel;

inline constexpr int kLanes = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

struct Options {
  uint64_t seed = 1;
  int resident_blocks = 3;
  int approx_ulps = 2;
  bool contract = false;
  bool truncate_mma = false;
  bool races = false;
  bool host_memory = false;
  static Options FromEnvironment();
};

// What ran in this process.
struct Counters {
  uint64_t launches = 0, blocks = 0, instructions = 0;
  std::map<std::string, uint64_t> opcodes;     // how often warps executed each
  std::map<std::string, uint64_t> kernels;     // launches of each
  std::map<std::string, uint64_t> contracted;  // by kernel, how many fma were made
};
Counters& GlobalCounters();

// What a kernel or a caller did wrong. code: the CUresult that a driver would give.
struct Fault : std::runtime_error {
  Fault(int result, const std::string& what) : std::runtime_error(what), code(result) {}
  int code;
};
inline constexpr int kIllegalAddress = 700, kMisaligned = 716, kIllegalInstruction = 715,
                     kLaunchFailed = 719;

struct LaunchShape {
  unsigned grid[3], block[3];
  size_t dynamic_shared;
};

// number: of this launch in its process, from 1. Throws a Fault.
void RunKernel(const Kernel& kernel, const LaunchShape& shape, const std::vector<uint8_t>& params,
               DeviceMemory& memory, const Options& options, uint32_t number);

}  // namespace kvant::ptxemu

#endif  // KVANT_TESTS_PTXEMU_MACHINE_H_
