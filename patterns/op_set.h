// Some ops of a graph. Internal to patterns.
#ifndef KVANT_PATTERNS_OP_SET_H_
#define KVANT_PATTERNS_OP_SET_H_

#include <algorithm>
#include <vector>

#include "kvant/graph/graph.h"

namespace kvant {

// A set that is filled and emptied over and over. Every call takes as long as there are members,
// however large the graph is: a graph may have as many attentions as it has ops.
class OpSet {
 public:
  explicit OpSet(const Graph& graph) : inside_(graph.ops().size(), 0) {}

  // True if it is new.
  bool Insert(Graph::OpIndex op) {
    if (inside_[op]) return false;
    inside_[op] = 1;
    members_.push_back(op);
    return true;
  }
  bool operator[](Graph::OpIndex op) const { return inside_[op] != 0; }
  void Clear() {
    for (const Graph::OpIndex op : members_) inside_[op] = 0;
    members_.clear();
  }
  // In order of insertion.
  const std::vector<Graph::OpIndex>& members() const { return members_; }
  std::vector<Graph::OpIndex> Sorted() const {
    std::vector<Graph::OpIndex> sorted = members_;
    std::sort(sorted.begin(), sorted.end());
    return sorted;
  }

 private:
  std::vector<char> inside_;  // by op
  std::vector<Graph::OpIndex> members_;
};

}  // namespace kvant

#endif  // KVANT_PATTERNS_OP_SET_H_
