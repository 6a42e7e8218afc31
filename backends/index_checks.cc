#include "kvant/backends/index_checks.h"

#include <algorithm>

#include "kvant/graph/op_shapes.h"

namespace kvant {
namespace {

using Inputs = absl::Span<const void* const>;

// A port's tensor, or a constant; neither: there is none, or the partition computes it.
struct Source {
  const LogicalTensor* tensor = nullptr;
  int port = kNoPort;
  bool present() const { return tensor != nullptr; }
  const void* Find(Inputs inputs) const {
    return tensor->value ? tensor->value->data() : inputs[port];
  }
  bool missing(Inputs inputs) const { return present() && Find(inputs) == nullptr; }
};

// s32 or s64 of up to three axes where it lies; one row serves all. Of an absent source no rows.
class Indices {
 public:
  Indices(const Source& source, Inputs inputs) : tensor_(source.tensor) {
    if (!present()) return;
    data_ = source.Find(inputs);
    strides_ = tensor_->StridesOrDense();
    rows_ = tensor_->rank() == 0 ? 1 : extent(0);
  }
  bool present() const { return tensor_ != nullptr; }
  int64_t rows() const { return rows_; }
  int64_t extent(int axis) const { return (*tensor_->dims)[axis]; }
  int64_t at(int64_t row, int64_t i = 0, int64_t j = 0) const {
    const int64_t place[] = {rows_ == 1 ? 0 : row, i, j};
    int64_t index = 0;
    for (size_t axis = 0; axis < strides_.size(); ++axis) index += place[axis] * strides_[axis];
    return tensor_->type == kS64 ? static_cast<const int64_t*>(data_)[index]
                                 : static_cast<const int32_t*>(data_)[index];
  }

 private:
  const LogicalTensor* tensor_;
  const void* data_ = nullptr;
  Dims strides_;
  int64_t rows_ = 0;
};

// An op, and its tensors.
struct Subject {
  const Op& op;
  const Graph& graph;
  int64_t dim(size_t input, int64_t axis) const {
    const LogicalTensor& tensor = graph.tensor(op.inputs[input]);
    return (*tensor.dims)[FromFront(axis, tensor.rank())];
  }
  int64_t tokens(size_t input) const { return dim(input, op.Get<Attr::kTokenAxis>()); }
  int64_t group() const { return op.Get<Attr::kTokenGroup>(); }
};

int64_t CapacityOf(const Subject& s) {
  if (s.op.kind == OpKind::kScaledDotProductAttention) return s.dim(1, 2);
  if (s.op.kind == OpKind::kSoftMax) return s.dim(0, s.op.Get<Attr::kAxis>());
  return s.tokens(0) * s.group();
}

absl::Status CheckLengths(const Subject& s, const Indices& lengths, const Indices& first) {
  const int64_t capacity = CapacityOf(s);
  const auto in_range = [&](const Indices& all, std::string_view what) {
    for (int64_t n = 0; n < all.rows(); ++n) {
      if (all.at(n) >= 0 && all.at(n) <= capacity) continue;
      return ArgumentsError(s.op, what, " of row ", n, " is ", all.at(n),
                            "; it must be between 0 and the capacity of ", capacity);
    }
    return absl::OkStatus();
  };
  KVANT_RETURN_IF_ERROR(in_range(lengths, "the length"));
  return in_range(first, "the first token");
}

absl::Status CheckPages(const Subject& s, const Indices& table, const Indices& lengths) {
  const int64_t pool_pages = s.dim(0, 0), page_tokens = s.tokens(0) * s.group();
  for (int64_t n = 0; n < table.rows(); ++n) {
    const int64_t pages = table.extent(1), room = pages * page_tokens;
    // Of lengths that the partition computes, any may be.
    const int64_t length = lengths.present() ? lengths.at(n) : room;
    if (length < 0 || length > room) {
      return ArgumentsError(s.op, "the length of row ", n, " is ", length, "; its ", pages,
                            " pages of ", page_tokens, " tokens have room for ", room);
    }
    for (int64_t i = 0; i * page_tokens < length; ++i) {
      const int64_t page = table.at(n, i);
      if (page >= 0 && page < pool_pages) continue;
      return ArgumentsError(s.op, "page ", i, " of row ", n, ", which has ", length, " tokens, is ",
                            page, "; the pool has ", pool_pages, " pages");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRanges(const Subject& s, const Indices& ranges, const Indices&) {
  for (int64_t n = 0; n < ranges.rows(); ++n) {
    for (int64_t src = 0; src < ranges.extent(1); ++src) {
      const int64_t capacity = s.tokens(static_cast<size_t>(src) + 1);
      const int64_t first = ranges.at(n, src, 0), tokens = ranges.at(n, src, 1);
      if (0 <= tokens && tokens <= capacity && 0 <= first &&
          first < std::max<int64_t>(1, capacity)) {
        continue;
      }
      return ArgumentsError(s.op, "the range of src ", src, " in row ", n, " is ", tokens,
                            " tokens from token ", first, " on; there is room for ", capacity,
                            " tokens");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOffsets(const Subject& s, const Indices& offsets, const Indices&) {
  const int64_t queries = s.dim(0, 0);
  if (const int64_t first = offsets.at(0); first != 0) {
    return ArgumentsError(s.op, "query_offsets begin with ", first, ", not 0");
  }
  for (int64_t n = 1; n < offsets.rows(); ++n) {
    const int64_t begin = offsets.at(n - 1), end = offsets.at(n);
    if (end < begin) {
      return ArgumentsError(s.op, "query_offsets fall: ", begin, " and then ", end, " for row ",
                            n - 1);
    }
    if (end > queries) {
      return ArgumentsError(s.op, "query_offsets of row ", n - 1, " end at ", end, "; there are ",
                            queries, " queries");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPositions(const Subject& s, const Indices& positions, const Indices&) {
  const AppendedTokens to =
      AppendedTokensOf(s.op, s.graph.tensor(s.op.inputs[0]), s.graph.tensor(s.op.outputs[0]));
  for (int64_t n = 0; n < s.dim(0, 0); ++n) {
    KVANT_RETURN_IF_ERROR(to.Check(s.op, n, positions.at(n)));
  }
  return absl::OkStatus();
}

// Ranges of K and of V.
absl::Status CheckColumns(const Subject& s, const Indices& k_ranges, const Indices& v_ranges) {
  const auto sum = [](const Indices& ranges, int64_t n) {
    int64_t tokens = 0;
    for (int64_t src = 0; src < ranges.extent(1); ++src) tokens += ranges.at(n, src, 1);
    return tokens;
  };
  for (int64_t n = 0; n < std::max(k_ranges.rows(), v_ranges.rows()); ++n) {
    const int64_t k = sum(k_ranges, n), v = sum(v_ranges, n);
    if (k == v) continue;
    return ArgumentsError(s.op, "the ranges of row ", n, " add up to ", k, " tokens of K and ", v,
                          " of V");
  }
  return absl::OkStatus();
}

// What is checked of an op, and by which of its inputs.
struct CheckRow {
  OpKind kind;
  std::string_view a, b;
  absl::Status (*check)(const Subject& s, const Indices& a, const Indices& b);
};
constexpr CheckRow kChecks[] = {
    {OpKind::kLoadTokens, "lengths", "first", CheckLengths},
    {OpKind::kSoftMax, "lengths", "first", CheckLengths},
    {OpKind::kLoadPages, "page_table", "lengths", CheckPages},
    {OpKind::kLoadRanges, "ranges", "", CheckRanges},
    {OpKind::kAppend, "positions", "", CheckPositions},
    {OpKind::kAppendPages, "slots", "", CheckPositions},
    {OpKind::kScaledDotProductAttention, "query_offsets", "", CheckOffsets},
    {OpKind::kScaledDotProductAttention, "kv_lengths", "kv_first", CheckLengths},
};

}  // namespace

IndexChecks::IndexChecks(const Partition& partition, bool fused) {
  const Graph& graph = partition.ops();
  // Once both sources are there. What an op of the partition computes, a LoadRanges the lengths, is
  // right by itself.
  const auto add = [&](const Op& op, Source a, Source b, auto check) {
    if (!a.present() && !b.present()) return;
    checks_.push_back([=, s = Subject{op, graph}](Inputs inputs) {
      if (a.missing(inputs) || b.missing(inputs)) return absl::OkStatus();
      return check(s, Indices(a, inputs), Indices(b, inputs));
    });
  };
  for (const Op& op : graph.ops()) {
    const auto find = [&](std::string_view name) {
      const std::optional<size_t> input = FindInput(op, name);
      if (!input) return Source();
      const LogicalTensor& tensor = graph.tensor(op.inputs[*input]);
      const int port = partition.InputPort(tensor.id);
      return port == kNoPort && !tensor.value ? Source() : Source{&tensor, port};
    };
    for (const CheckRow& row : kChecks) {
      if (row.kind == op.kind) add(op, find(row.a), find(row.b), row.check);
    }
  }
  const AttentionSpec* const spec = partition.attention();
  if (!fused || spec == nullptr || spec->k.empty() || !spec->k[0].range.present()) return;
  const auto range = [&](const KvSegment& segment) {
    return Source{&partition.input(segment.range.port), segment.range.port};
  };
  add(graph.ops().back(), range(spec->k[0]), range(spec->v[0]), CheckColumns);
}

absl::Status IndexChecks::Check(Inputs inputs) const {
  for (const auto& check : checks_) KVANT_RETURN_IF_ERROR(check(inputs));
  return absl::OkStatus();
}

}  // namespace kvant
