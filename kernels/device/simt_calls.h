// What simt_ops.h asks of the executor, in the name of the fiber that runs.
#ifndef KVANT_KERNELS_DEVICE_SIMT_CALLS_H_
#define KVANT_KERNELS_DEVICE_SIMT_CALLS_H_

#include <cstddef>
#include <cstdint>

namespace kvant::simt {

// A line of a kernel's source.
struct Site {
  const char* file = nullptr;
  int line = 0;
};

struct Position {
  int thread = 0;
  int threads = 0;
  int64_t block = 0;
  int64_t blocks = 0;
};
Position CurrentPosition();

void BlockBarrier(Site site);
void WarpBarrier(Site site);
// The value of lane `lane ^ mask`, or of lane `from`.
uint32_t ShuffleXor(uint32_t value, int mask, Site site);
uint32_t ShuffleFrom(uint32_t value, int from, Site site);
bool AnyLane(bool value, Site site);

// Whether a thread may do this access, whose checks and counts are done here. Not `coherent`: it
// asks for what nobody writes during the launch.
bool BeginGlobalLoad(const void* from, size_t bytes, bool coherent, Site site);
bool BeginGlobalStore(const void* to, size_t bytes, Site site);
bool BeginAtomic(const void* at, size_t bytes, Site site);
void FenceGlobal();

// The address of the first byte of shared memory. Not 0, and aligned to 1024 bytes but no further.
inline constexpr uint32_t kSharedBase = 1024;
// `bytes` is 1, 2, 4, 8 or 16. What is out of bounds reads as zeros and is not written.
void ReadShared(uint32_t from, size_t bytes, void* to, Site site);
void WriteShared(uint32_t to, size_t bytes, const void* from, Site site);

void StartCopy(size_t bytes, uint32_t to, const void* from, size_t valid, Site site);
void CommitCopies();
void WaitForCopies(int pending);

void LoadMatrices(uint32_t row, bool transposed, uint32_t (&words)[4], Site site);
uint32_t TransposeWord(uint32_t word, Site site);

enum class MmaKind { kF16K16, kF16K8, kBF16K16, kTF32K8 };
// d += A x B; a and b have as many words as the kind's fragments.
void Mma(MmaKind kind, float (&d)[4], const uint32_t* a, const uint32_t* b, Site site);

}  // namespace kvant::simt

#endif  // KVANT_KERNELS_DEVICE_SIMT_CALLS_H_
