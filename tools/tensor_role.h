// What a graph input is for, found by walking to what consumes it.
#ifndef KVANT_TOOLS_TENSOR_ROLE_H_
#define KVANT_TOOLS_TENSOR_ROLE_H_

#include "kvant/graph/graph.h"

namespace kvant {

struct TensorRole {
  enum class Kind : uint8_t {
    kGeneral,
    kQuery,     // input 0 of a MatMul
    kKeyValue,  // input 1 of a MatMul
    kCodes,     // what a (Dynamic)Dequantize reads
    kScales,
    kZeroPoints,
    kDivisor,
    kMultiplier,  // a factor that scales scores
    kCapInverse,  // the factor before a Tanh ...
    kCap,         // ... and the one after it
    kMask,        // added to scores
    kFill,        // what a Select puts where it masks
    kCondition,
    kKvLength,  // s32 scalars of a bottom-right causal mask
    kQueryLength,
    kKvLengths,  // s32, one per batch
    kFirstTokens,
    kPageTable,
    kRanges,
    kQueryOffsets,
    kPositions,  // where an Append writes, one per batch, or an AppendPages, one per token
    kStats,      // log-sum-exp that backward subtracts before Exp
    kSinks,
    kSlopes,
    kPositive,  // Log, Sqrt, Reciprocal
    kSeed,
    kProbability,
  };
  Kind kind = Kind::kGeneral;
  // The op that decides it; null for kGeneral without a consumer.
  const Op* op = nullptr;
};

// `graph` is finalized and outlives the result.
TensorRole RoleOf(const Graph& graph, TensorId id);

// Whether a tensor flows into a SoftMax (or backward's Exp) through elementwise
// ops; `softmax`, if not null, receives the op.
bool FeedsSoftMax(const Graph& graph, TensorId id, const Op** softmax = nullptr);

}  // namespace kvant

#endif  // KVANT_TOOLS_TENSOR_ROLE_H_
