// Attention graphs by description, for `kvant make` and for tests.
#ifndef KVANT_TOOLS_ATTENTION_GRAPH_H_
#define KVANT_TOOLS_ATTENTION_GRAPH_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "kvant/cache/number_format.h"
#include "kvant/graph/graph.h"

namespace kvant {

struct AttentionGraphOptions {
  int64_t batch = 1;
  int64_t heads = 8;
  int64_t kv_heads = 0;  // 0: heads
  int64_t q_len = 1;
  int64_t kv_len = 256;
  int64_t head_size = 64;
  int64_t v_head_size = 0;           // 0: head_size
  DataType dtype = kF32;             // of queries, masks and output
  std::optional<NumberFormat> k, v;  // absent: dtype
  // Of the graph, applied to integers where K or V is quantized; absent: dtype, strict for f32.
  std::optional<FpMath> fpmath;

  enum class Scale : uint8_t { kDivide, kMultiply, kNone };
  Scale scale = Scale::kDivide;
  std::optional<float> soft_cap;
  enum class Causal : uint8_t { kNone, kTopLeft, kBottomRight };
  Causal causal = Causal::kNone;
  // Shapes over [batch, heads, queries, keys], numbers or N, H, Q, S: "1x1xQxS".
  // Empty: absent.
  std::string mask;    // added to the scores
  std::string select;  // false masks
  bool stats = false;
  bool dropout = false;
  // Queries, K, V, probabilities and output are codes of 8 bits with constant scales, as in
  // oneDNN's graphs of int8; `dtype` is f32, k and v are absent.
  bool static_int8 = false;
  bool transpose_output = false;  // [batch, queries, heads, head size]
  // K and V were rotated in blocks of so many channels when they were written, so that queries and
  // output are; 0: not.
  int64_t hadamard = 0;
  enum class KLayout : uint8_t {
    kTokens,      // [.., S, D], multiplied transposed
    kTransposed,  // the same memory seen as [.., D, S]
    kChannels,    // [.., D, S] with the tokens innermost
  };
  KLayout k_layout = KLayout::kTokens;
  bool token_major = false;  // K and V lie as [N, S, H, D]
  // V is the first v_head_size channels of K, which lie in memory once.
  bool latent = false;
  // An input says how many tokens each sequence has.
  bool kv_lengths = false;
  // K and V in pools of pages of so many tokens, with kv_lengths; 0: not.
  int64_t page_size = 0;
  // K and V in rings, of which inputs say what is in them. Not with kv_lengths or pages.
  bool ring = false;
  // Beside those of k and v: so many tokens before them, and behind them, in the queries' type,
  // each run in a ring, as in a cache with sinks and a window. Where there are any, it is as with
  // ring.
  int64_t sink_tokens = 0, window_tokens = 0;

  // One ScaledDotProductAttention instead of MatMuls and SoftMax. The rest only
  // with it.
  bool single_op = false;
  int64_t left_window = -1;
  bool sinks = false;
  bool alibi = false;
  bool ragged = false;  // queries of all sequences packed, batch x q_len in all
};

// Finalized, shapes inferred; 5-D when heads and kv_heads differ (but 4-D for
// single_op). kInvalidArguments with a sentence for options that do not go together.
absl::StatusOr<Graph> MakeAttentionGraph(const AttentionGraphOptions& options);

}  // namespace kvant

#endif  // KVANT_TOOLS_ATTENTION_GRAPH_H_
