// A problem for the kernel on packed codes, its answer in f64, and a run on the executor.
#ifndef KVANT_TESTS_BACKENDS_CUDA_ATTENTION_CODES_PROBLEM_H_
#define KVANT_TESTS_BACKENDS_CUDA_ATTENTION_CODES_PROBLEM_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvant/backends/cuda/attention/codes_plan.h"
#include "kvant/kernels/device/simt.h"

namespace kvant::cuda {

// K or V.
struct CodesSide {
  ElementType type = kUint4;
  int group = 0;  // 0: a row
  ElementType scales = kFloat16;
  ElementType zero_points = kNone;
  bool real_zero_points = false;
  bool common_scale = false, common_zero_point = false;  // to all tokens of a head
  // By channel: scales and zero points are each channel's, for so many tokens, or kAll of them.
  int tokens = 0;
  static constexpr int kAll = -1;
};

// What products of packed codes find hard, as real data have it.
struct CodesHardships {
  float k_size = 1.f, v_size = 1.f;        // of all scales; those of scores make up for K's
  float k_outlier = 1.f, v_outlier = 1.f;  // of scales of one token in eight
  // One group in three is zeros, with a scale of 1, as DynamicQuantize gives.
  bool k_zeros = false, v_zeros = false;
  float q_outlier = 0.f;  // of two channels of queries, in which K is 0
  float q_size = 1.f;     // of the others
  bool sink = false;      // the first token has nearly all of the weight, and V is 0 there
  bool k_nan = false, v_nan = false;  // one code of the first head's fourth token, of float codes
  std::string name;
};

struct CodesProblem {
  CodesSide k, v;
  CodesHardships hard;
  int head_size = 128, v_head_size = 128;
  bool latent = false;  // V is the first channels of K, and `v` is not looked at
  int batch = 1, kv_heads = 2, heads_per_kv = 4, q_len = 1;
  int capacity = 80;
  std::vector<int> lengths = {77};  // one per batch entry, or one for all and not on the device
  ElementType q = kFloat16, output = kFloat16;
  // Given, for each batch entry: K (V) is a ring in which the tokens begin here; ranges say so.
  std::vector<int> k_first, v_first;
  // Given: K (V) lies in pages of so many tokens, all over a pool.
  int k_page = 0, v_page = 0;
  bool heads_inside = false;  // [token][head] instead of [head][token], codes only
  float q_spread = 1.f, v_scale = .02f;
  float scale = 0.f;  // of scores; 0: 1 / sqrt(head_size)
  bool causal = false, soft_cap = false, sinks = false;
  int splits = 0;  // 0: as planned
  int row_blocks = 0, warp_tile = 0, stages = 0;
  bool converts_e4m3 = false;  // as devices from 9.0 on do
  bool normal_codes = false;   // codes are made normal f16 before they are multiplied
  uint64_t seed = 0;

  std::string Name() const;
};

struct CodesResult {
  std::string refused;      // by WhyNotCodes
  double error = 0;         // relative, L2, over all of the output that is to be a number
  int64_t wrong_nan = 0;    // elements that are NaN, or are not, where the answer is the other
  double own_error = 0;     // what f32 may lose by scores and sums of such magnitudes
  int64_t wrong_reads = 0;  // bytes of K, V and their parameters that were not read once
  simt::Report report;
  AttentionTraits traits;
};
CodesResult Solve(const CodesProblem& problem, bool watch = false);

}  // namespace kvant::cuda

#endif  // KVANT_TESTS_BACKENDS_CUDA_ATTENTION_CODES_PROBLEM_H_
