// kvant make: an attention graph by description.
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "kvant/graph/json.h"
#include "kvant/graph/status.h"
#include "kvant/tools/attention_graph.h"
#include "kvant/tools/command.h"

namespace kvant {
namespace {

// "--name", which means `fallback`, or "--name=VALUE".
void AddOptionalValue(CLI::App& command, const std::string& name, std::string& value,
                      const std::string& fallback, const std::string& description) {
  const auto take = [&value, fallback](const std::vector<std::string>& given) {
    // Versions of CLI11 hand over no value as nothing, an empty one, or "{}".
    const bool left_out = given.empty() || given[0].empty() || given[0] == "{}";
    value = left_out ? fallback : given[0];
  };
  command.add_option_function<std::vector<std::string>>(name, take, description)
      ->expected(0, 1)
      ->type_name("[VALUE=" + fallback + "]");
}

struct MakeArguments {
  AttentionGraphOptions graph;
  std::string dtype = "f32", fpmath;
  std::string k;
  std::string v;
  std::string scale = "div";
  std::string causal;
  std::string soft_cap;
  std::string k_layout = "tokens";

  void AddTo(CLI::App& command) {
    command.add_option("--batch", graph.batch, "Sequences")->capture_default_str();
    command.add_option("--heads", graph.heads, "Query heads")->capture_default_str();
    command.add_option("--kv-heads", graph.kv_heads, "Key and value heads; as --heads by default")
        ->check(CLI::PositiveNumber);
    command.add_option("--q-len", graph.q_len, "Queries per sequence")->capture_default_str();
    command.add_option("--kv-len", graph.kv_len, "Keys per sequence")->capture_default_str();
    command.add_option("--head-size", graph.head_size, "Of queries and keys")
        ->capture_default_str();
    command.add_option("--v-head-size", graph.v_head_size, "Of values; as --head-size by default")
        ->check(CLI::PositiveNumber);
    command.add_option("--dtype", dtype, "Of queries, mask and output")
        ->check(CLI::IsMember({"f32", "f16", "bf16"}))
        ->capture_default_str();
    const std::string formats(NumberFormatHelp());
    command
        .add_option(
            "--fpmath", fpmath,
            "What products may be computed in, of codes as well; by default as --dtype where K "
            "or V is quantized, else strict")
        ->check(CLI::IsMember({"strict", "bf16", "f16", "any", "tf32"}));
    command.add_option("--k", k, "How K is stored: " + formats + "; as --dtype by default");
    command.add_option("--v", v, "How V is stored, likewise");
    command
        .add_option("--k-layout", k_layout,
                    "tokens: [.., S, D]; transposed: the same memory seen as [.., D, S]; "
                    "channels: [.., D, S] with tokens innermost")
        ->check(CLI::IsMember({"tokens", "transposed", "channels"}))
        ->capture_default_str();
    command.add_flag("--token-major", graph.token_major,
                     "K and V, but for sinks and window, lie as [N, S, H, D] (pages as "
                     "[page, S, H, D]): all heads of a token side by side");
    command.add_option("--scale", scale, "What the scale does to the scores")
        ->check(CLI::IsMember({"div", "mul", "none"}))
        ->capture_default_str();
    AddOptionalValue(command, "--soft-cap", soft_cap, "50",
                     "Cap the scores with tanh; the value is kept by --op only, otherwise "
                     "it is an input");
    AddOptionalValue(command, "--causal", causal, "top-left",
                     "Causal mask from indices, aligned top-left or bottom-right");
    AddOptionalValue(command, "--mask", graph.mask, "1x1xQxS",
                     "Mask added to the scores, and its shape over N, H, Q and S");
    AddOptionalValue(command, "--select", graph.select, "1x1xQxS", "Boolean mask, shaped likewise");
    command.add_flag("--stats", graph.stats, "Log-sum-exp of each row as a second output");
    command.add_flag("--dropout", graph.dropout, "Dropout on the probabilities");
    command
        .add_option("--hadamard", graph.hadamard,
                    "Rotate queries and output in blocks of so many channels, for K and V that "
                    "are stored rotated")
        ->check(CLI::PositiveNumber);
    command.add_flag("--static-int8", graph.static_int8,
                     "Queries, K, V, probabilities and output as 8-bit codes with constant "
                     "scales, as in oneDNN's graphs of int8");
    command.add_flag("--transpose-output", graph.transpose_output,
                     "Output as [batch, queries, heads, head size]");
    command.add_flag("--latent", graph.latent,
                     "V is the first --v-head-size channels of K, which lie in memory once");
    command.add_flag("--kv-lengths", graph.kv_lengths, "KV lengths per sequence as an input");
    command.add_flag("--ring", graph.ring,
                     "K and V in rings, with inputs that say what is in them");
    command.add_option("--sink-tokens", graph.sink_tokens,
                       "Tokens in the queries' type before those of --k and --v, all in rings");
    command.add_option("--window-tokens", graph.window_tokens, "The same behind them");
    command
        .add_option("--page-size", graph.page_size,
                    "K and V in pages of so many tokens, with KV lengths and a page table")
        ->check(CLI::PositiveNumber);
    command.add_flag("--op", graph.single_op,
                     "One ScaledDotProductAttention (kvant's own) instead of oneDNN's ops");
    command.add_option("--left-window", graph.left_window,
                       "With --op: how many keys back a query sees");
    command.add_flag("--ragged", graph.ragged,
                     "With --op: the queries of all sequences packed, and offsets as an input");
    command.add_flag("--sinks", graph.sinks, "With --op: a sink logit per head as an input");
    command.add_flag("--alibi", graph.alibi, "With --op: an ALiBi slope per head as an input");
  }

  absl::StatusOr<AttentionGraphOptions> Options() const {
    AttentionGraphOptions o = graph;
    o.dtype = *DataTypeFromName(dtype);
    if (!fpmath.empty()) o.fpmath = FpMathFromName(fpmath);
    if (!k.empty()) {
      KVANT_ASSIGN_OR_RETURN(o.k, ParseNumberFormat(k));
    }
    if (!v.empty()) {
      KVANT_ASSIGN_OR_RETURN(o.v, ParseNumberFormat(v));
    }
    if (scale == "mul") o.scale = AttentionGraphOptions::Scale::kMultiply;
    if (scale == "none") o.scale = AttentionGraphOptions::Scale::kNone;
    if (k_layout == "transposed") o.k_layout = AttentionGraphOptions::KLayout::kTransposed;
    if (k_layout == "channels") o.k_layout = AttentionGraphOptions::KLayout::kChannels;
    if (causal == "bottom-right") {
      o.causal = AttentionGraphOptions::Causal::kBottomRight;
    } else if (causal == "top-left") {
      o.causal = AttentionGraphOptions::Causal::kTopLeft;
    } else if (!causal.empty()) {
      return InvalidArguments("--causal: '", causal, "' is neither top-left nor bottom-right");
    }
    if (!soft_cap.empty()) {
      float cap = 0;
      if (!absl::SimpleAtof(soft_cap, &cap) || !(cap > 0)) {
        return InvalidArguments("--soft-cap: '", soft_cap, "' is not a positive number");
      }
      o.soft_cap = cap;
    }
    return o;
  }

  absl::StatusOr<int> Run() const {
    KVANT_ASSIGN_OR_RETURN(const AttentionGraphOptions options, Options());
    KVANT_ASSIGN_OR_RETURN(const Graph made, MakeAttentionGraph(options));
    std::fputs(GraphToJson(made).c_str(), stdout);
    return 0;
  }
};

}  // namespace

void AddMakeCommand(CLI::App& app, Action& action) {
  AddCommand<MakeArguments>(app, action, "make",
                            "Write an attention graph in oneDNN's JSON to standard output");
}

}  // namespace kvant
