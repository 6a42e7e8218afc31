// AttentionSpec: the one place where "what attention is this" is written down.
//
// Everything is expressed in five axes: three batch axes B0, B1, B2 (usually
// batch N, key/value head Hkv and the R query heads that share it), then rows
// and columns. Reshapes, transposes and layouts of the graph are folded into
// strides: a View says where element [b0, b1, b2, row, col] lies in a port's
// memory. A stride of 0 broadcasts. So a backend sees no graph and no rank.
//
//   scores[r, c] = sum_d Q[r, d] * K[c, d]
//   scores       = steps applied in order (scale, cap, masks, ...)
//   probs        = softmax over c (with optional sink logit), prob steps;
//                  over r instead if over_queries
//   O[r, d]      = sum_c probs[r, c] * V[c, d], output steps
#ifndef KVANT_PATTERNS_ATTENTION_SPEC_H_
#define KVANT_PATTERNS_ATTENTION_SPEC_H_

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "kvant/graph/graph.h"
#include "kvant/graph/logical_tensor.h"

namespace kvant {

inline constexpr int kViewRank = 5;  // b0, b1, b2, row, col

// Index of a port in Partition::inputs or Partition::outputs; kNoPort: absent.
inline constexpr int kNoPort = -1;
// Where a tensor is among these ports.
int PortOf(absl::Span<const TensorId> ports, TensorId id);

// Where a logical [b0, b1, b2, rows, cols] array lies in a port's memory.
struct View {
  int port = kNoPort;
  DataType type = kUndef;
  std::array<int64_t, kViewRank> dims{};     // broadcast axes have dim 1 ...
  std::array<int64_t, kViewRank> strides{};  // ... and stride 0; in elements
  int64_t offset = 0;                        // elements before [0,0,0,0,0]
  bool on_host = false;                      // a host scalar's port: there on every engine

  bool present() const { return port != kNoPort; }
  // One element, wherever it is broadcast to.
  bool scalar() const;
};

// Where an array of a spec without axes of its own lies: it is walked along the dims of a tensor.
struct PortArray {
  int port = kNoPort;  // of the outputs if `output`, else of the inputs
  bool output = false;
  std::optional<Constant> constant;  // instead of a port
  bool on_host = false;              // a host scalar's port
  DataType type = kUndef;
  Dims strides;  // in elements; 0 broadcasts

  bool present() const { return type != kUndef; }
  // Where it lies at execution.
  const void* Find(absl::Span<const void* const> inputs, absl::Span<void* const> outputs) const {
    if (constant) return constant->data();
    return output ? outputs[port] : inputs[port];
  }
};

// That of a tensor of known shape, by its own strides; without a port if it is none of these.
PortArray FindPortArray(const Graph& graph, absl::Span<const TensorId> inputs,
                        absl::Span<const TensorId> outputs, TensorId id);

// A value that is either a constant of the graph or read from a port.
struct Operand {
  std::optional<Constant> constant;
  View view;
};

// How codes become values, group by group: (code - zp) * scale for an integer
// zero point; code * scale - zp for a floating-point one, which is in real units
// (quanto's shift; minus KIVI's minimum). `scales` and `zero_points` are views over groups: group
// index along an axis is coordinate / group[axis].
struct Quantization {
  std::array<int64_t, kViewRank> group{1, 1, 1, 1, 1};  // elements per group and axis
  View scales;                                          // absent: static_scales
  View zero_points;                                     // absent: static_zps, or none
  // Static (Dequantize op): one per tensor, or one per element of static_axis.
  std::vector<float> static_scales;
  std::vector<int64_t> static_zps;
  int static_axis = -1;  // -1: per tensor
  // Not empty: codes are positions in it, and codebook[code] * scale is the value.
  std::vector<float> codebook;
};

// A run of tokens of K or V: [b0, b1, b2, tokens, head size], broadcast
// over b2 when query heads share it. Or some of them, by a range or a page table: s32 over b0 and
// col.
struct KvSegment {
  View data;
  std::optional<Quantization> quantization;
  // {first, tokens}: of batch row b0, tokens first, first + 1, ..., beginning again with token 0
  // after the last. All segments have one, or none.
  View range;
  // The pages of batch row b0, in order. Axis b0 of data, scales and zero points is then pages, and
  // axis row tokens of a page.
  View page_table;

  // Columns that it may have.
  int64_t tokens() const { return data.dims[3] * (page_table.present() ? page_table.dims[4] : 1); }
};

// One step on the scores, in graph order. Order matters: Add after Select is not
// Select after Add.
struct ScoreStep {
  enum class Kind : uint8_t {
#define KVANT_SCORE_STEP(name, operands, words) k##name,
#include "kvant/graph/score_steps.inc"
  };
  Kind kind{};
  Operand operand;
  View condition;         // kSelect: boolean
  bool inverted = false;  // kSelect, kBand: the scores are on the false branch
  // kBand: in band when -left <= col - (row + shift) <= right; nothing: unbounded.
  std::optional<int64_t> left, right;
  // kBand, kAlibi: shift is 0 (top-left), the KV length minus the query length
  // (bottom-right; the real ones of the batch row), or shift_add - shift_sub read
  // from ports at execution. Kernels have the same three, in this order.
  enum class Alignment : uint8_t { kTopLeft, kBottomRight, kRuntime };
  Alignment alignment = Alignment::kTopLeft;
  Operand shift_add, shift_sub;
};

// Static fake quantization: value -> code -> value, round half to even, saturating.
struct FakeQuantize {
  DataType type = kUndef;
  float scale = 1.f;
  int64_t zero_point = 0;
};

struct Dropout {
  Operand seed, offset, probability;
  View mask;  // optional output, u8-like: 1 where kept
};

enum class SoftmaxMode : uint8_t { kNone, kInfAsZero };

// What a spec uses.
enum class Feature : uint8_t {
#define KVANT_FEATURE(name, words) name,
#include "kvant/patterns/features.inc"
};

class FeatureSet {
 public:
  constexpr FeatureSet() = default;
  constexpr FeatureSet(std::initializer_list<Feature> features) {
    for (const Feature feature : features) Add(feature);
  }
  constexpr void Add(Feature feature) { bits_ |= uint64_t{1} << static_cast<int>(feature); }
  constexpr bool Has(Feature feature) const {
    return (bits_ >> static_cast<int>(feature) & 1) != 0;
  }

 private:
  uint64_t bits_ = 0;
};

struct AttentionSpec {
  // Extents of the whole problem: the batch axes, Sq, S (sum over segments),
  // head sizes of K and V.
  std::array<int64_t, 3> batch{1, 1, 1};
  int64_t q_len = 0;
  int64_t kv_len = 0;
  int64_t head_size = 0;
  int64_t v_head_size = 0;

  View q;  // [.., q_len, head_size]
  std::optional<Quantization> q_quantization;
  // Runs of so many channels are multiplied by a Hadamard matrix / sqrt(run); 0: no. Rotations of K
  // are here too, because (K H) Q = K (H Q), and those of V in the output's.
  int64_t q_hadamard = 0;
  int64_t output_hadamard = 0;
  absl::InlinedVector<KvSegment, 1> k;  // [.., tokens, head_size] each
  absl::InlinedVector<KvSegment, 1> v;  // [.., tokens, v_head_size] each
  absl::InlinedVector<ScoreStep, 3> steps;

  SoftmaxMode softmax_mode = SoftmaxMode::kInfAsZero;
  // Each key's scores are normalised over the q_len queries of [b0, b1, b2]: the weights that a
  // query gives do not add up to 1, those that a key gets do. In oneDNN's JAX-MQA graph.
  bool over_queries = false;
  View sinks;  // [.., b1, b2] logits that join the denominator only
  // Which columns exist in a batch row: [kv_first, kv_lengths), s32 over b0; the columns of
  // segments come one after another. Where segments have ranges, the columns of these, as many of K
  // as of V, are in place of kv_lengths.
  View kv_lengths, kv_first;
  // s32 over b0, one more than there are batch rows. Row b0 has queries [query_offsets[b0],
  // query_offsets[b0 + 1]) of q_len: these are the rows of q, the output, statistics and whatever
  // lies over the scores, for all b0 (of extent 1), and a diagonal's rows count from the first.
  View query_offsets;
  View stats;  // optional output [.., q_len, 1]: max + ln(sum exp(x - max))
  // What statistics are of a row without a score that becomes zeros: 0 after oneDNN's SoftMax, of
  // ScaledDotProductAttention ln 0, by which MergeAttention knows such rows.
  float stats_of_empty = 0.f;

  std::optional<Dropout> dropout;  // on normalized probabilities
  std::optional<FakeQuantize> probs_quantization;

  View output;  // [.., q_len, v_head_size]
  // Per tensor; the output port has the integer type.
  std::optional<FakeQuantize> output_quantization;

  FpMath fpmath = FpMath::kStrict;
  bool apply_to_int = false;

  FeatureSet Features() const;
  bool Uses(Feature feature) const { return Features().Has(feature); }
  // In words, one line: "32 query heads over 8 KV heads, 1 x 4096, head size
  // 128; K u4 groups of 32 along the head with zero points; ...".
  std::string ToString() const;
};

// In words, what of the spec is not among what a backend takes, or is taken by no kernel: types,
// groups, lengths that do not add up. Empty if all is.
std::string WhyNotTaken(const AttentionSpec& spec, FeatureSet takes);

}  // namespace kvant

#endif  // KVANT_PATTERNS_ATTENTION_SPEC_H_
