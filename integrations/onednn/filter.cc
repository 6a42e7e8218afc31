#include "kvant/integrations/onednn/filter.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/graph/json.h"
#include "kvant/integrations/onednn/mirror.h"
#include "kvant/integrations/onednn/names.h"
#include "kvant/integrations/onednn/settings.h"
#include "kvant/integrations/onednn/threads.h"
#include "kvant/patterns/partitioner.h"

namespace kvant::dnnl_abi {
namespace {

using Pieces = std::vector<std::unique_ptr<Piece>>;
using OpSet = absl::flat_hash_set<size_t>;

constexpr char kOwnBits[] =
    "Dropout draws oneDNN's random bits, which its backward pass draws again, and kvant's differ";

bool Draws(const Partition& partition) {
  const std::vector<Op>& ops = partition.ops().ops();
  return std::any_of(ops.begin(), ops.end(),
                     [](const Op& op) { return op.kind == OpKind::kDropout; });
}

bool Overlap(const OpSet& set, const std::vector<size_t>& ops) {
  return std::any_of(ops.begin(), ops.end(), [&](size_t op) { return set.contains(op); });
}

// Of a graph that oneDNN has filtered.
Status ReadPieces(GraphHandle graph, Pieces* pieces) {
  size_t count = 0;
  Status status = next::graph_get_partition_num(graph, &count);
  if (status != kSuccess || count == 0) return status;
  std::vector<PartitionHandle> handles(count, nullptr);
  status = next::graph_get_partitions(graph, count, handles.data());
  if (status != kSuccess) return status;
  std::vector<NextPartition> owners;
  owners.reserve(count);
  for (const PartitionHandle handle : handles) owners.emplace_back(handle);
  for (NextPartition& owner : owners) {
    pieces->push_back(std::make_unique<Piece>());
    status = ReadPiece(std::move(owner), pieces->back().get());
    if (status != kSuccess) return status;
  }
  return kSuccess;
}

class Filtering {
 public:
  explicit Filtering(const OurGraph& graph) : graph_(graph) {
    for (const OpRecord& record : graph.ops) records_[record.id] = &record;
  }

  Status Run(Policy policy);
  void TellAll() const;
  Pieces& pieces() { return pieces_; }

 private:
  // An attention by oneDNN's grammar that no piece of oneDNN's is.
  struct Candidate {
    const Partition* partition = nullptr;
    std::vector<size_t> ops;
    size_t softmax = 0;
  };

  absl::Status FindAttention(const Engine& engine);
  void TakeOver(Pieces& pieces);
  void Leave(const std::vector<size_t>& ops, const std::string& why);
  void Take(const Partition& partition, Piece* piece) const;
  Status CutOut();
  void MakePiece(const Candidate& candidate, Piece* piece) const;
  bool Order(size_t first_cut, Pieces* pieces, size_t* stuck) const;
  std::string WhyNot(const Piece& piece) const;

  const OurGraph& graph_;
  Pieces pieces_;
  absl::flat_hash_map<size_t, const OpRecord*> records_;
  MirroredGraph mirrored_;
  std::vector<Partition> partitions_;  // kvant's of the whole graph
  std::vector<Candidate> candidates_;
  std::string not_at_all_;                         // why kvant takes nothing of the graph
  absl::flat_hash_map<size_t, std::string> left_;  // why an attention is not taken, by its ops
};

void Filtering::Take(const Partition& partition, Piece* piece) const {
  const std::vector<Op>& ops = partition.ops().ops();
  piece->taken = partition;
  piece->content = GraphToJson(partition.ops());
  piece->compressed = std::any_of(
      ops.begin(), ops.end(), [](const Op& op) { return op.kind == OpKind::kDynamicDequantize; });
  piece->apply_to_int = graph_.apply_to_int;
}

void Filtering::Leave(const std::vector<size_t>& ops, const std::string& why) {
  for (const size_t op : ops) left_[op] = why;
}

// Pieces that are attention and nothing else, however kvant would cut the graph around them.
void Filtering::TakeOver(Pieces& pieces) {
  const std::vector<Op>& ops = mirrored_.graph.ops();
  absl::flat_hash_map<size_t, Graph::OpIndex> places;
  for (size_t i = 0; i < ops.size(); ++i) places[ops[i].id] = static_cast<Graph::OpIndex>(i);
  for (const std::unique_ptr<Piece>& piece : pieces) {
    std::vector<Graph::OpIndex> indices;
    for (const size_t op : piece->ops) indices.push_back(places.at(op));
    const bool normalizes = std::any_of(indices.begin(), indices.end(), [&](Graph::OpIndex i) {
      return ops[i].kind == OpKind::kSoftMax;
    });
    if (!piece->next_runs() || !normalizes || indices.size() < 3) continue;
    const absl::StatusOr<std::vector<Partition>> alone =
        PartitionGraph(mirrored_.graph.Subgraph(indices));
    if (!alone.ok() || alone->size() != 1 || alone->front().kind() != Partition::Kind::kAttention ||
        alone->front().ops().ops().size() != indices.size()) {
      continue;
    }
    if (Draws(alone->front())) {
      Leave(piece->ops, kOwnBits);
    } else {
      Take(alone->front(), piece.get());
    }
  }
}

absl::Status Filtering::FindAttention(const Engine& engine) {
  absl::StatusOr<MirroredGraph> mirrored = Mirror(graph_);
  if (!mirrored.ok()) return mirrored.status();
  mirrored_ = *std::move(mirrored);
  TakeOver(pieces_);
  OpSet taken;
  for (const std::unique_ptr<Piece>& piece : pieces_) {
    if (piece->taken) taken.insert(piece->ops.begin(), piece->ops.end());
  }
  absl::StatusOr<std::vector<Partition>> partitions =
      PartitionGraph(mirrored_.graph, {.grammar = PartitionOptions::Grammar::kOneDnn});
  if (!partitions.ok()) return partitions.status();
  partitions_ = *std::move(partitions);
  for (const Partition& partition : partitions_) {
    if (partition.kind() != Partition::Kind::kAttention) continue;
    Candidate candidate{.partition = &partition};
    for (const Op& op : partition.ops().ops()) {
      candidate.ops.push_back(op.id);
      if (op.kind == OpKind::kSoftMax) candidate.softmax = op.id;
    }
    if (Overlap(taken, candidate.ops)) continue;
    if (Draws(partition)) {
      Leave(candidate.ops, kOwnBits);
      continue;
    }
    // oneDNN runs it, if in parts: it stays there if kvant does not, as far as that shows already.
    if (partition.attention() != nullptr || !partition.notes().empty()) {
      const auto compiled = engine.Compile(partition, {.require_fused = true});
      if (!compiled.ok()) {
        Leave(candidate.ops, std::string(compiled.status().message()));
        continue;
      }
    }
    candidates_.push_back(std::move(candidate));
  }
  return absl::OkStatus();
}

// With the id of the one of oneDNN's pieces, which give way to this one, that has the SoftMax.
void Filtering::MakePiece(const Candidate& candidate, Piece* piece) const {
  piece->engine_kind = graph_.engine_kind;
  piece->supported = true;
  for (const std::unique_ptr<Piece>& whole : pieces_) {
    const OpSet inside(whole->ops.begin(), whole->ops.end());
    if (inside.contains(candidate.softmax)) piece->id = whole->id;
  }
  const std::vector<Op>& ops = candidate.partition->ops().ops();
  absl::flat_hash_set<size_t> made, used;
  for (const Op& op : ops) {
    made.insert(op.outputs.begin(), op.outputs.end());
    used.insert(op.inputs.begin(), op.inputs.end());
  }
  for (const Op& op : ops) {
    const OpRecord& record = *records_.at(op.id);
    piece->ops.push_back(op.id);
    std::copy_if(record.inputs.begin(), record.inputs.end(), std::back_inserter(piece->inputs),
                 [&](const TensorDesc& input) { return !made.contains(input.id); });
    std::copy_if(record.outputs.begin(), record.outputs.end(), std::back_inserter(piece->outputs),
                 [&](const TensorDesc& output) { return !used.contains(output.id); });
  }
  Take(*candidate.partition, piece);
}

// Puts pieces behind those that they need, and leaves the order as it is otherwise. False if that
// cannot be; then one of those from first_cut on is `stuck`.
bool Filtering::Order(size_t first_cut, Pieces* pieces, size_t* stuck) const {
  absl::flat_hash_map<size_t, size_t> maker;  // of a tensor
  for (size_t i = 0; i < pieces->size(); ++i) {
    for (const TensorDesc& output : (*pieces)[i]->outputs) maker[output.id] = i;
  }
  std::vector<bool> placed(pieces->size(), false);
  std::vector<size_t> order;
  while (order.size() < pieces->size()) {
    size_t next = 0;
    const auto waits = [&](const TensorDesc& input) {
      const auto found = maker.find(input.id);
      return found != maker.end() && !placed[found->second];
    };
    while (next < pieces->size() &&
           (placed[next] ||
            std::any_of((*pieces)[next]->inputs.begin(), (*pieces)[next]->inputs.end(), waits))) {
      ++next;
    }
    if (next == pieces->size()) {
      *stuck = first_cut;
      while (placed[*stuck]) ++*stuck;
      return false;
    }
    placed[next] = true;
    order.push_back(next);
  }
  Pieces ordered;
  for (const size_t i : order) ordered.push_back(std::move((*pieces)[i]));
  *pieces = std::move(ordered);
  return true;
}

// Candidates out of a graph of the other ops.
Status Filtering::CutOut() {
  while (!candidates_.empty()) {
    OpSet inside;
    for (const Candidate& candidate : candidates_) {
      inside.insert(candidate.ops.begin(), candidate.ops.end());
    }
    NextGraph rest;
    Status status = MakeNextGraph(
        graph_, [&](const OpRecord& op) { return !inside.contains(op.id); }, &rest);
    Pieces pieces;
    if (status == kSuccess) status = ReadPieces(rest.get(), &pieces);
    if (status != kSuccess) return status;
    // The Ends that keep outputs go.
    std::erase_if(pieces, [&](const auto& piece) { return !records_.contains(piece->ops[0]); });
    TakeOver(pieces);
    const size_t first_cut = pieces.size();
    for (const Candidate& candidate : candidates_) {
      pieces.push_back(std::make_unique<Piece>());
      MakePiece(candidate, pieces.back().get());
    }
    size_t stuck = 0;
    if (Order(first_cut, &pieces, &stuck)) {
      pieces_ = std::move(pieces);
      return kSuccess;
    }
    const auto dropped = candidates_.begin() + static_cast<ptrdiff_t>(stuck - first_cut);
    Leave(dropped->ops, "what oneDNN fuses beside this attention is needed by it and needs it");
    candidates_.erase(dropped);
  }
  return kSuccess;
}

Status Filtering::Run(Policy policy) {
  if (const Status status = ReadPieces(graph_.next.get(), &pieces_); status != kSuccess) {
    return status;
  }
  if (TurnedOff()) {
    not_at_all_ = "KVANT_DNNL_GRAPH is 0";
  } else if (graph_.engine_kind != kCpu) {
    not_at_all_ = "the engine is not of kind cpu";
  } else if (policy != kFusion) {
    not_at_all_ = "the policy is not fusion";
  } else if (const absl::StatusOr<Engine> engine = ClientEngine(); !engine.ok()) {
    not_at_all_ = std::string(engine.status().message());
  } else if (const absl::Status found = FindAttention(*engine); !found.ok()) {
    not_at_all_ = std::string(found.message());
  }
  return not_at_all_.empty() ? CutOut() : kSuccess;
}

std::string Filtering::WhyNot(const Piece& piece) const {
  if (!not_at_all_.empty()) return not_at_all_;
  std::vector<std::string> reasons;
  const auto add = [&](std::string reason) {
    if (std::find(reasons.begin(), reasons.end(), reason) == reasons.end()) {
      reasons.push_back(std::move(reason));
    }
  };
  const OpSet inside(piece.ops.begin(), piece.ops.end());
  for (const size_t op : piece.ops) {
    if (const auto found = left_.find(op); found != left_.end()) add(found->second);
    const auto unknown = mirrored_.unknown.find(op);
    if (unknown != mirrored_.unknown.end()) add(unknown->second);
  }
  for (const Partition& partition : partitions_) {
    const std::vector<Op>& ops = partition.ops().ops();
    const bool within =
        std::any_of(ops.begin(), ops.end(), [&](const Op& op) { return inside.contains(op.id); });
    if (!within) continue;
    for (const std::string& miss : partition.misses()) add(miss);
    if (partition.kind() == Partition::Kind::kAttentionBackward) add("attention, backward");
  }
  return reasons.empty() ? "no attention" : absl::StrJoin(reasons, "; ");
}

void Filtering::TellAll() const {
  for (const std::unique_ptr<Piece>& piece : pieces_) {
    Tell([&] {
      const std::string ops = absl::StrJoin(piece->ops, " ", [&](std::string* out, size_t id) {
        absl::StrAppend(out, id, ":", std::string(NameOfKind(records_.at(id)->kind)));
      });
      return absl::StrCat("partition,", piece->id, ",", piece->taken ? "kvant" : "oneDNN", ",", ops,
                          ",", piece->taken ? piece->taken->pattern() : WhyNot(*piece));
    });
  }
}

}  // namespace

Status ReadPiece(NextPartition partition, Piece* piece) {
  const PartitionHandle handle = partition.get();
  size_t ops = 0, inputs = 0, outputs = 0;
  uint8_t supported = 0;
  const auto all = [](std::initializer_list<Status> statuses) {
    for (const Status status : statuses) {
      if (status != kSuccess) return status;
    }
    return kSuccess;
  };
  Status status = all({next::partition_get_op_num(handle, &ops),
                       next::partition_get_input_ports_num(handle, &inputs),
                       next::partition_get_output_ports_num(handle, &outputs),
                       next::partition_get_id(handle, &piece->id),
                       next::partition_get_engine_kind(handle, &piece->engine_kind),
                       next::partition_is_supported(handle, &supported)});
  if (status != kSuccess) return status;
  piece->ops.resize(ops);
  piece->inputs.resize(inputs);
  piece->outputs.resize(outputs);
  // It takes no null, as an empty list may be.
  if (ops > 0) status = next::partition_get_ops(handle, ops, piece->ops.data());
  if (status == kSuccess && inputs > 0) {
    status = next::partition_get_input_ports(handle, inputs, piece->inputs.data());
  }
  if (status == kSuccess && outputs > 0) {
    status = next::partition_get_output_ports(handle, outputs, piece->outputs.data());
  }
  piece->supported = supported != 0;
  piece->next = std::move(partition);
  return status;
}

Status Filter(const OurGraph& graph, Policy policy,
              std::vector<std::shared_ptr<const Piece>>* pieces) {
  Filtering filtering(graph);
  if (const Status status = filtering.Run(policy); status != kSuccess) return status;
  filtering.TellAll();
  pieces->assign(std::make_move_iterator(filtering.pieces().begin()),
                 std::make_move_iterator(filtering.pieces().end()));
  return kSuccess;
}

}  // namespace kvant::dnnl_abi
