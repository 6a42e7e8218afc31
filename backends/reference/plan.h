// Plan: the steps that a partition becomes, and the memory they share.
//
// Inside a plan every tensor is a dense row-major array of f32, or of exact s32 or s64 where the
// graph has those. Narrow integers, boolean and f8, f16, bf16 are exact in f32. An array is
// written by one step and lies in a scratch arena, where its memory is used again after its last
// reader; its offset is known when the plan is finished, so a run allocates nothing.
#ifndef KVANT_BACKENDS_REFERENCE_PLAN_H_
#define KVANT_BACKENDS_REFERENCE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "dnnl.hpp"
#include "kvant/backends/backend.h"
#include "kvant/graph/data_type.h"
#include "kvant/graph/logical_tensor.h"
#include "kvant/graph/status.h"

namespace kvant::reference {

enum class Storage : uint8_t { kF32, kS32, kS64 };

// How a plan keeps a tensor of this type.
inline Storage StorageOf(DataType type) {
  return type == kS32 ? Storage::kS32 : type == kS64 ? Storage::kS64 : Storage::kF32;
}
inline size_t BytesOf(Storage storage) { return storage == Storage::kS64 ? 8 : 4; }

// A handle; copies of it with other dims are the same memory, reshaped. By default it is of none,
// as for an input that an op does not have.
struct Array {
  int id = -1;
  Storage storage = Storage::kF32;
  Dims dims;

  explicit operator bool() const { return id >= 0; }
  int64_t elements() const { return ElementsOf(dims); }
};

inline Array Reshaped(Array array, Dims dims) {
  array.dims = std::move(dims);
  return array;
}

// What a step sees when it runs.
struct RunContext {
  Executor& executor;
  dnnl::stream& stream;
  absl::Span<const void* const> inputs;  // ports
  absl::Span<void* const> outputs;       // ports
  absl::Span<void* const> arrays;        // by id

  template <typename T = float>
  T* data(const Array& array) const {
    return static_cast<T*>(arrays[array.id]);
  }
  // Of an s32 array: element n, or the one that is for all rows.
  int64_t of_row(const Array& array, int64_t n) const {
    return data<int32_t>(array)[array.elements() == 1 ? 0 : n];
  }
  // Element i of an array of f32 or s32.
  double value(const Array& array, int64_t i) const {
    return array.storage == Storage::kS32 ? data<int32_t>(array)[i] : data(array)[i];
  }
};

using Step = std::function<void(const RunContext&)>;

class Plan {
 public:
  Array NewArray(Dims dims, Storage storage = Storage::kF32);
  // Memory of an input port, used where it lies. It is read only.
  Array PortArray(int port, Dims dims, Storage storage);

  // Arrays that are of none are left out. writes[0] may take the memory of reads[overwrites], if
  // that is one, when nothing reads it later; the step must then work in place. What is written and
  // never read is memory for this step only.
  void AddStep(absl::Span<const Array> reads, absl::Span<const Array> writes, Step run,
               int overwrites = -1);

  // Run before all steps, so that nothing is written where one fails.
  using Check = std::function<absl::Status(absl::Span<const void* const> inputs)>;
  void AddCheck(Check check) { checks_.push_back(std::move(check)); }

  // Says why what is added cannot run; the first reason stays.
  void Decline(std::string why) {
    if (declined_.empty()) declined_ = std::move(why);
  }
  const std::string& declined() const { return declined_; }

  // Lays the arrays out; nothing may be added afterwards.
  void Finish();

  size_t scratch_bytes() const { return scratch_bytes_; }
  // Needs scratch_bytes() bytes, 64-byte aligned. Steps may throw dnnl::error.
  absl::Status Run(const Execution& run) const;

 private:
  struct ArrayInfo {
    size_t bytes = 0;
    int port = -1;   // lies there, not in scratch
    int place = -1;  // the array in whose memory it lies: itself, or the first that was overwritten
    int first = -1;  // step that writes it
    int last = -1;   // last step that reads it, or what lies in its place
    size_t offset = 0;
  };
  struct StepInfo {
    Step run;
    int overwrites = -1, result = -1;  // ids of arrays
  };

  std::vector<ArrayInfo> arrays_;
  std::vector<StepInfo> steps_;
  std::string declined_;
  std::vector<Check> checks_;
  size_t scratch_bytes_ = 0;
};

}  // namespace kvant::reference

#endif  // KVANT_BACKENDS_REFERENCE_PLAN_H_
