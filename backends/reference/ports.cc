// Between ports and arrays. What memory has as arrays have it is moved; other types are decoded by
// portable kernels, so that a CPU without f16, bf16 or f8 runs them too.
#include <cstring>

#include "kvant/backends/reference/pieces.h"
#include "kvant/backends/reference/rows.h"
#include "kvant/kernels/cpu/lines.h"

namespace kvant::reference {
namespace {

// The elements in memory are as in an array.
bool IsStored(DataType type) { return type == kF32 || type == kS32 || type == kS64; }

}  // namespace

Array LoadPort(Plan& plan, int port, const LogicalTensor& tensor) {
  const Dims dims = *tensor.dims, strides = tensor.StridesOrDense();
  const Walk walk(dims, {DenseStrides(dims), strides});
  const DataType type = tensor.type;
  if (IsStored(type)) {
    const Array there = plan.PortArray(port, dims, StorageOf(type));
    return walk.strides(0) == walk.strides(1) ? there : Gather(plan, there, dims, strides);
  }
  Array array = plan.NewArray(dims);
  plan.AddStep({}, {array}, [=](const RunContext& context) {
    walk.ForEachRow(context.executor, [&](const Row& row) {
      // The elements of the array, which is dense, are side by side.
      cpu::LoadLine(*cpu::KernelsAt(0), type, context.inputs[port], row.offset[1], row.stride[1],
                    row.count, context.data(array) + row.offset[0]);
    });
  });
  return array;
}

Array LoadConstant(Plan& plan, const Constant& value) {
  Array array = plan.NewArray({}, StorageOf(value.type()));
  plan.AddStep({}, {array}, [=](const RunContext& context) {
    if (array.storage == Storage::kF32) {
      *context.data(array) = static_cast<float>(value.value());
    } else {
      std::memcpy(context.data<void>(array), value.data(), BytesOf(array.storage));
    }
  });
  return array;
}

void StorePort(Plan& plan, int port, const LogicalTensor& tensor, const Array& array,
               const Array& offsets) {
  plan.AddStep(
      {array, offsets}, {},
      [=, type = tensor.type, strides = tensor.StridesOrDense()](const RunContext& context) {
        Dims dims = array.dims;
        if (offsets) dims[0] = context.data<int32_t>(offsets)[offsets.elements() - 1];
        const void* from = context.data<void>(array);
        void* const to = context.outputs[port];
        const auto store = [&](const Row& row) {
          if (IsStored(type)) return CopyRow(row, BytesOf(array.storage), to, from);
          for (int64_t i = 0; i < row.count; ++i) {
            StoreElement(type, to, row.offset[0] + i * row.stride[0],
                         context.data(array)[row.offset[1] + i * row.stride[1]]);
          }
        };
        const Walk walk(dims, {strides, DenseStrides(array.dims)});
        if (BitsOf(type) >= 8) {
          walk.ForEachRow(context.executor, store);
        } else {  // neighbours share a byte
          walk.ForEachRow(*MakeSerialExecutor(), store);
        }
      });
}

}  // namespace kvant::reference
