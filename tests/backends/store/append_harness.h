// One Append, or AppendPages, over guarded memory, on any backend, judged by the oracle's
// DynamicQuantize. Backends: the oracle, the kernels of every instruction set, and CUDA's on the
// SIMT executor.
#ifndef KVANT_TESTS_BACKENDS_STORE_APPEND_HARNESS_H_
#define KVANT_TESTS_BACKENDS_STORE_APPEND_HARNESS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/tests/backends/store/quantize_harness.h"

namespace kvant::testing {

struct AppendCase {
  std::string name;
  Dims dims;  // of src
  int64_t capacity = 0;
  std::vector<int64_t> positions;  // by row, or one for all
  Dims group = {};                 // of dst; none: a conversion to types.codes
  QuantizeTypes types = {};
  bool given = false;  // scales and zero points are inputs
  int axis = 2;
  std::optional<Dims> src_strides = std::nullopt, dst_strides = std::nullopt,
                      parameter_strides = std::nullopt;
  std::vector<float> codebook = {};
  bool ggml = false;
  // Not 0: AppendPages to so many pages of `capacity` tokens, positions being slots. dims are of
  // tokens as rows, with 1 along the axis; src and src_strides are without that.
  int64_t pages = 0;
  DataType position_type = kS32;

  bool converts() const { return group.empty(); }
  LogicalTensor src() const;
  LogicalTensor position() const;
  LogicalTensor dst() const;
  LogicalTensor scales() const;
  LogicalTensor zero_points() const;
  int64_t PositionOf(int64_t row) const { return positions[positions.size() > 1 ? row : 0]; }
  // Tokens of dst, counted as positions are.
  int64_t Room() const { return capacity * (pages > 0 ? pages : 1); }
  absl::StatusOr<Partition> MakePartition() const;
};

// For GoogleTest.
inline void PrintTo(const AppendCase& test, std::ostream* out) { *out << test.name; }

struct AppendBackend {
  std::string name;
  std::function<absl::StatusOr<std::unique_ptr<Executable>>(const Partition&)> compile;
  bool threads = false;  // what it writes is to be the same on several
};
const std::vector<AppendBackend>& AppendBackends();

// Any bytes; of parameters that are given, ones that make sense.
QuantizeMemory MemoryBefore(const AppendCase& test, uint32_t seed = 1);

// What memory is like afterwards; or the error, after which it must be as before.
absl::StatusOr<QuantizeMemory> RunAppend(const AppendCase& test, const Executable& executable,
                                         Executor& executor, const Bytes& src,
                                         const QuantizeMemory& before);

// That `after` has codes and parameters of `values` as ExpectAsOracle wants them where they belong,
// and is `before` everywhere else, bit for bit.
void ExpectAppended(const AppendCase& test, const std::vector<double>& values,
                    const QuantizeMemory& before, const QuantizeMemory& after);

// On every backend. CUDA's kernels must write the bits that those of the CPU do.
void ExpectAppends(const AppendCase& test, const std::vector<double>& values);
void ExpectAppends(const AppendCase& test);

}  // namespace kvant::testing

#endif  // KVANT_TESTS_BACKENDS_STORE_APPEND_HARNESS_H_
