#include "kvant/integrations/onednn/compile.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"
#include "kvant/integrations/onednn/compile_cache.h"
#include "kvant/integrations/onednn/names.h"
#include "kvant/integrations/onednn/threads.h"

namespace kvant::dnnl_abi {
namespace {

using Descs = absl::Span<const TensorDesc* const>;

Descs::iterator Find(Descs given, size_t id) {
  return std::find_if(given.begin(), given.end(),
                      [id](const TensorDesc* desc) { return desc->id == id; });
}

absl::Status CheckPorts(const std::vector<TensorDesc>& ports, Descs given, bool output) {
  for (const TensorDesc& port : ports) {
    const auto error = [&](std::string_view why) {
      return InvalidArguments(output ? "output" : "input", " tensor ", port.id, " ", why);
    };
    const auto found = Find(given, port.id);
    if (found == given.end()) return error("is not given");
    const LogicalTensor tensor = TensorOf(**found);
    if ((*found)->data_type == 0) return error("has no data type");
    if (tensor.layout == Layout::kUndef) return error("has no layout");
    if (!output && !tensor.has_shape()) {
      return error(absl::StrCat("has no known shape: ", tensor.ToString()));
    }
  }
  return absl::OkStatus();
}

// Where each port is among the tensors given, and those tensors as kvant has them.
absl::Status Place(const std::vector<TensorId>& ports, Descs given, std::vector<size_t>* places,
                   std::vector<LogicalTensor>* tensors) {
  for (const TensorId id : ports) {
    const auto found = Find(given, id);
    tensors->push_back(TensorOf(**found));
    places->push_back(static_cast<size_t>(found - given.begin()));
    if (tensors->back().layout != Layout::kOpaque) continue;
    return MakeError(ErrorKind::kUnimplemented, "tensor ", id, " has an opaque layout");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckGiven(const Piece& piece, Descs inputs, Descs outputs, dnnl_engine* engine) {
  EngineKind kind = 0;
  if (next::engine_get_kind(engine, &kind) != kSuccess || kind != piece.engine_kind) {
    return InvalidArguments("the engine is of another kind than the partition");
  }
  KVANT_RETURN_IF_ERROR(CheckPorts(piece.inputs, inputs, /*output=*/false));
  return CheckPorts(piece.outputs, outputs, /*output=*/true);
}

absl::StatusOr<CompileResult> Compile(const Piece& piece, Descs inputs, Descs outputs,
                                      dnnl_engine* engine) {
  // oneDNN's rule. An old one has none, and no way to permit it.
  static const bool permits = FindNext("dnnl_graph_graph_set_fpmath_mode") != nullptr;
  if (piece.compressed && permits && !piece.apply_to_int) {
    return MakeError(ErrorKind::kUnimplemented,
                     "the graph's fpmath mode does not permit floating point for integers "
                     "(apply_to_int)");
  }
  KVANT_ASSIGN_OR_RETURN(const Engine threads, ClientEngine());
  const std::string key = CompileKey(piece, threads, inputs, outputs, engine);
  if (std::shared_ptr<const Compiled> known = FindCompiled(key)) {
    return CompileResult{.compiled = std::move(known), .cached = true};
  }
  auto compiled = std::make_shared<Compiled>(threads);
  std::vector<LogicalTensor> tensors;
  KVANT_RETURN_IF_ERROR(Place(piece.taken->inputs(), inputs, &compiled->input_places, &tensors));
  KVANT_RETURN_IF_ERROR(Place(piece.taken->outputs(), outputs, &compiled->output_places, &tensors));
  KVANT_ASSIGN_OR_RETURN(
      compiled->partition,
      compiled->engine.Compile(*piece.taken, {.require_fused = true, .ports = std::move(tensors)}));
  if (compiled->partition.keeps_scratch() && compiled->partition.scratch_bytes() > 0) {
    return MakeError(ErrorKind::kUnimplemented, "the kernel needs scratch that is kept");
  }
  compiled->of = engine;
  const size_t scratch = compiled->partition.scratch_bytes();
  compiled->scratch_bytes = scratch == 0 ? 0 : scratch + kScratchAlignment - 1;
  const Partition& known = compiled->partition.partition();
  for (size_t i = 0; i < known.inputs().size(); ++i) {
    const LogicalTensor& port = known.input(static_cast<int>(i));
    compiled->input_bytes.push_back(static_cast<size_t>(port.memory_bytes()));
    compiled->tensors.push_back(DescOf(port));
    compiled->tensors.back().property = inputs[compiled->input_places[i]]->property;
  }
  for (size_t i = 0; i < known.outputs().size(); ++i) {
    const LogicalTensor& port = known.output(static_cast<int>(i));
    compiled->output_bytes.push_back(static_cast<size_t>(port.memory_bytes()));
    compiled->tensors.push_back(DescOf(port));
    compiled->tensors.back().property = outputs[compiled->output_places[i]]->property;
  }
  KeepCompiled(key, compiled);
  return CompileResult{.compiled = std::move(compiled)};
}

Status StatusOf(const absl::Status& status) {
  switch (ErrorKindOf(status)) {
    case ErrorKind::kInvalidGraph:
      return kInvalidGraph;
    case ErrorKind::kInvalidGraphOp:
      return kInvalidGraphOp;
    case ErrorKind::kInvalidShape:
      return kInvalidShape;
    case ErrorKind::kInvalidDataType:
    case ErrorKind::kUnimplemented:  // as oneDNN has it, for types that it does not compile
      return kUnimplemented;
    case ErrorKind::kInvalidArguments:
      return kInvalidArguments;
    default:
      return status.code() == absl::StatusCode::kResourceExhausted ? kOutOfMemory : kRuntimeError;
  }
}

}  // namespace kvant::dnnl_abi
