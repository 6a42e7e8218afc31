// That abi.h and its tables are what oneDNN's own headers say: nothing here runs.
#include <cstddef>
#include <type_traits>

#include "kvant/integrations/onednn/abi.h"
#include "oneapi/dnnl/dnnl.h"
#include "oneapi/dnnl/dnnl_graph.h"
#include "oneapi/dnnl/dnnl_graph_sycl.h"

#define CLIENT_NEW (DNNL_VERSION_MAJOR > 3 || DNNL_VERSION_MINOR >= 13)
#if CLIENT_NEW
#include "oneapi/dnnl/dnnl_graph_ocl.h"
#endif

namespace kvant::dnnl_abi {
namespace {

using Theirs = dnnl_graph_logical_tensor_t;
static_assert(sizeof(TensorDesc) == sizeof(Theirs));
static_assert(offsetof(TensorDesc, id) == offsetof(Theirs, id));
static_assert(offsetof(TensorDesc, ndims) == offsetof(Theirs, ndims));
static_assert(offsetof(TensorDesc, dims) == offsetof(Theirs, dims));
static_assert(offsetof(TensorDesc, data_type) == offsetof(Theirs, data_type));
static_assert(offsetof(TensorDesc, property) == offsetof(Theirs, property));
static_assert(offsetof(TensorDesc, layout_type) == offsetof(Theirs, layout_type));
static_assert(offsetof(TensorDesc, layout) == offsetof(Theirs, layout));
static_assert(sizeof(InplacePair) == sizeof(dnnl_graph_inplace_pair_t));
static_assert(offsetof(Version, cpu_runtime) == offsetof(dnnl_version_t, cpu_runtime));
static_assert(kMostDims == DNNL_MAX_NDIMS);

static_assert(kOutOfMemory == dnnl_out_of_memory && kInvalidArguments == dnnl_invalid_arguments &&
              kUnimplemented == dnnl_unimplemented && kRuntimeError == dnnl_runtime_error &&
              kInvalidGraph == dnnl_invalid_graph && kInvalidGraphOp == dnnl_invalid_graph_op &&
              kInvalidShape == dnnl_invalid_shape && kInvalidDataType == dnnl_invalid_data_type);
static_assert(kCpu == dnnl_cpu && kFusion == dnnl_graph_partition_policy_fusion);
static_assert(kSequential == DNNL_RUNTIME_SEQ && kOpenMp == DNNL_RUNTIME_OMP &&
              kTbb == DNNL_RUNTIME_TBB && kThreadPool == DNNL_RUNTIME_THREADPOOL &&
              kSycl == DNNL_RUNTIME_SYCL);

#if CLIENT_NEW
// An older oneDNN numbers what it has alike, and lacks some.
enum class Row {
#define KVANT_DNNL_OP(c_name, name) c_name,
#include "kvant/integrations/onednn/op_kinds.inc"
  kCount
};
#define KVANT_DNNL_OP(c_name, name) \
  static_assert(static_cast<int>(Row::c_name) == dnnl_graph_op_##c_name);
#include "kvant/integrations/onednn/op_kinds.inc"
static_assert(static_cast<int>(Row::kCount) == dnnl_graph_op_last_symbol);
#define KVANT_DNNL_ATTR(name, number) static_assert(number == dnnl_graph_op_attr_##name);
#include "kvant/integrations/onednn/attributes.inc"
#define KVANT_DNNL_TYPE(name, number) static_assert(number == dnnl_##name);
#include "kvant/integrations/onednn/data_types.inc"

// Parameters are alike if as many are passed alike: pointers, and integers of the same size.
template <typename Ours, typename Theirs>
struct Alike : std::false_type {};
template <typename... Ours, typename... Theirs>
struct Alike<Status (*)(Ours...), dnnl_status_t (*)(Theirs...)> {
  static constexpr bool All() {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
      return false;
    } else {
      return ((sizeof(Ours) == sizeof(Theirs) &&
               std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>)&&...);
    }
  }
  static constexpr bool value = All();
};
#define KVANT_DNNL_FORWARD(name, parameters, arguments) \
  static_assert(Alike<Status(*) parameters, decltype(&::dnnl_graph_##name)>::value);
#define KVANT_DNNL_OWN KVANT_DNNL_FORWARD
#define KVANT_DNNL_COMMON(name, parameters, arguments) \
  static_assert(Alike<Status(*) parameters, decltype(&::dnnl_##name)>::value);
#include "kvant/integrations/onednn/functions.inc"
#else
static_assert(dnnl_graph_op_select == 81 && dnnl_graph_op_wildcard == 78 &&
              dnnl_graph_op_attr_zps == 0x4d && dnnl_graph_op_attr_use_dst == 0x68 &&
              dnnl_graph_op_attr_weights_format == 0x87 && dnnl_u8 == 6 && dnnl_boolean == 8);
#endif

}  // namespace
}  // namespace kvant::dnnl_abi
