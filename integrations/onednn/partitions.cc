// Partitions, and what is compiled of them.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvant/integrations/onednn/compile.h"
#include "kvant/integrations/onednn/filter.h"
#include "kvant/integrations/onednn/guard.h"
#include "kvant/integrations/onednn/handles.h"
#include "kvant/integrations/onednn/settings.h"

namespace kvant::dnnl_abi {
namespace {

const Piece* PieceOf(const dnnl_graph_partition* partition) {
  const OurPartition* const ours = As<OurPartition>(partition);
  return ours == nullptr ? nullptr : ours->piece.get();
}

template <typename T>
Status CopyAll(const std::vector<T>& from, size_t num, T* to) {
  if (to == nullptr || num != from.size()) return kInvalidArguments;
  std::copy(from.begin(), from.end(), to);
  return kSuccess;
}

template <typename T>
Status Give(T value, T* to) {
  if (to == nullptr) return kInvalidArguments;
  *to = value;
  return kSuccess;
}

// Without null in it, which oneDNN would read through.
bool AllThere(const TensorDesc** descs, size_t num) {
  return num == 0 || (descs != nullptr &&
                      std::all_of(descs, descs + num, [](const auto* desc) { return desc; }));
}

}  // namespace

KVANT_DNNL_EXPORT Status dnnl_graph_partition_create_with_op(PartitionHandle* partition,
                                                             const dnnl_graph_op* op,
                                                             EngineKind kind) {
  if (partition == nullptr) return kInvalidArguments;
  PartitionHandle made = nullptr;
  const Status status = next::partition_create_with_op(&made, NextOf<OurOp>(op), kind);
  NextPartition owner(made);
  if (status != kSuccess) return status;
  return Guard([&]() -> Status {
    auto piece = std::make_shared<Piece>();
    if (const Status read = ReadPiece(std::move(owner), piece.get()); read != kSuccess) return read;
    auto ours = std::make_unique<OurPartition>();
    ours->piece = std::move(piece);
    *partition = ours.release()->handle();
    return kSuccess;
  });
}

KVANT_DNNL_EXPORT Status dnnl_graph_partition_destroy(PartitionHandle partition) {
  OurPartition* const ours = As<OurPartition>(partition);
  if (ours == nullptr) return next::partition_destroy(partition);
  delete ours;
  return kSuccess;
}

KVANT_DNNL_EXPORT Status dnnl_graph_partition_get_op_num(const dnnl_graph_partition* partition,
                                                         size_t* num) {
  const Piece* const piece = PieceOf(partition);
  if (piece == nullptr) return next::partition_get_op_num(partition, num);
  return Give(piece->ops.size(), num);
}

KVANT_DNNL_EXPORT Status dnnl_graph_partition_get_ops(PartitionHandle partition, size_t num,
                                                      size_t* ids) {
  const Piece* const piece = PieceOf(partition);
  if (piece == nullptr) return next::partition_get_ops(partition, num, ids);
  return CopyAll(piece->ops, num, ids);
}

KVANT_DNNL_EXPORT Status dnnl_graph_partition_get_id(const dnnl_graph_partition* partition,
                                                     size_t* id) {
  const Piece* const piece = PieceOf(partition);
  if (piece == nullptr) return next::partition_get_id(partition, id);
  return Give(piece->id, id);
}

KVANT_DNNL_EXPORT Status
dnnl_graph_partition_get_input_ports_num(const dnnl_graph_partition* partition, size_t* num) {
  const Piece* const piece = PieceOf(partition);
  if (piece == nullptr) return next::partition_get_input_ports_num(partition, num);
  return Give(piece->inputs.size(), num);
}

KVANT_DNNL_EXPORT Status dnnl_graph_partition_get_input_ports(const dnnl_graph_partition* partition,
                                                              size_t num, TensorDesc* ports) {
  const Piece* const piece = PieceOf(partition);
  if (piece == nullptr) return next::partition_get_input_ports(partition, num, ports);
  return CopyAll(piece->inputs, num, ports);
}

KVANT_DNNL_EXPORT Status
dnnl_graph_partition_get_output_ports_num(const dnnl_graph_partition* partition, size_t* num) {
  const Piece* const piece = PieceOf(partition);
  if (piece == nullptr) return next::partition_get_output_ports_num(partition, num);
  return Give(piece->outputs.size(), num);
}

KVANT_DNNL_EXPORT Status dnnl_graph_partition_get_output_ports(
    const dnnl_graph_partition* partition, size_t num, TensorDesc* ports) {
  const Piece* const piece = PieceOf(partition);
  if (piece == nullptr) return next::partition_get_output_ports(partition, num, ports);
  return CopyAll(piece->outputs, num, ports);
}

KVANT_DNNL_EXPORT Status dnnl_graph_partition_is_supported(const dnnl_graph_partition* partition,
                                                           uint8_t* supported) {
  const Piece* const piece = PieceOf(partition);
  if (piece == nullptr) return next::partition_is_supported(partition, supported);
  return Give(static_cast<uint8_t>(piece->supported), supported);
}

KVANT_DNNL_EXPORT Status dnnl_graph_partition_get_engine_kind(const dnnl_graph_partition* partition,
                                                              EngineKind* kind) {
  const Piece* const piece = PieceOf(partition);
  if (piece == nullptr) return next::partition_get_engine_kind(partition, kind);
  return Give(piece->engine_kind, kind);
}

KVANT_DNNL_EXPORT Status dnnl_graph_partition_compile(PartitionHandle partition,
                                                      CompiledHandle compiled, size_t in_num,
                                                      const TensorDesc** inputs, size_t out_num,
                                                      const TensorDesc** outputs,
                                                      dnnl_engine* engine) {
  const Piece* const piece = PieceOf(partition);
  OurCompiled* const ours = As<OurCompiled>(compiled);
  if (piece == nullptr || ours == nullptr) {
    return next::partition_compile(partition, NextOf<OurCompiled>(compiled), in_num, inputs,
                                   out_num, outputs, engine);
  }
  if (engine == nullptr || !piece->supported) return kInvalidArguments;
  if (!AllThere(inputs, in_num) || !AllThere(outputs, out_num)) return kInvalidArguments;
  // What fails leaves the handle as it was.
  std::shared_ptr<const Compiled> compiled_here;
  Status declined = kUnimplemented;
  const Status done = Guard([&]() -> Status {
    if (!piece->taken) return kSuccess;
    const auto tell = [&](const char* who, absl::string_view what) {
      Tell([&] { return absl::StrCat("compile,", piece->id, ",", who, ",", what); });
    };
    const absl::Span<const TensorDesc*const> in(inputs, in_num), out(outputs, out_num);
    if (const absl::Status given = CheckGiven(*piece, in, out, engine); !given.ok()) {
      tell("nobody", given.message());
      return StatusOf(given);
    }
    auto made = Compile(*piece, in, out, engine);
    if (made.ok()) {
      compiled_here = std::move(made->compiled);
      tell(made->cached ? "kvant,cache_hit" : "kvant,cache_miss",
           compiled_here->partition.ToString());
    } else {
      declined = StatusOf(made.status());
      tell(piece->next_runs() ? "oneDNN" : "nobody", made.status().message());
    }
    return kSuccess;
  });
  if (done != kSuccess) return done;
  if (compiled_here != nullptr) {
    ours->compiled = std::move(compiled_here);
    return kSuccess;
  }
  if (!piece->next_runs()) return declined;
  const Status status = next::partition_compile(piece->next.get(), ours->next.get(), in_num, inputs,
                                                out_num, outputs, engine);
  if (status != kSuccess) return status;
  ours->compiled.reset();
  ours->next_compiled = true;
  return kSuccess;
}

}  // namespace kvant::dnnl_abi
