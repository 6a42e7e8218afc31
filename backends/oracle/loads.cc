// What reads a cache: token by token, from the definitions in ops.inc.
#include <algorithm>

#include "kvant/backends/oracle/ops.h"

namespace kvant::oracle {
namespace {

// An array as [outer][tokens][inner].
struct Axis {
  int64_t outer = 1, tokens = 1, inner = 1;
};

Axis AxisOf(const OpContext& context, const Dims& dims) {
  const int64_t at =
      FromFront(context.op.Get<Attr::kTokenAxis>(), static_cast<int64_t>(dims.size()));
  return {ElementsOf(absl::MakeSpan(dims).subspan(0, at)), dims[at],
          ElementsOf(absl::MakeSpan(dims).subspan(at + 1))};
}

int64_t GroupOf(const OpContext& context) { return context.op.Get<Attr::kTokenGroup>(); }

// Copies token `token` of line `line` of `from` to that of `to`.
void Copy(const Array& from, const Axis& from_axis, int64_t from_line, int64_t from_token,
          Array& to, const Axis& to_axis, int64_t line, int64_t token) {
  std::copy_n(from.data() + (from_line * from_axis.tokens + from_token) * from_axis.inner,
              to_axis.inner, to.data() + (line * to_axis.tokens + token) * to_axis.inner);
}

}  // namespace

Existing ExistingOf(const Array* lengths, const Array* first, int64_t capacity, int64_t n) {
  // What the graph computes may be beyond what there is room for.
  const auto at = [&](const Array& array) {
    const double index = array.values[array.size() == 1 ? 0 : n];
    return static_cast<int64_t>(std::clamp<double>(index, 0, static_cast<double>(capacity)));
  };
  return {first == nullptr ? 0 : at(*first), lengths == nullptr ? capacity : at(*lengths)};
}

absl::Status EvalLoadTokens(OpContext& context) {
  Array src = context.Take(0);
  const Axis axis = AxisOf(context, src.dims);
  const int64_t group = GroupOf(context), rows = src.dims[0];
  for (int64_t line = 0; line < axis.outer; ++line) {
    const Existing tokens = ExistingOf(context.Find("lengths"), context.Find("first"),
                                       axis.tokens * group, line * rows / axis.outer);
    for (int64_t t = 0; t < axis.tokens; ++t) {
      if (tokens.first < (t + 1) * group && t * group < tokens.end) continue;
      std::fill_n(src.data() + (line * axis.tokens + t) * axis.inner, axis.inner, 0.0);
    }
  }
  context.outputs[0] = std::move(src);
  return absl::OkStatus();
}

absl::Status EvalLoadPages(OpContext& context) {
  const Array &pool = context.in(0), &table = context.in(1);
  Array dst(context.out_dims(0));
  const Axis from = AxisOf(context, pool.dims), to = AxisOf(context, dst.dims);
  const int64_t rows = dst.dims[0], group = GroupOf(context);
  const int64_t per_row = rows == 0 ? 0 : to.outer / rows;  // lines
  for (int64_t line = 0; line < to.outer; ++line) {
    const int64_t n = line / per_row;
    const Existing tokens = ExistingOf(&context.in(2), nullptr, to.tokens * group, n);
    for (int64_t t = 0; t * group < tokens.end; ++t) {
      const auto page = static_cast<int64_t>(table.values[n * table.dims[1] + t / from.tokens]);
      Copy(pool, from, page * per_row + line % per_row, t % from.tokens, dst, to, line, t);
    }
  }
  context.outputs[0] = std::move(dst);
  return absl::OkStatus();
}

absl::Status EvalLoadRanges(OpContext& context) {
  const Array& ranges = context.in(0);
  const bool counts = context.outputs.size() > 1;
  Array dst(context.out_dims(0)), lengths(counts ? context.out_dims(1) : Dims{0});
  const Axis to = AxisOf(context, dst.dims);
  const int64_t rows = dst.dims[0], segments = ranges.dims[1];
  for (int64_t line = 0; line < to.outer; ++line) {
    const int64_t n = line * rows / to.outer;
    const double* range = ranges.data() + (ranges.dims[0] == 1 ? 0 : n) * segments * 2;
    int64_t column = 0;
    for (int64_t s = 0; s < segments; ++s, range += 2) {
      const Array& src = context.in(static_cast<int>(s) + 1);
      const Axis from = AxisOf(context, src.dims);
      // One row of src is for all.
      const int64_t from_line = line % from.outer;
      for (int64_t i = 0; i < static_cast<int64_t>(range[1]); ++i, ++column) {
        Copy(src, from, from_line, (static_cast<int64_t>(range[0]) + i) % from.tokens, dst, to,
             line, column);
      }
    }
  }
  for (int64_t n = 0; n < lengths.size(); ++n) {
    for (int64_t s = 0; s < segments; ++s) {
      lengths.values[n] += ranges.values[(n * segments + s) * 2 + 1];
    }
  }
  context.outputs[0] = std::move(dst);
  if (counts) context.outputs[1] = std::move(lengths);
  return absl::OkStatus();
}

}  // namespace kvant::oracle
