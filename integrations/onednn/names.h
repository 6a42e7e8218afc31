// Between oneDNN's numbers and kvant's enumerators.
#ifndef KVANT_INTEGRATIONS_ONEDNN_NAMES_H_
#define KVANT_INTEGRATIONS_ONEDNN_NAMES_H_

#include <optional>
#include <string_view>

#include "kvant/graph/data_type.h"
#include "kvant/graph/logical_tensor.h"
#include "kvant/graph/op.h"
#include "kvant/integrations/onednn/abi.h"

namespace kvant::dnnl_abi {

// "MatMul"; "kind 99" has no name: empty.
std::string_view NameOfKind(KindNumber kind);
// Of a name that is in the table.
KindNumber NumberOfKind(std::string_view name);
// Nothing for what kvant lacks.
std::optional<OpKind> KindOf(KindNumber kind);
std::optional<Attr> AttrOf(AttrNumber attr);
// kUndef for what kvant lacks.
DataType TypeOf(TypeNumber type);
TypeNumber NumberOf(DataType type);

// What attributes of that number are: the index of an alternative of AttrValue.
size_t AttrTypeOf(AttrNumber attr);

LogicalTensor TensorOf(const TensorDesc& desc);
// Strided; `tensor` has a shape.
TensorDesc DescOf(const LogicalTensor& tensor);

}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_NAMES_H_
