#include "kvant/patterns/partitioner.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"
#include "kvant/graph/verbose.h"
#include "kvant/patterns/match.h"
#include "kvant/patterns/matcher.h"
#include "kvant/patterns/op_groups.h"

namespace kvant {
namespace {

std::string DescribeOps(const Graph& ops) {
  const auto name = [](std::string* text, const Op& op) { text->append(OpKindName(op.kind)); };
  return absl::StrCat(ops.ops().size() == 1 ? "single op: " : "chain: ",
                      absl::StrJoin(ops.ops(), ", ", name));
}

// "attention: compressed K and V, scale, additive mask".
std::string DescribeMatch(const Graph& graph, const AttentionMatch& match) {
  const bool direct = match.first_class != Graph::kNoOp;
  const auto k_or_v = [&](OpKind kind) {
    return HaveOp(graph, match.k, kind) || HaveOp(graph, match.v, kind);
  };
  std::string text;
  const auto add = [&text](std::string_view part) {
    absl::StrAppend(&text, text.empty() ? "attention: " : ", ", std::string(part));
  };
  if (direct) add("ScaledDotProductAttention");
  const bool k = HaveOp(graph, match.k, OpKind::kDynamicDequantize);
  const bool v = HaveOp(graph, match.v, OpKind::kDynamicDequantize);
  if (k || v) add(k && v ? "compressed K and V" : (k ? "compressed K" : "compressed V"));
  if (k_or_v(OpKind::kDequantize)) add("static quantization");
  if (match.k.size() > 1 || match.v.size() > 1) add("segments");
  if (k_or_v(OpKind::kLoadPages)) add("pages");
  if (k_or_v(OpKind::kLoadRanges)) add("rings");
  if (k_or_v(OpKind::kHadamard) || HaveOp(graph, match.q, OpKind::kHadamard) ||
      HaveOp(graph, match.output_ops, OpKind::kHadamard)) {
    add("rotated");
  }
  if (direct) return text;
  bool capped = false;
  for (size_t i = 0; i < match.steps.size(); ++i) {
    const StepMatch& step = match.steps[i];
    // What the scores are divided by before they are capped is the cap's own.
    if (i + 1 < match.steps.size() && match.steps[i + 1].kind == ScoreStep::Kind::kTanh) continue;
    using Kind = ScoreStep::Kind;
    const bool scales = step.kind == Kind::kMultiply || step.kind == Kind::kDivide;
    if (scales && capped) continue;
    capped |= step.kind == Kind::kTanh;
    add(scales                       ? "scale"
        : step.kind == Kind::kTanh   ? "soft cap"
        : step.kind == Kind::kSelect ? "select mask"
        : step.kind == Kind::kBand   ? "band mask"
        : step.kind == Kind::kAdd    ? "additive mask"
                                     : OpKindName(graph.ops()[step.op].kind));
  }
  for (OpIndex index : match.probs_ops) {
    if (graph.ops()[index].kind == OpKind::kDropout) add("dropout");
    if (graph.ops()[index].kind == OpKind::kQuantize) add("quantized probabilities");
  }
  if (graph.ops()[match.softmax].inputs.size() > 1) add("KV lengths");
  if (graph.ops()[match.softmax].outputs.size() > 1) add("statistics");
  if (!match.output_ops.empty()) add("output chain");
  if (text.empty()) return "attention: plain";
  return text;
}

}  // namespace

class Partitioner {
 public:
  Partitioner(const Graph& graph, const PartitionOptions& options)
      : graph_(graph), options_(options), taken_(graph.ops().size(), 0) {}

  std::vector<Partition> Run() {
    MatchAll();
    GroupRemainingOps(graph_, taken_, &groups_);
    SortGroups(graph_, &groups_, &misses_);
    std::vector<Partition> partitions;
    partitions.reserve(groups_.size());
    for (OpGroup& group : groups_) {
      partitions.push_back(Build(group, static_cast<int>(partitions.size())));
    }
    if (!misses_.empty()) AttachMisses(partitions);
    return partitions;
  }

 private:
  void MatchAll() {
    AttentionMatcher matcher(graph_, taken_, &misses_);
    const auto count = static_cast<OpIndex>(graph_.ops().size());
    for (OpIndex index = 0; index < count; ++index) {
      if (taken_[index]) continue;
      const OpKind kind = graph_.ops()[index].kind;
      if (kind == OpKind::kSoftMax) {
        auto match = std::make_shared<AttentionMatch>();
        if (matcher.Match(index, match.get()) && Trim(match.get())) {
          Take({Partition::Kind::kAttention, SortedOps(*match), match});
        }
      } else if (kind == OpKind::kScaledDotProductAttention) {
        auto match = std::make_shared<AttentionMatch>();
        if (!matcher.MatchFirstClass(index, match.get())) {
          // With all of its inputs as ports.
          const Op& op = graph_.ops()[index];
          *match = AttentionMatch{
              .first_class = index, .q = {{.source = op.inputs[0]}}, .output = op.outputs[0]};
        }
        Take({Partition::Kind::kAttention, SortedOps(*match), match});
      } else if (kind == OpKind::kExp) {
        std::vector<OpIndex> ops;
        if (matcher.MatchBackward(index, &ops)) {
          Take({Partition::Kind::kAttentionBackward, std::move(ops)});
        }
      } else if (kind == OpKind::kSoftMaxBackward) {
        matcher.ExplainSoftMaxBackward(index);
      }
    }
  }

  // To what the grammar asks for; false if that is nothing.
  bool Trim(AttentionMatch* match) {
    if (options_.grammar == PartitionOptions::Grammar::kNative) return true;
    std::string why;
    const OpIndex softmax = match->softmax;
    const bool fused = TrimToOneDnn(graph_, match, &why);
    // If it is not fused at all, nothing is left out of it.
    while (!fused && !misses_.empty() && misses_.back().ops[0] == softmax) misses_.pop_back();
    if (!why.empty()) misses_.push_back({{softmax}, std::move(why)});
    return fused;
  }

  void Take(OpGroup group) {
    for (OpIndex op : group.ops) taken_[op] = 1;
    groups_.push_back(std::move(group));
  }

  Partition Build(OpGroup& group, int id) const {
    Partition partition;
    partition.id_ = id;
    partition.kind_ = group.kind;
    auto ops = std::make_shared<Graph>(graph_.Subgraph(group.ops));
    const absl::Status inferred = InferShapes(*ops);
    if (!inferred.ok()) {
      *ops = graph_.Subgraph(group.ops);
      partition.notes_.emplace_back(inferred.message());
    }
    partition.inputs_ = ops->inputs();
    partition.outputs_ = ops->outputs();
    if (group.match != nullptr) {
      partition.pattern_ = DescribeMatch(graph_, *group.match);
      // The group is the ops of the match: from here on by their number in the partition.
      VisitOps(*group.match, [&group](OpIndex& op) {
        const auto position = std::ranges::lower_bound(group.ops, op);
        op = static_cast<OpIndex>(position - group.ops.begin());
      });
    } else {
      const bool backward = group.kind == Partition::Kind::kAttentionBackward;
      partition.pattern_ = backward ? "attention, backward" : DescribeOps(*ops);
    }
    partition.ops_ = std::move(ops);
    partition.match_ = std::move(group.match);
    if (inferred.ok()) partition.ResolveSpec();
    return partition;
  }

  // To the partitions of the ops of a miss and to those beside them, which would be part of the
  // attention: whoever compiles one of these alone is told why it is not.
  void AttachMisses(std::vector<Partition>& partitions) const {
    std::vector<int> partition_of(graph_.ops().size(), -1);
    for (size_t i = 0; i < groups_.size(); ++i) {
      for (const OpIndex op : groups_[i].ops) partition_of[op] = static_cast<int>(i);
    }
    for (const Miss& miss : misses_) {
      absl::InlinedVector<int, 8> told;
      const auto tell = [&](OpIndex op) {
        if (op != Graph::kNoOp && partition_of[op] >= 0) told.push_back(partition_of[op]);
      };
      for (const OpIndex index : miss.ops) {
        tell(index);
        const Op& op = graph_.ops()[index];
        for (const TensorId id : op.inputs) tell(graph_.FindTensor(id)->producer.op);
        for (const TensorId id : op.outputs) {
          for (const Graph::Use& use : graph_.FindTensor(id)->consumers) tell(use.op);
        }
      }
      std::ranges::sort(told);
      told.erase(std::unique(told.begin(), told.end()), told.end());
      for (const int i : told) partitions[i].misses_.push_back(miss.why);
    }
  }

  const Graph& graph_;
  const PartitionOptions& options_;
  std::vector<char> taken_;
  std::vector<OpGroup> groups_;
  std::vector<Miss> misses_;
};

absl::StatusOr<std::vector<Partition>> PartitionGraph(const Graph& graph,
                                                      const PartitionOptions& options) {
  if (!graph.finalized()) {
    return MakeError(ErrorKind::kInvalidGraph, "only a finalized graph can be partitioned");
  }
  return WithoutExceptions([&]() -> absl::StatusOr<std::vector<Partition>> {
    const VerboseEvent event("partition");
    std::vector<Partition> partitions = Partitioner(graph, options).Run();
    event.Done([&] {
      const size_t count = partitions.size();
      const std::vector<std::string> misses = MissesOf(partitions);
      return absl::StrCat(graph.ops().size(), " ops in ", count,
                          count == 1 ? " partition" : " partitions", misses.empty() ? "" : "; ",
                          absl::StrJoin(misses, "; "));
    });
    return partitions;
  });
}

}  // namespace kvant
