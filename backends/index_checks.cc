#include "kvant/backends/index_checks.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

absl::Status Wrong(const Op& op, const std::string& what) {
  return MakeError(ErrorKind::kInvalidArguments, absl::StrCat(op.ToString(), ": ", what));
}

// s32 or s64 of up to three axes where it lies; one row serves all.
class Indices {
 public:
  Indices(const LogicalTensor& tensor, const void* data)
      : data_(data), wide_(tensor.type == kS64), strides_(tensor.StridesOrDense()) {
    rows_ = tensor.rank() == 0 ? 1 : (*tensor.dims)[0];
  }
  int64_t rows() const { return rows_; }
  int64_t at(int64_t row, int64_t i = 0, int64_t j = 0) const {
    const int64_t place[] = {rows_ == 1 ? 0 : row, i, j};
    int64_t index = 0;
    for (size_t axis = 0; axis < strides_.size(); ++axis) index += place[axis] * strides_[axis];
    return wide_ ? static_cast<const int64_t*>(data_)[index]
                 : static_cast<const int32_t*>(data_)[index];
  }

 private:
  const void* data_;
  bool wide_;
  Dims strides_;
  int64_t rows_ = 1;
};

int64_t TokenDim(const Op& op, const LogicalTensor& tensor) {
  const int64_t axis = op.Get<Attr::kTokenAxis>();
  return (*tensor.dims)[FromFront(axis, tensor.rank())];
}

}  // namespace

IndexChecks::IndexChecks(const Partition& partition, bool fused) : partition_(&partition) {
  for (const Op& op : partition.ops().ops()) Add(op);
  if (fused && partition.attention() != nullptr) AddColumns(*partition.attention());
}

IndexChecks::Source IndexChecks::Find(const Op& op, std::string_view name) const {
  const std::optional<size_t> input = FindInput(op, name);
  if (!input) return {};
  const LogicalTensor& tensor = partition_->ops().tensor(op.inputs[*input]);
  const int port = partition_->InputPort(tensor.id);
  return port == kNoPort && !tensor.value ? Source() : Source{&tensor, port};
}

void IndexChecks::Add(const Op& op) {
  const auto tensor = [&](size_t input) -> const LogicalTensor& {
    return partition_->ops().tensor(op.inputs[input]);
  };
  const int64_t group = op.Get<Attr::kTokenGroup>();
  OneCheck check;
  check.op = &op;
  switch (op.kind) {
    case OpKind::kLoadTokens:
      check.source = Find(op, "lengths");
      check.other = Find(op, "first");
      check.most = TokenDim(op, tensor(0)) * group;
      break;
    case OpKind::kSoftMax: {
      const int64_t axis = op.Get<Attr::kAxis>();
      check.source = Find(op, "lengths");
      check.other = Find(op, "first");
      check.most = (*tensor(0).dims)[FromFront(axis, tensor(0).rank())];
      break;
    }
    case OpKind::kLoadPages:
      check.kind = Kind::kPages;
      check.source = Find(op, "page_table");
      check.other = Find(op, "lengths");
      check.most = (*tensor(0).dims)[0];
      check.page_tokens = TokenDim(op, tensor(0)) * group;
      break;
    case OpKind::kLoadRanges:
      check.kind = Kind::kRanges;
      check.source = Find(op, "ranges");
      for (size_t i = 1; i < op.inputs.size(); ++i) {
        check.capacities.push_back(TokenDim(op, tensor(i)));
      }
      break;
    case OpKind::kAppend:
    case OpKind::kAppendPages:
      check.kind = Kind::kPositions;
      check.source = Find(op, InputName(op, 1));
      check.to = AppendedTokensOf(op, tensor(0), partition_->ops().tensor(op.outputs[0]));
      check.most = (*tensor(0).dims)[0];
      break;
    case OpKind::kScaledDotProductAttention:
      check.source = Find(op, "kv_lengths");
      check.other = Find(op, "kv_first");
      check.most = (*tensor(1).dims)[2];
      if (const Source offsets = Find(op, "query_offsets"); offsets.present()) {
        OneCheck of_queries;
        of_queries.kind = Kind::kOffsets;
        of_queries.op = &op;
        of_queries.source = offsets;
        of_queries.most = (*tensor(0).dims)[0];
        checks_.push_back(std::move(of_queries));
      }
      break;
    default:
      return;
  }
  // What an op of the partition computes, a LoadRanges the lengths, is right by itself.
  if (check.source.present() || check.other.present()) checks_.push_back(std::move(check));
}

void IndexChecks::AddColumns(const AttentionSpec& spec) {
  if (spec.k.empty() || !spec.k[0].range.present()) return;
  OneCheck check;
  check.kind = Kind::kColumns;
  check.op = &partition_->ops().ops().back();
  const auto source = [&](int port) { return Source{&partition_->input(port), port}; };
  check.source = source(spec.k[0].range.port);
  check.other = source(spec.v[0].range.port);
  checks_.push_back(std::move(check));
}

absl::Status IndexChecks::Check(absl::Span<const void* const> inputs) const {
  for (const OneCheck& check : checks_) {
    const auto missing = [&](const Source& source) {
      return source.present() && source.Find(inputs) == nullptr;
    };
    if (missing(check.source) || missing(check.other)) continue;
    switch (check.kind) {
      case Kind::kLengths:
        KVANT_RETURN_IF_ERROR(CheckLengths(check, inputs));
        break;
      case Kind::kPages:
        KVANT_RETURN_IF_ERROR(CheckPages(check, inputs));
        break;
      case Kind::kRanges:
        KVANT_RETURN_IF_ERROR(CheckRanges(check, inputs));
        break;
      case Kind::kOffsets:
        KVANT_RETURN_IF_ERROR(CheckOffsets(check, inputs));
        break;
      case Kind::kPositions:
        KVANT_RETURN_IF_ERROR(CheckPositions(check, inputs));
        break;
      case Kind::kColumns:
        KVANT_RETURN_IF_ERROR(CheckColumns(check, inputs));
        break;
    }
  }
  return absl::OkStatus();
}

absl::Status IndexChecks::CheckLengths(const OneCheck& check,
                                       absl::Span<const void* const> inputs) const {
  const auto in_range = [&](const Source& source, std::string_view what) {
    if (!source.present()) return absl::OkStatus();
    const Indices all(*source.tensor, source.Find(inputs));
    for (int64_t n = 0; n < all.rows(); ++n) {
      if (all.at(n) >= 0 && all.at(n) <= check.most) continue;
      return Wrong(*check.op,
                   absl::StrCat(std::string(what), " of row ", n, " is ", all.at(n),
                                "; it must be between 0 and the capacity of ", check.most));
    }
    return absl::OkStatus();
  };
  KVANT_RETURN_IF_ERROR(in_range(check.source, "the length"));
  return in_range(check.other, "the first token");
}

absl::Status IndexChecks::CheckPages(const OneCheck& check,
                                     absl::Span<const void* const> inputs) const {
  if (!check.source.present()) return absl::OkStatus();
  const LogicalTensor& table = *check.source.tensor;
  const Indices pages(table, check.source.Find(inputs));
  const int64_t most = (*table.dims)[1];
  for (int64_t n = 0; n < pages.rows(); ++n) {
    // Of lengths that the partition computes, any may be.
    const int64_t length = check.other.present()
                               ? Indices(*check.other.tensor, check.other.Find(inputs)).at(n)
                               : most * check.page_tokens;
    if (length < 0 || length > most * check.page_tokens) {
      return Wrong(*check.op, absl::StrCat("the length of row ", n, " is ", length, "; its ", most,
                                           " pages of ", check.page_tokens,
                                           " tokens have room for ", most * check.page_tokens));
    }
    for (int64_t i = 0; i * check.page_tokens < length; ++i) {
      const int64_t page = pages.at(n, i);
      if (page >= 0 && page < check.most) continue;
      return Wrong(*check.op,
                   absl::StrCat("page ", i, " of row ", n, ", which has ", length, " tokens, is ",
                                page, "; the pool has ", check.most, " pages"));
    }
  }
  return absl::OkStatus();
}

absl::Status IndexChecks::CheckRanges(const OneCheck& check,
                                      absl::Span<const void* const> inputs) const {
  const Indices ranges(*check.source.tensor, check.source.Find(inputs));
  for (int64_t n = 0; n < ranges.rows(); ++n) {
    for (size_t s = 0; s < check.capacities.size(); ++s) {
      const int64_t capacity = check.capacities[s];
      const auto row = static_cast<int64_t>(s);
      const int64_t first = ranges.at(n, row, 0), tokens = ranges.at(n, row, 1);
      if (0 <= tokens && tokens <= capacity && 0 <= first &&
          first < std::max<int64_t>(1, capacity)) {
        continue;
      }
      return Wrong(*check.op, absl::StrCat("the range of src ", s, " in row ", n, " is ", tokens,
                                           " tokens from token ", first, " on; there is room for ",
                                           capacity, " tokens"));
    }
  }
  return absl::OkStatus();
}

absl::Status IndexChecks::CheckOffsets(const OneCheck& check,
                                       absl::Span<const void* const> inputs) const {
  const Indices offsets(*check.source.tensor, check.source.Find(inputs));
  for (int64_t n = 0; n < offsets.rows(); ++n) {
    const int64_t begin = n == 0 ? 0 : offsets.at(n - 1);
    if (n == 0 && offsets.at(0) != 0) {
      return Wrong(*check.op, absl::StrCat("query_offsets begin with ", offsets.at(0), ", not 0"));
    }
    if (offsets.at(n) < begin) {
      return Wrong(*check.op, absl::StrCat("query_offsets fall: ", begin, " and then ",
                                           offsets.at(n), " for row ", n - 1));
    }
    if (offsets.at(n) > check.most) {
      return Wrong(*check.op, absl::StrCat("query_offsets of row ", n - 1, " end at ",
                                           offsets.at(n), "; there are ", check.most, " queries"));
    }
  }
  return absl::OkStatus();
}

absl::Status IndexChecks::CheckPositions(const OneCheck& check,
                                         absl::Span<const void* const> inputs) const {
  const Indices positions(*check.source.tensor, check.source.Find(inputs));
  for (int64_t n = 0; n < check.most; ++n) {
    KVANT_RETURN_IF_ERROR(check.to.Check(*check.op, n, positions.at(n)));
  }
  return absl::OkStatus();
}

absl::Status IndexChecks::CheckColumns(const OneCheck& check,
                                       absl::Span<const void* const> inputs) const {
  const auto sum = [&](const Source& source, int64_t n) {
    const Indices ranges(*source.tensor, source.Find(inputs));
    int64_t tokens = 0;
    for (int64_t s = 0; s < (*source.tensor->dims)[1]; ++s) tokens += ranges.at(n, s, 1);
    return tokens;
  };
  const int64_t rows = std::max((*check.source.tensor->dims)[0], (*check.other.tensor->dims)[0]);
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t k = sum(check.source, n), v = sum(check.other, n);
    if (k == v) continue;
    return Wrong(*check.op, absl::StrCat("the ranges of row ", n, " add up to ", k,
                                         " tokens of K and ", v, " of V"));
  }
  return absl::OkStatus();
}

}  // namespace kvant
