// The SIMT executor: runs a kernel written in the vocabulary of device.h on the CPU, checks what a
// GPU would not, and counts what a GPU would do. For tests; never a product path.
//
// A block's threads are fibers of the calling OS thread. A fiber runs until it has to wait, at a
// barrier or a collective of its warp. Blocks run one after another, so a kernel in which a block
// waits for another one does not end.
#ifndef KVANT_KERNELS_DEVICE_SIMT_H_
#define KVANT_KERNELS_DEVICE_SIMT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

namespace kvant::simt {

struct LaunchShape {
  int64_t blocks = 1;
  int threads = 32;         // per block; a multiple of 32, at most 1024
  size_t shared_bytes = 0;  // of dynamic shared memory
};

// A range of global memory.
struct Range {
  const void* base = nullptr;
  size_t bytes = 0;
};

// How mma adds. By default in f32, in the order of k, rounding each sum. Tensor cores rather add
// the accumulator and `products` products at a time: all are shifted to the largest exponent among
// them, what falls below the f32 mantissa and `extra_bits` more is cut off, and so is the sum's
// excess. Published measurements (Fasi et al. 2021, arXiv 2512.07004) give, for 16-bit elements,
// {4, 0} for V100, {8, 1} for A100 and {16, 2} for H100.
struct MmaModel {
  int products = 0;  // 0: f32 sums
  int extra_bits = 0;
};

struct Options {
  bool races = true;  // check accesses to memory, beyond their bounds and alignment
  bool count = true;  // fill the counters of memory traffic
  uint64_t seed = 0;  // of the order of blocks and threads; 0 is the natural order
  MmaModel accumulate;
  // Ranges whose reads are counted per byte (Report::reads).
  std::vector<Range> watches;
  // If not empty: all that the kernel may touch in global memory.
  std::vector<Range> buffers;
};

// A request is one instruction of a warp: the accesses of its lanes from one line of the source
// between two collectives, the i-th of each lane together. A sector is 32 aligned bytes. A
// wavefront is what shared memory does at once: a word from each of 32 banks; accesses of 16 bytes
// go by quarters of a warp, of 8 bytes by halves. The ideals are what the same bytes would take if
// they lay densely, without bank conflicts.
struct Counters {
  uint64_t global_loads = 0;
  uint64_t global_load_sectors = 0;
  uint64_t global_load_sectors_ideal = 0;
  uint64_t global_stores = 0;
  uint64_t global_store_sectors = 0;
  uint64_t global_store_sectors_ideal = 0;
  uint64_t atomics = 0;  // by lane
  uint64_t fences = 0;   // by lane

  uint64_t shared_loads = 0;
  uint64_t shared_load_wavefronts = 0;
  uint64_t shared_load_wavefronts_ideal = 0;
  uint64_t shared_stores = 0;
  uint64_t shared_store_wavefronts = 0;
  uint64_t shared_store_wavefronts_ideal = 0;
  uint64_t load_matrices = 0;  // by warp, as are all counters that follow
  uint64_t load_matrix_wavefronts = 0;
  uint64_t load_matrix_wavefronts_ideal = 0;

  uint64_t copies = 0;  // cp.async
  uint64_t copy_sectors = 0;
  uint64_t copy_sectors_ideal = 0;
  uint64_t copy_wavefronts = 0;
  uint64_t copy_wavefronts_ideal = 0;
  // The largest, over blocks, sum of what each thread had under way at its peak, in bytes.
  uint64_t copy_bytes_in_flight = 0;

  uint64_t mma_f16_k16 = 0;
  uint64_t mma_f16_k8 = 0;
  uint64_t mma_bf16_k16 = 0;
  uint64_t mma_tf32_k8 = 0;
  uint64_t transposes = 0;
  uint64_t shuffles = 0;
  uint64_t votes = 0;
  uint64_t warp_barriers = 0;
  uint64_t block_barriers = 0;  // by block

  bool operator==(const Counters&) const = default;
};
// Those that are not 0, as "name value, name value".
std::ostream& operator<<(std::ostream& out, const Counters& counters);

enum class Check {
  kArgument,       // the launch, or an operation, has arguments that no GPU accepts
  kRace,           // accesses to memory without the right barrier or fence between them
  kPendingCopy,    // touches what a copy that was not waited for will write
  kUninitialised,  // reads shared memory that the block has not written
  kBounds,         // outside of the shared memory or of Options::buffers
  kAlignment,      // a vector access that is not aligned to its size
  kDivergence,     // threads come to different barriers or collectives
  kDeadlock,       // threads wait for others that do not come
};

struct Error {
  Check check = Check::kArgument;
  std::string message;  // a sentence with file and line, thread, block and address
};
inline std::ostream& operator<<(std::ostream& out, const Error& error) {
  return out << error.message;
}

struct Report {
  Counters counters;
  // Each pair of lines in the source at most once per check. After one that makes going on
  // meaningless (divergence, deadlock), the launch has ended there.
  std::vector<Error> errors;
  // Per range of Options::watches and byte: how many times Load or CopyAsync read it.
  std::vector<std::vector<uint32_t>> reads;
};

// Runs `body` as each thread of each block. May be called from several OS threads at once, not
// from within a kernel. `body` may not throw.
Report Launch(const LaunchShape& shape, const Options& options, const std::function<void()>& body);

}  // namespace kvant::simt

#endif  // KVANT_KERNELS_DEVICE_SIMT_H_
