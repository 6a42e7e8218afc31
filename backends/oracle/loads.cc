// What reads a cache: token by token, from the definitions in ops.inc.
#include <algorithm>

#include "kvant/backends/oracle/ops.h"

namespace kvant::oracle {
namespace {

// Copies token `token` of line `line` of `from` to that of `to`.
void Copy(const Array& from, const AxisView& from_axis, int64_t from_line, int64_t from_token,
          Array& to, const AxisView& to_axis, int64_t line, int64_t token) {
  std::copy_n(from.data() + (from_line * from_axis.length + from_token) * from_axis.inner,
              to_axis.inner, to.data() + (line * to_axis.length + token) * to_axis.inner);
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

absl::StatusOr<Array> EvalLoadTokens(OpContext& context) {
  Array src = context.Take(0);
  const AxisView axis(src.dims, context.op.Get<Attr::kTokenAxis>());
  const int64_t group = context.op.Get<Attr::kTokenGroup>(), rows = src.dims[0];
  for (int64_t line = 0; line < axis.outer; ++line) {
    const Existing tokens = ExistingOf(context.Find("lengths"), context.Find("first"),
                                       axis.length * group, line * rows / axis.outer);
    for (int64_t t = 0; t < axis.length; ++t) {
      if (tokens.first < (t + 1) * group && t * group < tokens.end) continue;
      std::fill_n(src.data() + (line * axis.length + t) * axis.inner, axis.inner, 0.0);
    }
  }
  return src;
}

absl::StatusOr<Array> EvalLoadPages(OpContext& context) {
  const Array &pool = context.in(0), &table = context.in(1);
  Array dst(context.out_dims(0));
  const int64_t token_axis = context.op.Get<Attr::kTokenAxis>();
  const AxisView from(pool.dims, token_axis), to(dst.dims, token_axis);
  const int64_t rows = dst.dims[0], group = context.op.Get<Attr::kTokenGroup>();
  const int64_t per_row = rows == 0 ? 0 : to.outer / rows;  // lines
  for (int64_t line = 0; line < to.outer; ++line) {
    const int64_t n = line / per_row;
    const Existing tokens = ExistingOf(&context.in(2), nullptr, to.length * group, n);
    for (int64_t t = 0; t * group < tokens.end; ++t) {
      const auto page = static_cast<int64_t>(table.values[n * table.dims[1] + t / from.length]);
      Copy(pool, from, page * per_row + line % per_row, t % from.length, dst, to, line, t);
    }
  }
  return dst;
}

absl::StatusOr<Array> EvalLoadRanges(OpContext& context) {
  const Array& ranges = context.in(0);
  Array dst(context.out_dims(0));
  const int64_t token_axis = context.op.Get<Attr::kTokenAxis>();
  const AxisView to(dst.dims, token_axis);
  const int64_t rows = dst.dims[0], segments = ranges.dims[1];
  for (int64_t line = 0; line < to.outer; ++line) {
    const int64_t n = line * rows / to.outer;
    const double* range = ranges.data() + (ranges.dims[0] == 1 ? 0 : n) * segments * 2;
    int64_t column = 0;
    for (int64_t s = 0; s < segments; ++s, range += 2) {
      const Array& src = context.in(static_cast<int>(s) + 1);
      const AxisView from(src.dims, token_axis);
      // One row of src is for all.
      const int64_t from_line = line % from.outer;
      for (int64_t i = 0; i < static_cast<int64_t>(range[1]); ++i, ++column) {
        Copy(src, from, from_line, (static_cast<int64_t>(range[0]) + i) % from.length, dst, to,
             line, column);
      }
    }
  }
  if (Array* const lengths = context.Output(1)) {
    for (int64_t i = 0; i < ranges.dims[0] * segments; ++i) {
      lengths->values[i / segments] += ranges.values[i * 2 + 1];
    }
  }
  return dst;
}

}  // namespace kvant::oracle
