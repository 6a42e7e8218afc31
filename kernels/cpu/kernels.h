// The inner loops of attention, one set per instruction set.
#ifndef KVANT_KERNELS_CPU_KERNELS_H_
#define KVANT_KERNELS_CPU_KERNELS_H_

#include <cstdint>
#include <string_view>

#include "kvant/graph/data_type.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/codes.h"

namespace kvant::cpu {

struct KernelSet {
  const char* name;

  // Elements [index, index + n) of the array at `data` as f32; any element type, any
  // alignment, and no byte outside those elements is read.
  void (*load)(DataType type, const void* data, int64_t index, int64_t n, float* out);

  // scores[r][t] = sum_d q[r][d] * k[d][t] for t < kTokenTile.
  // q: [rows][head_size], k: [head_size][kTokenTile], scores: [rows][kTokenTile].
  void (*qk)(const float* q, int64_t rows, int64_t head_size, const float* k, float* scores);

  // One step of online softmax on scores [rows][kTokenTile], which become
  // exp(score - max): updates each row's running max and sum, and leaves the factor
  // by which what was accumulated so far must shrink.
  void (*softmax)(float* scores, int64_t rows, float* max, float* sum, float* shrink);

  // scores[i] = exp(scores[i] - max) for i < kTokenTile; scores <= max.
  void (*exp_row)(float* scores, float max);

  // out[r][d] = out[r][d] * shrink[r] + sum_{t < tokens} probs[r][t] * v[t][d].
  // probs: [rows][kTokenTile], v: [tokens][head_size], out: [rows][head_size].
  void (*pv)(const float* probs, int64_t rows, int64_t tokens, const float* v, int64_t head_size,
             const float* shrink, float* out);

  void (*tanh)(float* values, int64_t n);

  // Integer dot products on stored codes; null where there are none.
  const CodeKernels* codes;
};

// The highest set that this CPU has, chosen once; or the one that the environment
// variable KVANT_CPU_ISA names. Null if it names none that this CPU has.
const KernelSet* ChosenKernels();

// Every set in the table that this CPU has, lowest first, with its position: null past the end.
const KernelSet* KernelsAt(int position);
// The names in the table, for messages: "portable".
std::string_view KernelNames();

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_KERNELS_H_
