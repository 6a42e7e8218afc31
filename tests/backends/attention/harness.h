// Builds AttentionSpecs by hand over guarded memory and judges the cpu backend's kernels, and those
// of the CUDA backend on the executor, by plain f64 loops of its own.
#ifndef KVANT_TESTS_BACKENDS_ATTENTION_HARNESS_H_
#define KVANT_TESTS_BACKENDS_ATTENTION_HARNESS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvant/backends/backend.h"
#include "kvant/backends/executor.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/patterns/attention_spec.h"

namespace kvant::cpu {

using Dims5 = std::array<int64_t, kViewRank>;

// Memory that ends where an unreadable page begins.
class GuardedBuffer {
 public:
  explicit GuardedBuffer(size_t bytes);
  ~GuardedBuffer();
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* base_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  size_t mapped_ = 0;
};

// Runs each body on one of `threads` threads; slots are handed out highest first, so
// that a low slot is never taken for granted.
class ThreadExecutor : public Executor {
 public:
  explicit ThreadExecutor(int threads) : threads_(threads) {}
  int max_concurrency() const override { return threads_; }
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t, int)> body) override;

 private:
  int threads_;
};

struct Shape {
  int64_t b0 = 2, b1 = 2, ratio = 3, q_len = 2, kv_len = 65, d = 40, dv = 40;
};
// How K or V is stored.
struct Format {
  DataType type = kF32;
  Dims5 group{0, 0, 0, 0, 0};  // elements per group; 0: the whole axis
  DataType scales = kUndef;    // kUndef: not quantized
  DataType zero_points = kUndef;
  std::vector<float> codebook = {};  // given: `type` is unsigned
  // The last: all heads of a token side by side.
  enum class Order { kTokenMajor, kChannelMajor, kPadded, kInterleaved, kByToken } order{};
  bool per_query_head = false;  // varies over b2
  // Scales and zero points lie with groups of tokens innermost; or those of all heads of a token
  // side by side.
  bool parameters_by_channel = false, parameters_by_token = false;
};

class Case {
 public:
  explicit Case(const Shape& shape, uint32_t seed = 1);

  // Values that differ everywhere, with a mean that is not zero.
  View AddInput(DataType type, const Dims5& dims, const Dims5& strides,
                const std::function<double(const Dims5&)>& value, int64_t offset = 0);
  View AddDense(DataType type, const Dims5& dims, const std::function<double(const Dims5&)>& value);
  View AddScalar(DataType type, double value);
  View AddOutput(DataType type, const Dims5& dims, const Dims5& strides);
  double Random(double low, double high);

  KvSegment MakeSegment(const Format& format, int64_t tokens, int64_t channels);
  // One segment each, or at these tokens.
  void SetK(const Format& format) { SetK(format, {shape.kv_len}); }
  void SetV(const Format& format) { SetV(format, {shape.kv_len}); }
  void SetK(const Format& format, const std::vector<int64_t>& tokens);
  void SetV(const Format& format, const std::vector<int64_t>& tokens);
  void SetQ(DataType type);
  void AddStats();
  void AddScale();

  // Runs on every kernel set and on 1, 2 and 7 threads: results must be the same bits;
  // then compares with the f64 loops.
  void Check(double tolerance = 2e-5);
  absl::Status Run(const KernelSet& kernels, int threads);
  absl::Status Run(const KernelSet& kernels, Executor& executor);
  // Both backends; the second as CheckOnCudaSimt.
  void CheckEverywhere(double tolerance = 2e-5);
  // As cuda_simt has it, to `tolerance` or what its kernel rounds to. Returns that kernel's
  // description.
  std::string CheckOnCudaSimt(double tolerance = 2e-5);
  // Where all memory is aligned for it, and guarded behind its last 16 bytes.
  absl::Status RunOnCudaSimt(const Executable& executable);
  // Of a given seed for the order of threads.
  absl::StatusOr<std::unique_ptr<Executable>> CompileForCudaSimt(uint64_t seed = 0);

  // What the last run left in `outputs`.
  void CompareWithOracle(double tolerance);
  // What the f64 loops give, row by row.
  std::vector<double> Expected() const;
  // The L2 norm of how far the last run's output is from that, over its own.
  double RelativeError(const std::vector<double>& expected) const;

  Shape shape;
  AttentionSpec spec;
  std::deque<GuardedBuffer> inputs;
  std::deque<GuardedBuffer> outputs;

 private:
  std::mt19937 rng_;
};

// Queries, K and V, and scores divided by sqrt(d).
Case Plain(const Shape& shape, const Format& k = {}, const Format& v = {});
// The highest set of kernels that this CPU has.
const KernelSet& HighestKernels();

// A page table [lengths, of_row] of `pages`, in no order; -1 where a row needs none.
std::vector<int32_t> PagesInNoOrder(const std::vector<int32_t>& lengths, int64_t page_tokens,
                                    int64_t of_row, int64_t pages, std::mt19937& random);

int64_t IndexOf(const View& view, const Dims5& p);
Dims5 Dense(const Dims5& dims);

}  // namespace kvant::cpu

#endif  // KVANT_TESTS_BACKENDS_ATTENTION_HARNESS_H_
