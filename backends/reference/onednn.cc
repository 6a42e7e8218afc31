#include "kvant/backends/reference/onednn.h"

#include <unordered_map>
#include <utility>

namespace kvant::reference {
namespace {

dnnl::memory::dims DnnlDims(absl::Span<const int64_t> dims) {
  if (dims.empty()) return {1};
  return dnnl::memory::dims(dims.begin(), dims.end());
}

dnnl::memory::data_type DnnlType(Storage storage) {
  return storage == Storage::kF32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::s32;
}

}  // namespace

const dnnl::engine& CpuEngine() {
  // Never destroyed: compiled partitions may outlive static destruction.
  static const dnnl::engine* const engine = new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *engine;
}

dnnl::memory::desc DenseDesc(absl::Span<const int64_t> dims, Storage storage) {
  return dnnl::memory::desc(DnnlDims(dims), DnnlType(storage), DnnlDims(DenseStrides(dims)));
}

dnnl::memory::desc StridedDesc(absl::Span<const int64_t> dims, absl::Span<const int64_t> strides,
                               Storage storage) {
  for (int64_t stride : strides) {
    if (stride <= 0) return dnnl::memory::desc();
  }
  dnnl::memory::desc desc(DnnlDims(dims), DnnlType(storage), DnnlDims(strides),
                          /*allow_empty=*/true);
  return desc.get(/*allow_empty=*/true) ? desc : dnnl::memory::desc();
}

dnnl::primitive_attr UserScratchpad() {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attr;
}

void AddPrimitive(Plan& plan, const dnnl::primitive& primitive,
                  const dnnl::memory::desc& scratchpad, std::vector<PrimitiveArg> reads,
                  PrimitiveArg write, int overwrites) {
  std::vector<Array> arrays, writes{write.array};
  for (const PrimitiveArg& read : reads) arrays.push_back(read.array);
  std::vector<PrimitiveArg> args = std::move(reads);
  args.push_back(std::move(write));
  if (const size_t scratch_bytes = scratchpad.get_size(); scratch_bytes > 0) {
    writes.push_back(plan.NewArray({static_cast<int64_t>((scratch_bytes + 3) / 4)}));
    args.push_back({DNNL_ARG_SCRATCHPAD, writes.back(), scratchpad});
  }
  plan.AddStep(
      arrays, writes,
      [primitive, args = std::move(args)](const RunContext& context) {
        std::unordered_map<int, dnnl::memory> memories;
        for (const PrimitiveArg& arg : args) {
          memories.emplace(arg.name,
                           dnnl::memory(arg.desc, CpuEngine(), context.data<void>(arg.array)));
        }
        primitive.execute(context.stream, memories);
        context.stream.wait();
      },
      overwrites);
}

}  // namespace kvant::reference
