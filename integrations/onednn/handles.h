// What the ABI's handles stand for. Clients get ours; oneDNN calls itself through this library,
// with handles of its own, so that each function takes either.
#ifndef KVANT_INTEGRATIONS_ONEDNN_HANDLES_H_
#define KVANT_INTEGRATIONS_ONEDNN_HANDLES_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "kvant/backends/compiled_partition.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/op.h"
#include "kvant/integrations/onednn/abi.h"
#include "kvant/integrations/onednn/next.h"
#include "kvant/patterns/partition.h"

namespace kvant::dnnl_abi {

// The first word of what is ours. oneDNN's objects begin with a pointer or a small number, and on
// x86-64 and AArch64 no pointer looks like this.
inline constexpr uint64_t kOursMark = 0x746e61766b5fabcd;

template <typename T, typename Handle>
struct Ours {
  std::atomic<uint64_t> mark = kOursMark;

  Ours() = default;
  Ours(const Ours&) = delete;
  Ours& operator=(const Ours&) = delete;
  ~Ours() { mark = 0; }

  Handle handle() { return reinterpret_cast<Handle>(static_cast<T*>(this)); }
};

// Of a handle that is ours, what it stands for; null for oneDNN's, and for null.
template <typename T, typename Handle>
T* As(Handle* handle) {
  if (handle == nullptr || *reinterpret_cast<const uint64_t*>(handle) != kOursMark) return nullptr;
  return reinterpret_cast<T*>(const_cast<std::remove_const_t<Handle>*>(handle));
}

// oneDNN's object, destroyed with this.
template <typename Handle, Status (*destroy)(Handle)>
struct DestroyNext {
  void operator()(std::remove_pointer_t<Handle>* handle) const { destroy(handle); }
};
template <typename Handle, Status (*destroy)(Handle)>
using NextOwner = std::unique_ptr<std::remove_pointer_t<Handle>, DestroyNext<Handle, destroy>>;
using NextOp = NextOwner<OpHandle, &next::op_destroy>;
using NextGraph = NextOwner<GraphHandle, &next::graph_destroy>;
using NextPartition = NextOwner<PartitionHandle, &next::partition_destroy>;
using NextCompiled = NextOwner<CompiledHandle, &next::compiled_partition_destroy>;
using NextTensor = NextOwner<TensorHandle, &next::tensor_destroy>;

// What a client said of an op.
struct OpRecord {
  size_t id = 0;
  KindNumber kind = 0;
  std::string name;
  std::vector<TensorDesc> inputs, outputs;
  std::vector<std::pair<AttrNumber, AttrValue>> attrs;  // the last of a number counts
};

struct OurOp : Ours<OurOp, OpHandle> {
  NextOp next;
  OpRecord record;
};

// What a partition handle stands for; the handles of several get_partitions share it.
struct Piece {
  size_t id = 0;
  EngineKind engine_kind = kCpu;
  bool supported = false;
  std::vector<size_t> ops;
  std::vector<TensorDesc> inputs, outputs;
  // oneDNN's. Null where kvant took together what oneDNN does not.
  NextPartition next;
  // kvant's, where it took it.
  std::optional<Partition> taken;
  std::string content;      // its ops, attributes and tensors, where kvant took it
  bool compressed = false;  // there is a DynamicDequantize in it
  bool apply_to_int = false;

  // Whether oneDNN runs it as one.
  bool next_runs() const { return next != nullptr && supported; }
};

struct OurGraph : Ours<OurGraph, GraphHandle> {
  NextGraph next;
  EngineKind engine_kind = kCpu;
  FpMathMode fpmath = 0;
  bool apply_to_int = false;
  std::vector<OpRecord> ops;
  absl::flat_hash_set<size_t> op_ids;
  std::vector<std::shared_ptr<const Piece>> pieces;  // of the last filter
};

struct OurPartition : Ours<OurPartition, PartitionHandle> {
  std::shared_ptr<const Piece> piece;
};

struct OurTensor : Ours<OurTensor, TensorHandle> {
  NextTensor next;
  void* data = nullptr;  // where oneDNN's has it; of a host scalar, `scalar`
  uint64_t scalar = 0;
};

// What kvant made of a partition for these tensors.
struct Compiled {
  explicit Compiled(const Engine& on) : engine(on), stream(on) {}

  Engine engine;
  Stream stream;
  CompiledPartition partition;
  dnnl_engine* of = nullptr;  // oneDNN's
  // By port of the partition, its place among the tensors that are given to an execution.
  std::vector<size_t> input_places, output_places;
  std::vector<size_t> input_bytes, output_bytes;
  std::vector<TensorDesc> tensors;  // that can be queried
  size_t scratch_bytes = 0;         // with what it takes to align them, wherever they lie
};

struct OurCompiled : Ours<OurCompiled, CompiledHandle> {
  NextCompiled next;                         // null where the piece has no `next`
  std::shared_ptr<const Compiled> compiled;  // null: oneDNN's runs, if next_compiled
  bool next_compiled = false;
};

// oneDNN's handle.
template <typename T, typename Handle>
Handle* NextOf(Handle* handle) {
  T* const ours = As<T>(handle);
  return ours == nullptr ? handle : ours->next.get();
}

}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_HANDLES_H_
