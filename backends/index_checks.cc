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

int64_t TokenDim(const Op& op, const LogicalTensor& tensor) {
  const int64_t axis = op.Get<Attr::kTokenAxis>();
  return (*tensor.dims)[FromFront(axis, tensor.rank())];
}

absl::Status CheckLengths(const Op& op, const Indices& lengths, const Indices& first,
                          int64_t capacity) {
  const auto in_range = [&](const Indices& all, std::string_view what) {
    for (int64_t n = 0; n < all.rows(); ++n) {
      if (all.at(n) >= 0 && all.at(n) <= capacity) continue;
      return ArgumentsError(op, what, " of row ", n, " is ", all.at(n),
                            "; it must be between 0 and the capacity of ", capacity);
    }
    return absl::OkStatus();
  };
  KVANT_RETURN_IF_ERROR(in_range(lengths, "the length"));
  return in_range(first, "the first token");
}

absl::Status CheckPages(const Op& op, const Indices& table, const Indices& lengths,
                        int64_t pool_pages, int64_t page_tokens) {
  for (int64_t n = 0; n < table.rows(); ++n) {
    const int64_t pages = table.extent(1), room = pages * page_tokens;
    // Of lengths that the partition computes, any may be.
    const int64_t length = lengths.present() ? lengths.at(n) : room;
    if (length < 0 || length > room) {
      return ArgumentsError(op, "the length of row ", n, " is ", length, "; its ", pages,
                            " pages of ", page_tokens, " tokens have room for ", room);
    }
    for (int64_t i = 0; i * page_tokens < length; ++i) {
      const int64_t page = table.at(n, i);
      if (page >= 0 && page < pool_pages) continue;
      return ArgumentsError(op, "page ", i, " of row ", n, ", which has ", length, " tokens, is ",
                            page, "; the pool has ", pool_pages, " pages");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRanges(const Op& op, const Indices& ranges,
                         absl::Span<const int64_t> capacities) {
  for (int64_t n = 0; n < ranges.rows(); ++n) {
    for (size_t s = 0; s < capacities.size(); ++s) {
      const int64_t capacity = capacities[s];
      const auto row = static_cast<int64_t>(s);
      const int64_t first = ranges.at(n, row, 0), tokens = ranges.at(n, row, 1);
      if (0 <= tokens && tokens <= capacity && 0 <= first &&
          first < std::max<int64_t>(1, capacity)) {
        continue;
      }
      return ArgumentsError(op, "the range of src ", s, " in row ", n, " is ", tokens,
                            " tokens from token ", first, " on; there is room for ", capacity,
                            " tokens");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOffsets(const Op& op, const Indices& offsets, int64_t queries) {
  for (int64_t n = 0; n < offsets.rows(); ++n) {
    const int64_t begin = n == 0 ? 0 : offsets.at(n - 1);
    if (n == 0 && offsets.at(0) != 0) {
      return ArgumentsError(op, "query_offsets begin with ", offsets.at(0), ", not 0");
    }
    if (offsets.at(n) < begin) {
      return ArgumentsError(op, "query_offsets fall: ", begin, " and then ", offsets.at(n),
                            " for row ", n - 1);
    }
    if (offsets.at(n) > queries) {
      return ArgumentsError(op, "query_offsets of row ", n - 1, " end at ", offsets.at(n),
                            "; there are ", queries, " queries");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPositions(const Op& op, const Indices& positions, int64_t rows,
                            const AppendedTokens& to) {
  for (int64_t n = 0; n < rows; ++n) KVANT_RETURN_IF_ERROR(to.Check(op, n, positions.at(n)));
  return absl::OkStatus();
}

// Ranges of K and of V.
absl::Status CheckColumns(const Op& op, const Indices& k_ranges, const Indices& v_ranges) {
  const auto sum = [](const Indices& ranges, int64_t n) {
    int64_t tokens = 0;
    for (int64_t s = 0; s < ranges.extent(1); ++s) tokens += ranges.at(n, s, 1);
    return tokens;
  };
  for (int64_t n = 0; n < std::max(k_ranges.rows(), v_ranges.rows()); ++n) {
    const int64_t k = sum(k_ranges, n), v = sum(v_ranges, n);
    if (k == v) continue;
    return ArgumentsError(op, "the ranges of row ", n, " add up to ", k, " tokens of K and ", v,
                          " of V");
  }
  return absl::OkStatus();
}

}  // namespace

IndexChecks::IndexChecks(const Partition& partition, bool fused) {
  // check(indices of a, indices of b), once both are there. What an op of the partition computes, a
  // LoadRanges the lengths, is right by itself.
  const auto add = [this](Source a, Source b, auto check) {
    if (!a.present() && !b.present()) return;
    checks_.push_back([=](Inputs inputs) {
      if (a.missing(inputs) || b.missing(inputs)) return absl::OkStatus();
      return check(Indices(a, inputs), Indices(b, inputs));
    });
  };
  for (const Op& op : partition.ops().ops()) {
    const auto tensor = [&](size_t input) -> const LogicalTensor& {
      return partition.ops().tensor(op.inputs[input]);
    };
    const auto find = [&](std::string_view name) {
      const std::optional<size_t> input = FindInput(op, name);
      if (!input) return Source();
      const int port = partition.InputPort(op.inputs[*input]);
      return port == kNoPort && !tensor(*input).value ? Source() : Source{&tensor(*input), port};
    };
    const auto add_lengths = [&](Source lengths, Source first, int64_t capacity) {
      add(lengths, first, [&op, capacity](const Indices& all, const Indices& first_tokens) {
        return CheckLengths(op, all, first_tokens, capacity);
      });
    };
    const int64_t group = op.Get<Attr::kTokenGroup>();
    switch (op.kind) {
      case OpKind::kLoadTokens:
        add_lengths(find("lengths"), find("first"), TokenDim(op, tensor(0)) * group);
        break;
      case OpKind::kSoftMax: {
        const int64_t axis = op.Get<Attr::kAxis>();
        add_lengths(find("lengths"), find("first"),
                    (*tensor(0).dims)[FromFront(axis, tensor(0).rank())]);
        break;
      }
      case OpKind::kLoadPages:
        add(find("page_table"), find("lengths"),
            [&op, pages = (*tensor(0).dims)[0], tokens = TokenDim(op, tensor(0)) * group](
                const Indices& table, const Indices& lengths) {
              return CheckPages(op, table, lengths, pages, tokens);
            });
        break;
      case OpKind::kLoadRanges: {
        std::vector<int64_t> capacities;
        for (size_t i = 1; i < op.inputs.size(); ++i) {
          capacities.push_back(TokenDim(op, tensor(i)));
        }
        add(find("ranges"), {}, [&op, capacities](const Indices& ranges, const Indices&) {
          return CheckRanges(op, ranges, capacities);
        });
        break;
      }
      case OpKind::kAppend:
      case OpKind::kAppendPages:
        add(find(InputName(op, 1)), {},
            [&op, rows = (*tensor(0).dims)[0],
             to = AppendedTokensOf(op, tensor(0), partition.ops().tensor(op.outputs[0]))](
                const Indices& positions, const Indices&) {
              return CheckPositions(op, positions, rows, to);
            });
        break;
      case OpKind::kScaledDotProductAttention:
        add(find("query_offsets"), {},
            [&op, queries = (*tensor(0).dims)[0]](const Indices& offsets, const Indices&) {
              return CheckOffsets(op, offsets, queries);
            });
        add_lengths(find("kv_lengths"), find("kv_first"), (*tensor(1).dims)[2]);
        break;
      default:
        break;
    }
  }
  const AttentionSpec* const spec = partition.attention();
  if (!fused || spec == nullptr || spec->k.empty() || !spec->k[0].range.present()) return;
  const auto range = [&](const KvSegment& segment) {
    return Source{&partition.input(segment.range.port), segment.range.port};
  };
  add(range(spec->k[0]), range(spec->v[0]),
      [&op = partition.ops().ops().back()](const Indices& k, const Indices& v) {
        return CheckColumns(op, k, v);
      });
}

absl::Status IndexChecks::Check(Inputs inputs) const {
  for (const auto& check : checks_) KVANT_RETURN_IF_ERROR(check(inputs));
  return absl::OkStatus();
}

}  // namespace kvant
