// One DynamicQuantize over guarded memory, on any backend, and what its codes may be.
#ifndef KVANT_TESTS_BACKENDS_STORE_QUANTIZE_HARNESS_H_
#define KVANT_TESTS_BACKENDS_STORE_QUANTIZE_HARNESS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvant/backends/backend.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/patterns/partition.h"
#include "kvant/tests/backends/ops/op_testing.h"

namespace kvant::testing {

// Which elements are a group, and where they lie.
struct QuantizeLayout {
  std::string name;
  Dims dims;
  Dims group = {};                             // given: per_group
  std::optional<int64_t> axis = std::nullopt;  // given: per_channel; neither: per_tensor
  std::optional<Dims> src_strides = std::nullopt, code_strides = std::nullopt,
                      parameter_strides = std::nullopt;
};

struct QuantizeTypes {
  DataType src = kF32, codes = kS8, scales = kF32, zero_points = kUndef;
  std::string ToString() const;
};

struct QuantizeCase {
  QuantizeLayout layout;
  QuantizeTypes types;
  bool power_of_two = false;
  float floor = 0;
  std::vector<float> codebook = {};  // given: codes are unsigned
  bool ggml = false;

  Attributes attributes(bool computes) const;
  LogicalTensor src() const;
  LogicalTensor codes() const;
  LogicalTensor scales() const;
  LogicalTensor zero_points() const;
  // Of the form that computes scales or of the one that takes them.
  Graph MakeGraph(bool computes) const;
  Partition MakePartition(bool computes) const;
};

// Memory of the op's tensors; zero_points is empty without.
struct QuantizeMemory {
  Bytes codes, scales, zero_points;
  bool operator==(const QuantizeMemory&) const = default;
};

// Runs it on memory that ends where an unreadable page begins. `given` has the scales and zero
// points that are taken; nothing: they are computed.
QuantizeMemory RunQuantize(const QuantizeCase& test, const Executable& executable,
                           Executor& executor, const Bytes& src,
                           const QuantizeMemory* given = nullptr);
QuantizeMemory RunOracle(const QuantizeCase& test, const Bytes& src,
                         const QuantizeMemory* given = nullptr);

// Scales and zero points must be the oracle's, codes such that the error of no value is more by
// 1e-4 steps, so that they differ by one, at ties, or not at all. Bytes that are no element must be
// as they were. With ggml, codes must be the oracle's. `x`: the numbers, as src's type has them.
void ExpectAsOracle(const QuantizeCase& test, const std::vector<double>& x,
                    const QuantizeMemory& got, const QuantizeMemory& want, bool computes);

// Runs the kernels of every instruction set on 1, 2 and 7 threads, which must give the same bits,
// and judges them so; of codebooks and ggml's formula CUDA's as well, on the SIMT executor.
void ExpectQuantizes(const QuantizeCase& test, const std::vector<double>& values);
// Also with the scales and zero points taken that the oracle computes.
void ExpectQuantizesBothForms(const QuantizeCase& test, const std::vector<double>& values);
void ExpectQuantizesWith(const QuantizeCase& test, const std::vector<double>& values,
                         const QuantizeMemory& given);

// Normally distributed, with a mean and a spread that differ from stretch to stretch.
std::vector<double> QuantizeNumbers(const Dims& dims, uint32_t seed = 1);
// Every type of numbers, codes, scales and zero points; those of scales take turns.
std::vector<QuantizeTypes> AllQuantizeTypes();
const std::vector<QuantizeLayout>& QuantizeLayouts();

}  // namespace kvant::testing

#endif  // KVANT_TESTS_BACKENDS_STORE_QUANTIZE_HARNESS_H_
