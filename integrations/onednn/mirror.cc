#include "kvant/integrations/onednn/mirror.h"

#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"
#include "kvant/integrations/onednn/names.h"

namespace kvant::dnnl_abi {
namespace {

using Tensors = std::vector<LogicalTensor>;

// The op as kvant has it, or why it has not.
absl::StatusOr<Op> OpOf(const OpRecord& record) {
  Op op;
  op.id = record.id;
  op.name = record.name;
  const auto lacks = [&](std::string_view what) {
    return MakeError(ErrorKind::kUnimplemented, "kvant has no ", what);
  };
  const std::optional<OpKind> kind = KindOf(record.kind);
  if (!kind) return lacks(absl::StrCat("op ", std::string(NameOfKind(record.kind))));
  op.kind = *kind;
  for (const auto& [number, value] : record.attrs) {
    const std::optional<Attr> attr = AttrOf(number);
    if (!attr) {
      return lacks(absl::StrCat("attribute ", number, " of ", std::string(OpKindName(op.kind))));
    }
    op.attrs.Set(*attr, value);
  }
  return op;
}

Status AddToNext(GraphHandle graph, const OpRecord& record) {
  OpHandle made = nullptr;
  Status status = next::op_create(&made, record.id, record.kind, record.name.c_str());
  if (status != kSuccess) return status;
  const NextOp op(made);
  for (const TensorDesc& input : record.inputs) {
    if (status == kSuccess) status = next::op_add_input(made, &input);
  }
  for (const TensorDesc& output : record.outputs) {
    if (status == kSuccess) status = next::op_add_output(made, &output);
  }
  for (const auto& attr : record.attrs) {
    if (status != kSuccess) break;
    const AttrNumber number = attr.first;
    const auto set = [&](const auto& value) -> Status {
      using T = std::decay_t<decltype(value)>;
      if constexpr (std::is_same_v<T, int64_t>) {
        return next::op_set_attr_s64(made, number, &value, 1);
      } else if constexpr (std::is_same_v<T, float>) {
        return next::op_set_attr_f32(made, number, &value, 1);
      } else if constexpr (std::is_same_v<T, bool>) {
        const uint8_t byte = value ? 1 : 0;
        return next::op_set_attr_bool(made, number, &byte, 1);
      } else if constexpr (std::is_same_v<T, std::string>) {
        return next::op_set_attr_str(made, number, value.c_str(), value.size());
      } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
        return next::op_set_attr_s64(made, number, value.data(), value.size());
      } else {
        return next::op_set_attr_f32(made, number, value.data(), value.size());
      }
    };
    status = std::visit(set, attr.second);
  }
  return status == kSuccess ? next::add_op(graph, made) : status;
}

std::vector<OpRecord> Ends(const OurGraph& graph, const std::function<bool(const OpRecord&)>& in) {
  absl::flat_hash_map<size_t, const TensorDesc*> made;
  for (const OpRecord& record : graph.ops) {
    if (!in(record)) continue;
    for (const TensorDesc& output : record.outputs) made[output.id] = &output;
  }
  std::vector<OpRecord> ends;
  size_t id = SIZE_MAX;
  for (const OpRecord& record : graph.ops) {
    if (in(record)) continue;
    for (const TensorDesc& input : record.inputs) {
      const auto found = made.find(input.id);
      if (found == made.end()) continue;
      while (graph.op_ids.contains(--id)) continue;
      OpRecord& end = ends.emplace_back();
      end.id = id;
      end.kind = *NumberOf(OpKind::kEnd);
      end.inputs = {*found->second};
      made.erase(found);
    }
  }
  return ends;
}

}  // namespace

absl::StatusOr<MirroredGraph> Mirror(const OurGraph& graph) {
  MirroredGraph mirrored;
  mirrored.graph = Graph({.fpmath = static_cast<FpMath>(graph.fpmath),
                          .apply_to_int = graph.apply_to_int,
                          .engine_kind = "cpu"});
  for (const OpRecord& record : graph.ops) {
    Tensors inputs, outputs;
    for (const TensorDesc& desc : record.inputs) inputs.push_back(TensorOf(desc));
    for (const TensorDesc& desc : record.outputs) outputs.push_back(TensorOf(desc));
    absl::StatusOr<Op> op = OpOf(record);
    absl::Status added = op.status();
    if (op.ok()) added = mirrored.graph.AddOp(*std::move(op), inputs, outputs);
    if (added.ok()) continue;
    mirrored.unknown[record.id] = std::string(added.message());
    Op stand_in;
    stand_in.id = record.id;
    stand_in.kind = OpKind::kWildcard;
    stand_in.name = record.name;
    KVANT_RETURN_IF_ERROR(mirrored.graph.AddOp(std::move(stand_in), inputs, outputs));
  }
  KVANT_RETURN_IF_ERROR(mirrored.graph.Finalize());
  return mirrored;
}

Status MakeNextGraph(const OurGraph& graph, const std::function<bool(const OpRecord&)>& in,
                     NextGraph* made) {
  GraphHandle handle = nullptr;
  Status status = next::graph_create_with_fpmath_mode(&handle, graph.engine_kind, graph.fpmath);
  if (status != kSuccess) return status;
  made->reset(handle);
  if (graph.apply_to_int) status = next::graph_set_fpmath_mode(handle, graph.fpmath, 1);
  for (const OpRecord& record : graph.ops) {
    if (status == kSuccess && in(record)) status = AddToNext(handle, record);
  }
  for (const OpRecord& end : Ends(graph, in)) {
    if (status == kSuccess) status = AddToNext(handle, end);
  }
  if (status == kSuccess) status = next::graph_finalize(handle);
  if (status == kSuccess) status = next::graph_filter(handle, kFusion);
  return status;
}

}  // namespace kvant::dnnl_abi
