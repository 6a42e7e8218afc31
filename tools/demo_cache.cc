#include "kvant/tools/demo_cache.h"

#include <optional>
#include <utility>

#include "kvant/backends/quantize.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"

namespace kvant {
namespace {

constexpr DataType kScaleType = kF16;

// codes = DynamicQuantize(values, scales[, zero points]) for the groups of `stored`.
absl::StatusOr<Graph> QuantizeGraph(const StoredTensor& stored) {
  GraphBuilder g;
  const Value x = g.Input("values", kF32, *stored.data.desc.dims);
  const Value scales = g.Input("scales", stored.scales.desc.type, *stored.scales.desc.dims);
  std::optional<Value> zero_points;
  if (stored.zero_points.desc.type != kUndef) {
    zero_points = g.Input("zero_points", stored.zero_points.desc.type, *stored.scales.desc.dims);
  }
  g.Output("codes",
           g.DynamicQuantize(x, scales, zero_points,
                             {.group_shape = stored.group_shape, .type = stored.data.desc.type}));
  return std::move(g).Build();
}

absl::Status FillCodes(const Engine& engine, absl::Span<const float> values, StoredTensor& stored) {
  KVANT_ASSIGN_OR_RETURN(const Graph graph, QuantizeGraph(stored));
  KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions, PartitionGraph(graph));
  KVANT_ASSIGN_OR_RETURN(const CompiledPartition quantize, engine.Compile(partitions.front()));
  std::vector<ConstTensor> inputs{{values.data(), values.size() * sizeof(float)},
                                  stored.scales.data};
  if (stored.zero_points.desc.type != kUndef) inputs.push_back(stored.zero_points.data);
  return quantize.Execute(Stream(engine), inputs, {stored.data.data});
}

}  // namespace

FilledTensor MakeTensor(DataType type, Dims dims) {
  FilledTensor tensor;
  tensor.desc.type = type;
  tensor.desc.dims = std::move(dims);
  tensor.data = Buffer(tensor.desc.memory_bytes());
  return tensor;
}

absl::StatusOr<StoredTensor> Store(const Engine& engine, const StorageFormat& format,
                                   absl::Span<const float> values, const Dims& dims) {
  StoredTensor stored;
  stored.data = MakeTensor(format.format.type, dims);
  if (!format.format.quantized()) {
    for (size_t i = 0; i < values.size(); ++i) {
      StoreElement(format.format.type, stored.data.data.data(), i, values[i]);
    }
    return stored;
  }

  KVANT_ASSIGN_OR_RETURN(stored.group_shape, format.format.GroupShape(dims));
  Dims groups = dims;
  for (size_t d = 0; d < groups.size(); ++d) groups[d] /= stored.group_shape[d];
  stored.scales = MakeTensor(kScaleType, groups);
  const DataType zero_point_type =
      format.real_zero_points ? kScaleType : format.format.ZeroPointType(kScaleType);
  if (zero_point_type != kUndef) stored.zero_points = MakeTensor(zero_point_type, groups);
  KVANT_RETURN_IF_ERROR(ComputeScales(values, dims, stored.group_shape, format.format.type,
                                      kScaleType, stored.scales.data.data(), zero_point_type,
                                      stored.zero_points.data.data()));
  KVANT_RETURN_IF_ERROR(FillCodes(engine, values, stored));
  return stored;
}

}  // namespace kvant
