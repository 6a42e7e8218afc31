// Codes that are positions in a table of values, and how the nearest of them is found.
#ifndef KVANT_KERNELS_CPU_CODEBOOK_H_
#define KVANT_KERNELS_CPU_CODEBOOK_H_

#include <cstdint>

namespace kvant::cpu {

// Which of two values as near gets a number in their middle: that of the lower code, or the larger.
enum class CodebookTies : uint8_t { kLowerCode, kLargerValue };

// A tree of thresholds between neighbouring values: at node n < 2^bits, from node 1 on, a number
// goes to node 2 n + 1 if it is larger than nodes[n], else to node 2 n. Where it ends after `bits`
// steps, the bits of nodes[n] are the code. NaN goes left.
struct Codebook {
  // `bits`: 2, 4 or 8. values: 2^bits of any order, finite, not all of them 0.
  Codebook(const float* values, int bits, CodebookTies ties);

  // The code of x, which is no NaN, by distances in f64; see CodeOf.
  int Nearest(double x) const;

  int bits;
  CodebookTies ties;
  float largest = 0;  // magnitude
  float nodes[512];
  float values[256];
};

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_CODEBOOK_H_
