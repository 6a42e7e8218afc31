#include "kvant/patterns/op_groups.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvant {
namespace {

// Whether the chain's result may be input `port` of this op.
bool Continues(OpKind kind, int port) {
  if (ClassOf(kind) == OpClass::kElementwise) return true;
  if (ClassOf(kind) != OpClass::kBinary) return false;
  return port == 0 || (kind != OpKind::kSubtract && kind != OpKind::kDivide);
}

// A rotation takes in the op that stores what it gives and nothing else: keys and values are
// rotated when they are written.
void GrowStore(const Graph& graph, std::vector<char>& taken, OpGroup* group) {
  group->kind = Partition::Kind::kStore;
  if (graph.ops()[group->ops.back()].kind != OpKind::kHadamard) return;
  const Op& rotation = graph.ops()[group->ops.back()];
  const auto& consumers = graph.FindTensor(rotation.outputs[0])->consumers;
  if (consumers.size() != 1 || consumers[0].port != 0) return;
  if (ClassOf(graph.ops()[consumers[0].op].kind) != OpClass::kStore) return;
  taken[consumers[0].op] = 1;
  group->ops.push_back(consumers[0].op);
}

// Extends a group that begins with this op by what follows it and nothing else.
void GrowChain(const Graph& graph, std::vector<char>& taken, OpGroup* group) {
  constexpr size_t kMaxOps = 5;
  const Op* last = &graph.ops()[group->ops.back()];
  const OpClass of_class = ClassOf(last->kind);
  if (last->kind == OpKind::kMergeAttention) {
    group->kind = Partition::Kind::kMerge;
    return;
  }
  if (of_class == OpClass::kStore || last->kind == OpKind::kHadamard ||
      last->kind == OpKind::kDynamicDequantize) {
    return GrowStore(graph, taken, group);
  }
  if (last->kind != OpKind::kMatMul && of_class != OpClass::kBinary &&
      of_class != OpClass::kElementwise) {
    return;
  }
  while (group->ops.size() < kMaxOps) {
    const Graph::TensorInfo& result = *graph.FindTensor(last->outputs[0]);
    if (result.consumers.size() != 1 || !IsFloat(result.desc.type)) return;
    const Graph::Use use = result.consumers[0];
    last = &graph.ops()[use.op];
    if (taken[use.op] || !Continues(last->kind, use.port)) return;
    taken[use.op] = 1;
    group->ops.push_back(use.op);
  }
}

// The order of groups that are sorted by their first ops; those on or behind a cycle are missing.
std::vector<int32_t> OrderOf(const Graph& graph, const std::vector<OpGroup>& groups) {
  std::vector<int32_t> group_of(graph.ops().size(), -1);
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const OpIndex op : groups[g].ops) group_of[op] = static_cast<int32_t>(g);
  }
  return TopologicalOrder(static_cast<int32_t>(groups.size()), [&](int32_t group, auto visit) {
    for (const OpIndex op : groups[group].ops) {
      for (const TensorId id : graph.ops()[op].outputs) {
        for (const Graph::Use& use : graph.FindTensor(id)->consumers) {
          const int32_t to = group_of[use.op];
          if (to >= 0 && to != group) visit(to);
        }
      }
    }
  });
}

}  // namespace

void GroupRemainingOps(const Graph& graph, std::vector<char>& taken, std::vector<OpGroup>* groups) {
  const auto count = static_cast<OpIndex>(graph.ops().size());
  for (OpIndex index = 0; index < count; ++index) {
    if (taken[index] || ClassOf(graph.ops()[index].kind) == OpClass::kNothing) continue;
    taken[index] = 1;
    GrowChain(graph, taken, &groups->emplace_back(OpGroup{.ops = {index}}));
  }
}

void SortGroups(const Graph& graph, std::vector<OpGroup>* groups, std::vector<Miss>* misses) {
  if (groups->size() < 2) return;
  for (;;) {
    std::ranges::sort(*groups, {}, [](const OpGroup& group) { return group.ops[0]; });
    std::vector<OpGroup> sorted;
    sorted.reserve(groups->size());
    for (const int32_t group : OrderOf(graph, *groups)) {
      sorted.push_back(std::move((*groups)[group]));
    }
    if (sorted.size() == groups->size()) {
      *groups = std::move(sorted);
      return;
    }
    // A cycle passes through a group of several ops: single ops have none.
    for (OpGroup& stuck : *groups) {
      if (stuck.ops.empty()) continue;  // in its place already
      if (stuck.ops.size() == 1) {
        sorted.push_back(std::move(stuck));
        continue;
      }
      const OpIndex last = stuck.ops.back();
      misses->push_back(
          {{last},
           absl::StrCat(graph.ops()[last].ToString(),
                        " is not fused: other ops depend on the group and it depends on them")});
      for (OpIndex op : stuck.ops) sorted.push_back({.ops = {op}});
    }
    *groups = std::move(sorted);
  }
}

}  // namespace kvant
