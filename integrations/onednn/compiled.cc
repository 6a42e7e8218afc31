// Compiled partitions: what is known of them, and executing them.
#include <algorithm>
#include <memory>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "kvant/integrations/onednn/await.h"
#include "kvant/integrations/onednn/compile.h"
#include "kvant/integrations/onednn/guard.h"
#include "kvant/integrations/onednn/handles.h"
#include "kvant/integrations/onednn/names.h"
#include "kvant/integrations/onednn/settings.h"

namespace kvant::dnnl_abi {
namespace {

using TensorList = absl::Span<const dnnl_graph_tensor* const>;
using NextTensors = absl::InlinedVector<const dnnl_graph_tensor*, 16>;

const Compiled* CompiledOf(const dnnl_graph_compiled_partition* compiled) {
  const OurCompiled* const ours = As<OurCompiled>(compiled);
  return ours == nullptr ? nullptr : ours->compiled.get();
}

TensorDesc NoDesc() {
  TensorDesc desc = {};
  desc.id = kNoId;
  desc.ndims = -1;
  desc.layout_type = static_cast<LayoutNumber>(Layout::kAny);
  return desc;
}

TensorDesc BytesDesc(size_t bytes) {
  LogicalTensor tensor;
  tensor.id = kNoId;
  tensor.type = DataType::kU8;
  tensor.dims = Dims{static_cast<int64_t>(bytes)};
  return DescOf(tensor);
}

// oneDNN's handles of tensors that may be ours.
NextTensors NextOfAll(TensorList tensors) {
  NextTensors handles;
  for (const dnnl_graph_tensor* tensor : tensors) handles.push_back(NextOf<OurTensor>(tensor));
  return handles;
}

// The memory of a port, or null with `*missing` set.
void* DataAt(TensorList tensors, size_t place, bool* missing) {
  const OurTensor* const tensor = place < tensors.size() ? As<OurTensor>(tensors[place]) : nullptr;
  *missing |= tensor == nullptr;
  return tensor == nullptr ? nullptr : tensor->data;
}

// Scratch that the client brought none of, from the engine's allocator. Null where this oneDNN does
// not allocate for tensors: kvant has its own then.
Status AllocateScratch(size_t bytes, dnnl_engine* engine, NextTensor* owner, void** data) {
  const TensorDesc desc = BytesDesc(bytes);
  TensorHandle made = nullptr;
  const Status status = next::tensor_create(&made, &desc, engine, kAllocate);
  owner->reset(made);
  if (status != kSuccess) return status;
  const Status got = next::tensor_get_data_handle(made, data);
  if (*data == kAllocate) *data = nullptr;
  return got;
}

Status Execute(const Compiled& compiled, dnnl_stream* stream, TensorList inputs, TensorList outputs,
               const dnnl_graph_tensor* scratchpad) {
  dnnl_engine* engine = nullptr;
  if (next::stream_get_engine(stream, &engine) != kSuccess || engine != compiled.of) {
    return kInvalidArguments;
  }
  NextTensor owner;
  void* scratch = nullptr;
  if (compiled.scratch_bytes > 0) {
    if (const OurTensor* const given = As<OurTensor>(scratchpad); given != nullptr) {
      scratch = given->data;
    }
    if (scratch == nullptr) {
      const Status status = AllocateScratch(compiled.scratch_bytes, engine, &owner, &scratch);
      if (status != kSuccess) return status;
    }
  }
  return Guard([&]() -> Status {
    bool missing = false;
    absl::InlinedVector<ConstTensor, 16> in;
    absl::InlinedVector<Tensor, 4> out;
    for (size_t i = 0; i < compiled.input_places.size(); ++i) {
      in.emplace_back(DataAt(inputs, compiled.input_places[i], &missing), compiled.input_bytes[i]);
    }
    for (size_t i = 0; i < compiled.output_places.size(); ++i) {
      out.push_back(
          {DataAt(outputs, compiled.output_places[i], &missing), compiled.output_bytes[i]});
    }
    if (missing) return kInvalidArguments;
    size_t bytes = scratch == nullptr ? 0 : compiled.scratch_bytes;
    const size_t needed = compiled.partition.scratch_bytes();
    if (bytes > 0) std::align(kScratchAlignment, needed, scratch, bytes);
    const absl::Status done = compiled.partition.Execute(compiled.stream, in, out,
                                                         {static_cast<std::byte*>(scratch), bytes});
    if (done.ok()) return kSuccess;
    Tell([&] { return "execute," + std::string(done.message()); });
    return StatusOf(done);
  });
}

// kvant's compiled partition is executed, or with oneDNN's handles, `next`.
template <typename Next>
Status ExecuteOrNext(const dnnl_graph_compiled_partition* compiled, dnnl_stream* stream,
                     size_t in_num, const dnnl_graph_tensor** inputs, size_t out_num,
                     const dnnl_graph_tensor** outputs, const dnnl_graph_tensor* scratchpad,
                     const void* deps, void* event, const Next& next) {
  if (compiled == nullptr || stream == nullptr || inputs == nullptr || outputs == nullptr) {
    return kInvalidArguments;
  }
  const TensorList in(inputs, in_num), out(outputs, out_num);
  if (const Compiled* const ours = CompiledOf(compiled); ours != nullptr) {
    const Status ready = Await(stream, deps, event);
    return ready == kSuccess ? Execute(*ours, stream, in, out, scratchpad) : ready;
  }
  NextTensors next_in, next_out;
  const Status status = Guard([&] {
    next_in = NextOfAll(in);
    next_out = NextOfAll(out);
    const auto there = [](const dnnl_graph_tensor* tensor) { return tensor != nullptr; };
    return std::all_of(next_in.begin(), next_in.end(), there) &&
                   std::all_of(next_out.begin(), next_out.end(), there)
               ? kSuccess
               : kInvalidArguments;
  });
  if (status != kSuccess) return status;
  const OurCompiled* const ours = As<OurCompiled>(compiled);
  if (ours != nullptr && !ours->next_compiled) return kInvalidArguments;
  const dnnl_graph_compiled_partition* const handle = NextOf<OurCompiled>(compiled);
  return next(handle, next_in.data(), next_out.data(), NextOf<OurTensor>(scratchpad));
}

}  // namespace

KVANT_DNNL_EXPORT Status dnnl_graph_compiled_partition_create(CompiledHandle* compiled,
                                                              PartitionHandle partition) {
  if (compiled == nullptr || partition == nullptr) return kInvalidArguments;
  const OurPartition* const of = As<OurPartition>(partition);
  const PartitionHandle next = of == nullptr ? partition : of->piece->next.get();
  NextCompiled owner;
  if (next != nullptr) {
    CompiledHandle made = nullptr;
    const Status status = next::compiled_partition_create(&made, next);
    if (status != kSuccess) return status;
    if (of == nullptr) {
      *compiled = made;
      return kSuccess;
    }
    owner.reset(made);
  }
  return Guard([&] {
    auto ours = std::make_unique<OurCompiled>();
    ours->next = std::move(owner);
    *compiled = ours.release()->handle();
    return kSuccess;
  });
}

KVANT_DNNL_EXPORT Status dnnl_graph_compiled_partition_destroy(CompiledHandle compiled) {
  OurCompiled* const ours = As<OurCompiled>(compiled);
  if (ours == nullptr) return next::compiled_partition_destroy(compiled);
  delete ours;
  return kSuccess;
}

KVANT_DNNL_EXPORT Status dnnl_graph_compiled_partition_query_logical_tensor(
    const dnnl_graph_compiled_partition* compiled, size_t id, TensorDesc* desc) {
  const OurCompiled* const ours = As<OurCompiled>(compiled);
  if (ours == nullptr || (ours->compiled == nullptr && ours->next != nullptr)) {
    return next::compiled_partition_query_logical_tensor(NextOf<OurCompiled>(compiled), id, desc);
  }
  if (desc == nullptr) return kInvalidArguments;
  *desc = NoDesc();
  if (ours->compiled == nullptr) return kSuccess;
  for (const TensorDesc& tensor : ours->compiled->tensors) {
    if (tensor.id == id) *desc = tensor;
  }
  return kSuccess;
}

KVANT_DNNL_EXPORT Status dnnl_graph_compiled_partition_get_inplace_ports(
    const dnnl_graph_compiled_partition* compiled, size_t* num, const InplacePair** pairs) {
  if (CompiledOf(compiled) == nullptr) {
    return next::compiled_partition_get_inplace_ports(NextOf<OurCompiled>(compiled), num, pairs);
  }
  if (num == nullptr || pairs == nullptr) return kInvalidArguments;
  *num = 0;
  *pairs = nullptr;
  return kSuccess;
}

KVANT_DNNL_EXPORT Status dnnl_graph_compiled_partition_get_scratchpad_logical_tensor(
    const dnnl_graph_compiled_partition* compiled, TensorDesc* desc) {
  const Compiled* const ours = CompiledOf(compiled);
  if (ours == nullptr) {
    return next::compiled_partition_get_scratchpad_logical_tensor(NextOf<OurCompiled>(compiled),
                                                                  desc);
  }
  if (desc == nullptr) return kInvalidArguments;
  *desc = BytesDesc(ours->scratch_bytes);
  return kSuccess;
}

KVANT_DNNL_EXPORT Status dnnl_graph_compiled_partition_execute(
    const dnnl_graph_compiled_partition* compiled, dnnl_stream* stream, size_t in_num,
    const dnnl_graph_tensor** inputs, size_t out_num, const dnnl_graph_tensor** outputs) {
  return ExecuteOrNext(compiled, stream, in_num, inputs, out_num, outputs, nullptr, nullptr,
                       nullptr, [&](auto handle, auto in, auto out, auto) {
                         return next::compiled_partition_execute(handle, stream, in_num, in,
                                                                 out_num, out);
                       });
}

KVANT_DNNL_EXPORT Status dnnl_graph_compiled_partition_execute_v2(
    const dnnl_graph_compiled_partition* compiled, dnnl_stream* stream, size_t in_num,
    const dnnl_graph_tensor** inputs, size_t out_num, const dnnl_graph_tensor** outputs,
    const dnnl_graph_tensor* scratchpad) {
  return ExecuteOrNext(compiled, stream, in_num, inputs, out_num, outputs, scratchpad, nullptr,
                       nullptr, [&](auto handle, auto in, auto out, auto scratch) {
                         return next::compiled_partition_execute_v2(handle, stream, in_num, in,
                                                                    out_num, out, scratch);
                       });
}

KVANT_DNNL_EXPORT Status dnnl_graph_sycl_interop_compiled_partition_execute(
    const dnnl_graph_compiled_partition* compiled, dnnl_stream* stream, size_t in_num,
    const dnnl_graph_tensor** inputs, size_t out_num, const dnnl_graph_tensor** outputs,
    const void* deps, void* event) {
  return ExecuteOrNext(compiled, stream, in_num, inputs, out_num, outputs, nullptr, deps, event,
                       [&](auto handle, auto in, auto out, auto) {
                         return next::sycl_interop_compiled_partition_execute(
                             handle, stream, in_num, in, out_num, out, deps, event);
                       });
}

KVANT_DNNL_EXPORT Status dnnl_graph_sycl_interop_compiled_partition_execute_v2(
    const dnnl_graph_compiled_partition* compiled, dnnl_stream* stream, size_t in_num,
    const dnnl_graph_tensor** inputs, size_t out_num, const dnnl_graph_tensor** outputs,
    const dnnl_graph_tensor* scratchpad, const void* deps, void* event) {
  return ExecuteOrNext(compiled, stream, in_num, inputs, out_num, outputs, scratchpad, deps, event,
                       [&](auto handle, auto in, auto out, auto scratch) {
                         return next::sycl_interop_compiled_partition_execute_v2(
                             handle, stream, in_num, in, out_num, out, scratch, deps, event);
                       });
}

// OpenCL is for GPUs, which kvant leaves to oneDNN.
KVANT_DNNL_EXPORT Status dnnl_graph_ocl_interop_compiled_partition_execute(
    const dnnl_graph_compiled_partition* compiled, dnnl_stream* stream, size_t in_num,
    const dnnl_graph_tensor** inputs, size_t out_num, const dnnl_graph_tensor** outputs,
    void* const* deps, int ndeps, void** event) {
  if (CompiledOf(compiled) != nullptr) return kInvalidArguments;
  return ExecuteOrNext(compiled, stream, in_num, inputs, out_num, outputs, nullptr, nullptr,
                       nullptr, [&](auto handle, auto in, auto out, auto) {
                         return next::ocl_interop_compiled_partition_execute(
                             handle, stream, in_num, in, out_num, out, deps, ndeps, event);
                       });
}

KVANT_DNNL_EXPORT Status dnnl_graph_ocl_interop_compiled_partition_execute_v2(
    const dnnl_graph_compiled_partition* compiled, dnnl_stream* stream, size_t in_num,
    const dnnl_graph_tensor** inputs, size_t out_num, const dnnl_graph_tensor** outputs,
    const dnnl_graph_tensor* scratchpad, void* const* deps, int ndeps, void** event) {
  if (CompiledOf(compiled) != nullptr) return kInvalidArguments;
  return ExecuteOrNext(compiled, stream, in_num, inputs, out_num, outputs, scratchpad, nullptr,
                       nullptr, [&](auto handle, auto in, auto out, auto scratch) {
                         return next::ocl_interop_compiled_partition_execute_v2(
                             handle, stream, in_num, in, out_num, out, scratch, deps, ndeps, event);
                       });
}

}  // namespace kvant::dnnl_abi
