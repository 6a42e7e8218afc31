// Groups of ops that become partitions. Internal to patterns.
#ifndef KVANT_PATTERNS_OP_GROUPS_H_
#define KVANT_PATTERNS_OP_GROUPS_H_

#include <memory>
#include <string>
#include <vector>

#include "kvant/graph/graph.h"
#include "kvant/patterns/match.h"
#include "kvant/patterns/partition.h"

namespace kvant {

struct OpGroup {
  Partition::Kind kind = Partition::Kind::kOps;
  std::vector<OpIndex> ops;               // sorted
  std::shared_ptr<AttentionMatch> match;  // for attention; indices into the whole graph
};

// Puts every op that is not taken (but End and Wildcard) into a group of its own,
// or into a chain of ops with nothing but elementwise ops after the first, or a Hadamard with the
// DynamicQuantize or Append that stores its result.
void GroupRemainingOps(const Graph& graph, std::vector<char>& taken, std::vector<OpGroup>* groups);

// Sorts groups topologically. Groups on a cycle with others (one feeds another
// that feeds it) are taken apart into single ops, with a miss each.
void SortGroups(const Graph& graph, std::vector<OpGroup>* groups, std::vector<Miss>* misses);

// Cuts a match down to what oneDNN fuses. False if oneDNN would not fuse it.
bool TrimToOneDnn(const Graph& graph, AttentionMatch* match, std::string* why);

}  // namespace kvant

#endif  // KVANT_PATTERNS_OP_GROUPS_H_
