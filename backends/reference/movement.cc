// Ops that move elements, and what reads a cache and ragged rows: but for transposes in plain code,
// as oneDNN has none of it. Arrays are dense and values are not rounded inside a plan, so
// StaticReshape, Reorder and TypeCast are other names for the same array.
#include <algorithm>
#include <vector>

#include "kvant/backends/loops.h"
#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/onednn.h"
#include "kvant/backends/reference/pieces.h"
#include "kvant/backends/reference/rows.h"

namespace kvant::reference {
namespace {

// An array whose axis is tokens of `outer` lines.
struct Lines : AxisView {
  Lines(const Array& array, int64_t axis) : AxisView(array.dims, axis), array(array) {}
  // Token `token` of a line; the next line is behind the last.
  std::byte* At(const RunContext& context, int64_t line, int64_t token) const {
    return context.data<std::byte>(array) + (line * length + token) * token_bytes();
  }
  int64_t token_bytes() const { return inner * static_cast<int64_t>(BytesOf(array.storage)); }

  Array array;
};

int64_t TokenAxis(const Lowering& lowering) { return lowering.op().Get<Attr::kTokenAxis>(); }
int64_t TokenGroup(const Lowering& lowering) { return lowering.op().Get<Attr::kTokenGroup>(); }

// A step that fills `result`, line by line: with what `copy` copies, whose end it returns, and then
// with zeros.
template <typename CopyLine>
void AddCopies(Plan& plan, absl::Span<const Array> reads, const Array& result, int64_t axis,
               CopyLine copy) {
  const Lines to(result, axis);
  plan.AddStep(reads, {result}, [=](const RunContext& context) {
    context.executor.ParallelFor(to.outer, [&](int64_t line, int) {
      std::byte* const end = copy(context, line, to.At(context, line, 0));
      std::fill(end, to.At(context, line + 1, 0), std::byte{0});
    });
  });
}

}  // namespace

Array Gather(Plan& plan, const Array& x, const Dims& dims, const Dims& strides) {
  Array result = plan.NewArray(dims, x.storage);
  if (result.elements() == 0) return result;
  const Walk walk(dims, {DenseStrides(dims), strides});
  const auto from = StridedDesc(walk.dims(), walk.strides(1), x.storage);
  if (x.storage != Storage::kS64 && !from.is_zero()) {
    const auto to = DenseDesc(walk.dims(), x.storage);
    const dnnl::reorder::primitive_desc description(CpuEngine(), from, CpuEngine(), to,
                                                    UserScratchpad(), /*allow_empty=*/true);
    if (description.get(/*allow_empty=*/true)) {
      AddPrimitive(plan, dnnl::reorder(description), description.scratchpad_desc(),
                   {{DNNL_ARG_FROM, x, from}}, {DNNL_ARG_TO, result, to});
      return result;
    }
  }
  plan.AddStep({x}, {result}, [=](const RunContext& context) {
    walk.ForEachRow(context.executor, [&](const Row& row) {
      CopyRow(row, BytesOf(x.storage), context.data<void>(result), context.data<void>(x));
    });
  });
  return result;
}

Array Concat(Plan& plan, absl::Span<const Array> arrays, int64_t axis) {
  Dims dims = arrays.front().dims;
  dims[axis] = 0;
  for (const Array& array : arrays) dims[axis] += array.dims[axis];
  Array result = plan.NewArray(dims, arrays.front().storage);
  std::vector<Lines> parts;
  for (const Array& array : arrays) parts.emplace_back(array, axis);
  AddCopies(plan, arrays, result, axis,
            [=](const RunContext& context, int64_t line, std::byte* out) {
              for (const Lines& from : parts) {
                out = std::copy(from.At(context, line, 0), from.At(context, line + 1, 0), out);
              }
              return out;
            });
  return result;
}

absl::StatusOr<Array> LowerStaticReshape(Lowering& lowering) { return lowering.Input(0); }
absl::StatusOr<Array> LowerReorder(Lowering& lowering) { return lowering.Input(0); }
absl::StatusOr<Array> LowerTypeCast(Lowering& lowering) { return lowering.Input(0); }

absl::StatusOr<Array> LowerStaticTranspose(Lowering& lowering) {
  const Array x = lowering.Input(0);
  const auto order = lowering.op().Get<Attr::kOrder>();
  const Dims dense = DenseStrides(x.dims);
  Dims dims, strides;
  for (int64_t axis : order) {
    axis = FromFront(axis, x.dims.size());
    dims.push_back(x.dims[axis]);
    strides.push_back(dense[axis]);
  }
  return Gather(lowering.plan, x, dims, strides);
}

absl::StatusOr<Array> LowerSlice(Lowering& lowering) {
  const Array x = lowering.Input(0);
  const Array result = lowering.plan.NewArray(lowering.OutputDims(0), x.storage);
  const int64_t axis = lowering.op().Get<Attr::kAxis>();
  const Lines from(x, axis);
  AddCopies(lowering.plan, {x}, result, axis,
            [=, begin = lowering.op().Get<Attr::kBegin>(), size = lowering.op().Get<Attr::kSize>()](
                const RunContext& context, int64_t line, std::byte* out) {
              return std::copy_n(from.At(context, line, begin), size * from.token_bytes(), out);
            });
  return result;
}

absl::StatusOr<Array> LowerConcat(Lowering& lowering) {
  std::vector<Array> arrays;
  for (int i = 0; lowering.HasInput(i); ++i) arrays.push_back(lowering.Input(i));
  const int64_t axis = FromFront(lowering.op().Get<Attr::kAxis>(), arrays.front().dims.size());
  return Concat(lowering.plan, arrays, axis);
}

Array KeepExisting(Plan& plan, const Array& x, const Existing& existing, int64_t axis, float value,
                   int64_t group) {
  const Lines lines(x, axis);
  const int64_t rows = x.dims[0];
  const Array result = plan.NewArray(x.dims, x.storage);
  const Lines results(result, axis);
  plan.AddStep({x, existing.lengths, existing.first}, {result}, [=](const RunContext& context) {
    context.executor.ParallelFor(lines.outer, [&](int64_t line, int) {
      const int64_t n = line * rows / lines.outer;
      const int64_t end = context.of_row(existing.lengths, n);
      const int64_t first = existing.first ? context.of_row(existing.first, n) : 0;
      for (int64_t t = 0; t < lines.length; ++t) {
        std::byte* const to = results.At(context, line, t);
        if (first < (t + 1) * group && t * group < end) {
          std::copy_n(lines.At(context, line, t), lines.token_bytes(), to);
        } else if (x.storage == Storage::kF32) {
          std::fill_n(reinterpret_cast<float*>(to), lines.inner, value);
        } else {
          std::fill_n(to, lines.token_bytes(), std::byte{0});
        }
      }
    });
  });
  return result;
}

Array Unpack(Plan& plan, const Array& x, const Array& offsets) {
  const int64_t heads = x.dims[1], count = offsets.elements() - 1;
  const Lines from(x, 2);
  Array result = plan.NewArray({count, heads, x.dims[2], x.dims[3]}, x.storage);
  AddCopies(plan, {x, offsets}, result, 2,
            [=](const RunContext& context, int64_t line, std::byte* out) {
              const int32_t* at = context.data<int32_t>(offsets) + line / heads;
              const int64_t head = line % heads;
              return std::copy(from.At(context, head, at[0]), from.At(context, head, at[1]), out);
            });
  return result;
}

Array Pack(Plan& plan, const Array& x, const Array& offsets) {
  const int64_t heads = x.dims[1], count = x.dims[0];
  const Lines from(x, 2);
  Array result = plan.NewArray({1, heads, x.dims[2], x.dims[3]}, x.storage);
  AddCopies(
      plan, {x, offsets}, result, 2, [=](const RunContext& context, int64_t head, std::byte* out) {
        // Offsets begin with 0 and do not fall.
        for (int64_t n = 0; n < count; ++n) {
          const int32_t* at = context.data<int32_t>(offsets) + n;
          const int64_t line = n * heads + head;
          out = std::copy_n(from.At(context, line, 0), (at[1] - at[0]) * from.token_bytes(), out);
        }
        return out;
      });
  return result;
}

absl::StatusOr<Array> LowerLoadTokens(Lowering& lowering) {
  return KeepExisting(lowering.plan, lowering.Input(0),
                      {lowering.Input(1), lowering.FindInput("first")}, TokenAxis(lowering), 0,
                      TokenGroup(lowering));
}

absl::StatusOr<Array> LowerLoadPages(Lowering& lowering) {
  const Array pool = lowering.Input(0), table = lowering.Input(1);
  const Array lengths = lowering.Input(2);
  const Lines from(pool, TokenAxis(lowering));
  const Array result = lowering.plan.NewArray(lowering.OutputDims(0), pool.storage);
  const int64_t rows = result.dims[0], group = TokenGroup(lowering);
  // Lines of a row; the pool may have no page that would say how many.
  const int64_t per_row = rows == 0 ? 1 : Lines(result, TokenAxis(lowering)).outer / rows;
  AddCopies(lowering.plan, {pool, table, lengths}, result, TokenAxis(lowering),
            [=](const RunContext& context, int64_t line, std::byte* out) {
              const int64_t n = line / per_row, most = table.dims[1];
              // What the graph computes may be beyond what there is room for.
              const int64_t length =
                  std::clamp<int64_t>(context.of_row(lengths, n), 0, most * from.length * group);
              const int64_t end = (length + group - 1) / group;
              const int32_t* page = context.data<int32_t>(table) + n * most;
              for (int64_t t = 0; t < end; t += from.length, ++page) {
                const int64_t tokens = std::min(from.length, end - t);
                out = std::copy_n(from.At(context, *page * per_row + line % per_row, 0),
                                  tokens * from.token_bytes(), out);
              }
              return out;
            });
  return result;
}

absl::StatusOr<Array> LowerLoadRanges(Lowering& lowering) {
  const Array ranges = lowering.Input(0);
  const int64_t axis = TokenAxis(lowering), segments = ranges.dims[1];
  std::vector<Array> reads{ranges};
  std::vector<Lines> sources;
  for (int i = 1; lowering.HasInput(i); ++i) {
    sources.emplace_back(reads.emplace_back(lowering.Input(i)), axis);
  }
  const Array result = lowering.plan.NewArray(lowering.OutputDims(0), reads[1].storage);
  const int64_t rows = result.dims[0];
  const int64_t outer = Lines(result, axis).outer;
  AddCopies(lowering.plan, reads, result, axis,
            [=](const RunContext& context, int64_t line, std::byte* out) {
              const int64_t n = ranges.dims[0] == 1 ? 0 : line * rows / outer;
              const int32_t* range = context.data<int32_t>(ranges) + n * segments * 2;
              for (const Lines& from : sources) {
                for (int64_t i = 0; i < range[1]; ++i) {
                  const int64_t token = (range[0] + i) % from.length;
                  out = std::copy_n(from.At(context, line % from.outer, token), from.token_bytes(),
                                    out);
                }
                range += 2;
              }
              return out;
            });
  if (!lowering.HasOutput(1)) return result;
  const Array lengths = lowering.plan.NewArray({ranges.dims[0]}, Storage::kS32);
  lowering.plan.AddStep({ranges}, {lengths}, [=](const RunContext& context) {
    const int32_t* range = context.data<int32_t>(ranges);
    for (int64_t n = 0; n < ranges.dims[0]; ++n) {
      int32_t& sum = context.data<int32_t>(lengths)[n];
      sum = 0;
      for (int64_t s = 0; s < segments; ++s, range += 2) sum += range[1];
    }
  });
  lowering.SetOutput(1, lengths);
  return result;
}

}  // namespace kvant::reference
