// Between oneDNN's numbers and kvant's enumerators.
#ifndef KVANT_INTEGRATIONS_ONEDNN_NAMES_H_
#define KVANT_INTEGRATIONS_ONEDNN_NAMES_H_

#include <optional>
#include <string_view>

#include "absl/status/statusor.h"
#include "kvant/graph/data_type.h"
#include "kvant/graph/logical_tensor.h"
#include "kvant/graph/op.h"
#include "kvant/integrations/onednn/abi.h"

namespace kvant::dnnl_abi {

// "MatMul"; empty for a number that is none's.
std::string_view NameOfKind(KindNumber kind);

// From oneDNN to kvant: nothing, or kUndef, for what kvant lacks.
std::optional<OpKind> KindOf(KindNumber kind);
std::optional<Attr> AttrOf(AttrNumber attr);
DataType TypeOf(TypeNumber type);

// From kvant to oneDNN: kUnimplemented, with the name, for what oneDNN lacks.
absl::StatusOr<KindNumber> NumberOf(OpKind kind);
absl::StatusOr<AttrNumber> NumberOf(Attr attr);
absl::StatusOr<TypeNumber> NumberOf(DataType type);

// What attributes of that number are: the index of an alternative of AttrValue.
size_t AttrTypeOf(AttrNumber attr);

LogicalTensor TensorOf(const TensorDesc& desc);
// Strided, by a type that oneDNN has.
TensorDesc DescOf(const LogicalTensor& tensor);

}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_NAMES_H_
