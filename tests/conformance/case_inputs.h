// The inputs of a case's graph: shapes, strides and data by role.
#ifndef KVANT_TESTS_CONFORMANCE_CASE_INPUTS_H_
#define KVANT_TESTS_CONFORMANCE_CASE_INPUTS_H_

#include <optional>
#include <string>
#include <vector>

#include "kvant/graph/builder.h"
#include "kvant/tests/conformance/case_graph.h"
#include "kvant/tests/conformance/cases.h"

namespace kvant::conformance {

// Leading dims of queries, of K and V, and of the scores.
Dims QueryLead(const Case& c);
Dims KvLead(const Case& c);
Dims ScoreLead(const Case& c);

// Strides of [lead.., rows, columns] in these buffers; nothing: dense.
std::optional<Dims> BufferStrides(Case::Buffers buffers, const Dims& dims);

// K or V, or a run of their tokens: codes, and how to read them.
struct Stored {
  Value data;
  std::optional<Value> scales, zero_points;
  Dims group_shape;  // empty: one scale for everything
  std::vector<float> codebook = {};
};

// Adds inputs to a builder and remembers what goes into them.
class CaseInputs {
 public:
  CaseInputs(const Case& c, GraphBuilder& builder) : c_(c), g_(builder) {}

  Value Query();
  // `tokens` tokens from token `first` on of K or V; plain: not quantized.
  Stored Keys(int64_t first, int64_t tokens, bool plain);
  Stored Values(int64_t first, int64_t tokens, bool plain);
  // 8-bit codes [lead.., rows, columns].
  Value Codes(const std::string& name, DataType type, const Dims& lead, int64_t rows,
              int64_t columns);
  // Additive values, or the condition of a select.
  Value MaskOperand(const Mask& mask);
  Value Scalar(const std::string& name, DataType type, double value);
  Value HostScalar(const std::string& name, DataType type, double value);
  Value Tensor(const std::string& name, DataType type, Dims dims, Fill fill,
               std::optional<Dims> strides = std::nullopt);
  Value KvLengths();
  Value FirstTokens();
  Value PageTable();
  Value QueryOffsets();
  Value Ranges(bool keys);
  void Remember(TensorId id, const std::string& name, Fill fill);
  std::string Unique(const std::string& name) const;

  std::vector<CaseInput> Take() { return std::move(inputs_); }

 private:
  Stored KvRun(const std::string& name, const Storage& storage, int64_t size, bool transposed,
               int64_t first, int64_t tokens, bool plain);

  const Case& c_;
  GraphBuilder& g_;
  std::vector<CaseInput> inputs_;
  int masks_ = 0;  // so far
};

}  // namespace kvant::conformance

#endif  // KVANT_TESTS_CONFORMANCE_CASE_INPUTS_H_
