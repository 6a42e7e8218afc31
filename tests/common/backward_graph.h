// Training-backward graphs as frameworks write them, for tests of the partitioner and the engines.
#ifndef KVANT_TESTS_COMMON_BACKWARD_GRAPH_H_
#define KVANT_TESTS_COMMON_BACKWARD_GRAPH_H_

#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "kvant/graph/builder.h"

namespace kvant::testing {

struct BackwardCase {
  std::string name;  // letters, digits and underscores
  DataType type = kF32;
  int64_t ratio = 1;  // query heads per key head; more than 1: 5-D, gradients of K and V summed
  int64_t q_len = 5, kv_len = 7;
  bool divide = false;        // the scale
  bool softmax_op = false;    // SoftMaxBackward instead of its parts
  bool dropout = false;       // on the probabilities and on their gradient
  bool f32_products = false;  // gradients stay f32 up to a last TypeCast
  // The gradient of the mask, if it is wanted: that of the scores, or its sum over some axes.
  struct MaskGradient {
    std::vector<int64_t> axes = {};  // empty: of the scores, marked by an End
    bool keep_dims = true;
    DataType type = kF32;  // another: through a TypeCast
  };
  std::optional<MaskGradient> mask_gradient;
};

inline std::ostream& operator<<(std::ostream& out, const BackwardCase& c) { return out << c.name; }

std::vector<BackwardCase> BackwardCases();

// Ports q, k, v, o, do, scale, mask, stats (and seed, offset, p); outputs dq, dk, dv (and dmask).
GraphBuilder BackwardGraph(const BackwardCase& c);

}  // namespace kvant::testing

#endif  // KVANT_TESTS_COMMON_BACKWARD_GRAPH_H_
