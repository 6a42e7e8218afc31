#include "kvant/tools/demo_cache.h"

#include <utility>

#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"

namespace kvant {
namespace {

constexpr DataType kScaleType = kF16;

// codes, scales[, zero points] = DynamicQuantize(values) for the groups of `stored`.
absl::StatusOr<Graph> QuantizeGraph(const StoredTensor& stored) {
  GraphBuilder g;
  const Value x = g.Input("values", kF32, *stored.data.desc.dims);
  g.DynamicQuantize(x, {.group_shape = stored.group_shape,
                        .type = stored.data.desc.type,
                        .scale_type = stored.scales.desc.type,
                        .zero_point_type = stored.zero_points.desc.type});
  return std::move(g).Build();
}

absl::Status Quantize(const Engine& engine, absl::Span<const float> values, StoredTensor& stored) {
  KVANT_ASSIGN_OR_RETURN(const Graph graph, QuantizeGraph(stored));
  KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions, PartitionGraph(graph));
  KVANT_ASSIGN_OR_RETURN(const CompiledPartition quantize, engine.Compile(partitions.front()));
  std::vector<Tensor> outputs{stored.data.data, stored.scales.data};
  if (stored.zero_points.desc.type != kUndef) outputs.push_back(stored.zero_points.data);
  const ConstTensor input{values.data(), values.size() * sizeof(float)};
  return quantize.Execute(Stream(engine), {input}, outputs);
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
  KVANT_RETURN_IF_ERROR(Quantize(engine, values, stored));
  return stored;
}

}  // namespace kvant
