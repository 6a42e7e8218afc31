// Between ports and arrays. f32 goes through oneDNN's reorder; other types are decoded in plain
// code, so that a CPU without f16, bf16 or f8 runs them too.
#include <cstring>
#include <utility>
#include <vector>

#include "kvant/backends/reference/onednn.h"
#include "kvant/backends/reference/pieces.h"
#include "kvant/backends/reference/rows.h"

namespace kvant::reference {
namespace {

Storage TensorStorage(const LogicalTensor& tensor) { return StorageOf(tensor.type); }

// In memory exactly as in an array.
bool Direct(const LogicalTensor& tensor) {
  if (tensor.type != kF32 && tensor.type != kS32 && tensor.type != kS64) return false;
  const Dims strides = tensor.StridesOrDense();
  const Dims dense = DenseStrides(*tensor.dims);
  for (size_t axis = 0; axis < strides.size(); ++axis) {
    if ((*tensor.dims)[axis] != 1 && strides[axis] != dense[axis]) return false;
  }
  return true;
}

// Operand 0 is the array, operand 1 the port.
Walk PortWalk(const LogicalTensor& tensor) {
  return Walk(*tensor.dims, {DenseStrides(*tensor.dims), tensor.StridesOrDense()});
}

void DecodeRow(DataType type, const void* port, const Row& row, float* out) {
  const int64_t step = row.stride[1];
  const auto fill = [&](auto&& element) {
    for (int64_t i = 0; i < row.count; ++i) {
      out[row.offset[0] + i * row.stride[0]] = element(row.offset[1] + i * step);
    }
  };
  const auto* halves = static_cast<const uint16_t*>(port);
  if (type == kF16) {
    fill([&](int64_t i) { return F16ToF32(halves[i]); });
  } else if (type == kBF16) {
    fill([&](int64_t i) { return BF16ToF32(halves[i]); });
  } else {
    fill([&](int64_t i) { return static_cast<float>(LoadElement(type, port, i)); });
  }
}

template <typename T>
void DecodeIntegers(DataType type, const void* port, const Row& row, T* out) {
  for (int64_t i = 0; i < row.count; ++i) {
    const int64_t from = row.offset[1] + i * row.stride[1];
    T& to = out[row.offset[0] + i * row.stride[0]];
    if constexpr (sizeof(T) == 8) {  // beyond what f64 holds exactly
      std::memcpy(&to, static_cast<const std::byte*>(port) + from * 8, 8);
    } else {
      to = static_cast<T>(LoadElement(type, port, from));
    }
  }
}

// oneDNN's reorder between a strided f32 port and an array, or an empty primitive where it has
// none for these strides.
struct PortReorder {
  dnnl::memory::desc port, array;
  dnnl::reorder primitive;
  bool present = false;
};

PortReorder MakePortReorder(const LogicalTensor& tensor, bool load) {
  PortReorder result;
  if (tensor.type != kF32 || tensor.elements() == 0) return result;
  const Walk walk = PortWalk(tensor);
  result.port = StridedDesc(walk.dims(), walk.strides(1));
  if (result.port.is_zero()) return result;
  result.array = DenseDesc(walk.dims());
  const auto& from = load ? result.port : result.array;
  const auto& to = load ? result.array : result.port;
  const dnnl::reorder::primitive_desc description(CpuEngine(), from, CpuEngine(), to,
                                                  UserScratchpad(), /*allow_empty=*/true);
  if (!description.get(/*allow_empty=*/true)) return result;
  // A scratchpad would need a place in the plan; plain strides never ask for one.
  if (description.scratchpad_desc().get_size() > 0) return result;
  result.primitive = dnnl::reorder(description);
  result.present = true;
  return result;
}

void LoadPlain(const RunContext& context, const Walk& walk, DataType type, const void* port,
               const Array& array) {
  walk.ForEachRow(context.executor, [&](const Row& row) {
    switch (array.storage) {
      case Storage::kF32:
        return DecodeRow(type, port, row, context.data<float>(array));
      case Storage::kS32:
        return DecodeIntegers(type, port, row, context.data<int32_t>(array));
      case Storage::kS64:
        return DecodeIntegers(type, port, row, context.data<int64_t>(array));
    }
  });
}

void StoreRow(const RunContext& context, const Row& row, DataType type, const Array& array,
              void* port) {
  for (int64_t i = 0; i < row.count; ++i) {
    const int64_t from = row.offset[0] + i * row.stride[0];
    const int64_t to = row.offset[1] + i * row.stride[1];
    switch (array.storage) {
      case Storage::kF32:
        StoreElement(type, port, to, context.data<float>(array)[from]);
        break;
      case Storage::kS32:
        StoreElement(type, port, to, context.data<int32_t>(array)[from]);
        break;
      case Storage::kS64:
        std::memcpy(static_cast<std::byte*>(port) + to * 8, context.data<int64_t>(array) + from, 8);
        break;
    }
  }
}

void StorePlain(const RunContext& context, const Walk& walk, DataType type, const Array& array,
                void* port) {
  const auto store = [&](const Row& row) { StoreRow(context, row, type, array, port); };
  if (BitsOf(type) >= 8) {
    walk.ForEachRow(context.executor, store);
  } else {  // neighbours share a byte
    walk.ForEachRow(*MakeSerialExecutor(), store);
  }
}

}  // namespace

Array LoadPort(Plan& plan, int port, const LogicalTensor& tensor) {
  const Storage storage = TensorStorage(tensor);
  if (Direct(tensor)) return plan.PortArray(port, *tensor.dims, storage);
  Array array = plan.NewArray(*tensor.dims, storage);
  plan.AddStep({}, {array},
               [=, type = tensor.type, walk = PortWalk(tensor),
                reorder = MakePortReorder(tensor, /*load=*/true)](const RunContext& context) {
                 const void* data = context.inputs[port];
                 if (!reorder.present) {
                   return LoadPlain(context, walk, type, data, array);
                 }
                 dnnl::memory from(reorder.port, CpuEngine(), const_cast<void*>(data));
                 dnnl::memory to(reorder.array, CpuEngine(), context.data<void>(array));
                 dnnl::reorder(reorder.primitive).execute(context.stream, from, to);
                 context.stream.wait();
               });
  return array;
}

Array LoadConstant(Plan& plan, const Constant& value) {
  Array array = plan.NewArray({}, StorageOf(value.type()));
  plan.AddStep({}, {array}, [=](const RunContext& context) {
    switch (array.storage) {
      case Storage::kF32:
        *context.data<float>(array) = static_cast<float>(value.value());
        break;
      case Storage::kS32:
        *context.data<int32_t>(array) = static_cast<int32_t>(value.integer());
        break;
      case Storage::kS64:
        *context.data<int64_t>(array) = value.integer();
        break;
    }
  });
  return array;
}

void StorePort(Plan& plan, int port, const LogicalTensor& tensor, const Array& array) {
  plan.AddStep({array}, {},
               [=, type = tensor.type, walk = PortWalk(tensor),
                reorder = MakePortReorder(tensor, /*load=*/false)](const RunContext& context) {
                 void* data = context.outputs[port];
                 if (!reorder.present) {
                   return StorePlain(context, walk, type, array, data);
                 }
                 dnnl::memory from(reorder.array, CpuEngine(), context.data<void>(array));
                 dnnl::memory to(reorder.port, CpuEngine(), data);
                 dnnl::reorder(reorder.primitive).execute(context.stream, from, to);
                 context.stream.wait();
               });
}

void StoreRows(Plan& plan, int port, const LogicalTensor& tensor, const Array& array,
               const Array& offsets) {
  const Dims strides = tensor.StridesOrDense();
  plan.AddStep({array, offsets}, {}, [=](const RunContext& context) {
    const int32_t rows = context.data<int32_t>(offsets)[offsets.elements() - 1];
    const int64_t of_row = array.elements() / std::max<int64_t>(1, array.dims[0]);
    for (int64_t i = 0; i < rows * of_row; ++i) {
      int64_t rest = i, index = 0;
      for (size_t d = strides.size(); d-- > 0; rest /= array.dims[d]) {
        index += rest % array.dims[d] * strides[d];
      }
      StoreElement(tensor.type, context.outputs[port], index, context.data(array)[i]);
    }
  });
}

}  // namespace kvant::reference
