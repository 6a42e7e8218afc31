// Ops: oneDNN's, with a record of what was said of them, which oneDNN does not tell again.
#include <algorithm>
#include <variant>

#include "kvant/integrations/onednn/guard.h"
#include "kvant/integrations/onednn/handles.h"
#include "kvant/integrations/onednn/names.h"

namespace kvant::dnnl_abi {
namespace {

// Of an op that is ours, once oneDNN has taken it.
template <typename F>
Status Record(OpHandle op, Status taken, const F& note) {
  OurOp* const ours = As<OurOp>(op);
  if (ours == nullptr || taken != kSuccess) return taken;
  return Guard([&] {
    note(ours->record);
    return kSuccess;
  });
}

void SetAttr(OpRecord& record, AttrNumber attr, AttrValue value) {
  record.attrs.emplace_back(attr, std::move(value));
}

bool IsVector(AttrNumber attr) {
  const size_t type = AttrTypeOf(attr);
  return type == AttrValue(std::vector<int64_t>()).index() ||
         type == AttrValue(std::vector<float>()).index();
}

template <typename T>
Status RecordNumbers(OpHandle op, Status taken, AttrNumber attr, const T* value, size_t length) {
  return Record(op, taken, [&](OpRecord& record) {
    if (IsVector(attr)) {
      SetAttr(record, attr, std::vector<T>(value, value + length));
    } else {
      SetAttr(record, attr, *value);
    }
  });
}

}  // namespace

KVANT_DNNL_EXPORT Status dnnl_graph_op_create(OpHandle* op, size_t id, KindNumber kind,
                                              const char* name) {
  if (op == nullptr) return kInvalidArguments;
  OpHandle made = nullptr;
  const Status status = next::op_create(&made, id, kind, name);
  if (status != kSuccess) return status;
  NextOp owner(made);
  return Guard([&] {
    auto ours = std::make_unique<OurOp>();
    ours->next = std::move(owner);
    ours->record.id = id;
    ours->record.kind = kind;
    if (name != nullptr) ours->record.name = name;
    *op = ours.release()->handle();
    return kSuccess;
  });
}

KVANT_DNNL_EXPORT Status dnnl_graph_op_destroy(OpHandle op) {
  OurOp* const ours = As<OurOp>(op);
  if (ours == nullptr) return next::op_destroy(op);
  delete ours;
  return kSuccess;
}

KVANT_DNNL_EXPORT Status dnnl_graph_op_add_input(OpHandle op, const TensorDesc* input) {
  return Record(op, next::op_add_input(NextOf<OurOp>(op), input),
                [&](OpRecord& record) { record.inputs.push_back(*input); });
}

KVANT_DNNL_EXPORT Status dnnl_graph_op_add_output(OpHandle op, const TensorDesc* output) {
  return Record(op, next::op_add_output(NextOf<OurOp>(op), output),
                [&](OpRecord& record) { record.outputs.push_back(*output); });
}

KVANT_DNNL_EXPORT Status dnnl_graph_op_set_attr_f32(OpHandle op, AttrNumber attr,
                                                    const float* value, size_t length) {
  return RecordNumbers(op, next::op_set_attr_f32(NextOf<OurOp>(op), attr, value, length), attr,
                       value, length);
}

KVANT_DNNL_EXPORT Status dnnl_graph_op_set_attr_s64(OpHandle op, AttrNumber attr,
                                                    const int64_t* value, size_t length) {
  return RecordNumbers(op, next::op_set_attr_s64(NextOf<OurOp>(op), attr, value, length), attr,
                       value, length);
}

KVANT_DNNL_EXPORT Status dnnl_graph_op_set_attr_bool(OpHandle op, AttrNumber attr,
                                                     const uint8_t* value, size_t length) {
  return Record(op, next::op_set_attr_bool(NextOf<OurOp>(op), attr, value, length),
                [&](OpRecord& record) { SetAttr(record, attr, *value != 0); });
}

KVANT_DNNL_EXPORT Status dnnl_graph_op_set_attr_str(OpHandle op, AttrNumber attr, const char* value,
                                                    size_t length) {
  return Record(op, next::op_set_attr_str(NextOf<OurOp>(op), attr, value, length),
                [&](OpRecord& record) { SetAttr(record, attr, std::string(value)); });
}

KVANT_DNNL_EXPORT Status dnnl_graph_op_get_id(const dnnl_graph_op* op, size_t* id) {
  return next::op_get_id(NextOf<OurOp>(op), id);
}

KVANT_DNNL_EXPORT Status dnnl_graph_op_get_kind(const dnnl_graph_op* op, KindNumber* kind) {
  return next::op_get_kind(NextOf<OurOp>(op), kind);
}

}  // namespace kvant::dnnl_abi
