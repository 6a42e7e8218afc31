// Graphs built by calls.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "kvant/integrations/c/call.h"
#include "kvant/integrations/c/handles.h"

namespace kvant::c {
namespace {

absl::StatusOr<Value> ValueAt(const kvant_builder& builder, kvant_value value) {
  if (value < builder.values.size()) return builder.values[value];
  // After a failed call there are no values of later ones, and after Build none at all: the error
  // is that.
  KVANT_RETURN_IF_ERROR(builder.failed);
  KVANT_RETURN_IF_ERROR(builder.builder.status());
  return InvalidArguments(value, " is no value of this builder");
}

absl::StatusOr<AttrValue> AttributeOf(const kvant_attr& attr) {
  switch (attr.type) {
    case KVANT_ATTR_S64:
      return AttrValue(attr.value.s64);
    case KVANT_ATTR_F32:
      return AttrValue(attr.value.f32);
    case KVANT_ATTR_BOOL:
      return AttrValue(attr.value.boolean);
    case KVANT_ATTR_STRING:
      KVANT_RETURN_IF_ERROR(NotNull({{attr.name, attr.value.string}}));
      return AttrValue(std::string(attr.value.string));
    case KVANT_ATTR_S64S:
      if (attr.count > 0) KVANT_RETURN_IF_ERROR(NotNull({{attr.name, attr.value.s64s}}));
      return AttrValue(std::vector<int64_t>(attr.value.s64s, attr.value.s64s + attr.count));
    case KVANT_ATTR_F32S:
      if (attr.count > 0) KVANT_RETURN_IF_ERROR(NotNull({{attr.name, attr.value.f32s}}));
      return AttrValue(std::vector<float>(attr.value.f32s, attr.value.f32s + attr.count));
  }
  return InvalidArguments("attribute '", attr.name, "' has type ", static_cast<int>(attr.type),
                          ", which there is not");
}

absl::StatusOr<Attributes> AttributesOf(OpKind kind, const kvant_attr* attrs, size_t count) {
  Attributes result;
  if (count > 0) KVANT_RETURN_IF_ERROR(NotNull({{"attrs", attrs}}));
  for (size_t i = 0; i < count; ++i) {
    KVANT_RETURN_IF_ERROR(NotNull({{"the name of an attribute", attrs[i].name}}));
    const std::optional<Attr> attr = AttrFromName(attrs[i].name);
    if (!attr) {
      return InvalidArguments(OpKindName(kind), " has no attribute '", attrs[i].name, "'; it has ",
                              SchemaOf(kind).AttrNames());
    }
    if (result.Find(*attr) != nullptr) {
      return InvalidArguments(OpKindName(kind), ": attribute '", attrs[i].name, "' is given twice");
    }
    KVANT_ASSIGN_OR_RETURN(AttrValue value, AttributeOf(attrs[i]));
    result.Set(*attr, std::move(value));
  }
  return result;
}

absl::StatusOr<std::vector<GraphBuilder::Result>> ResultsOf(const kvant_builder& builder,
                                                            const std::vector<Value>& inputs,
                                                            const kvant_tensor* results,
                                                            size_t count) {
  std::vector<GraphBuilder::Result> made;
  if (count > 0) KVANT_RETURN_IF_ERROR(NotNull({{"results", results}}));
  for (size_t i = 0; i < count; ++i) {
    kvant_tensor given;
    KVANT_RETURN_IF_ERROR(Read("a result", At(results, i), given));
    if (given.rank == 0 && given.dims == nullptr) given.rank = -1;  // zero means: not said
    KVANT_ASSIGN_OR_RETURN(LogicalTensor tensor, TensorOf(given));
    if (tensor.type == kUndef && !inputs.empty())
      tensor.type = builder.builder.Describe(inputs[0]).type;
    made.emplace_back(tensor.type, std::move(tensor.dims));
  }
  return made;
}

// What calls after the one that failed give.
absl::Status Repeated(const absl::Status& failed) {
  absl::Status status(failed.code(), absl::StrCat("the builder refused an earlier call: ",
                                                  std::string(failed.message())));
  failed.ForEachPayload([&status](absl::string_view type, const absl::Cord& payload) {
    status.SetPayload(type, payload);
  });
  return status;
}

// Runs a call that adds to the builder, unless one failed before.
template <typename Body>
kvant_status Add(kvant_builder* builder, const Body& body) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"builder", builder}}));
    if (!builder->failed.ok()) return Repeated(builder->failed);
    builder->failed = WithoutExceptions(body);
    return builder->failed;
  });
}

}  // namespace

extern "C" {

kvant_status kvant_builder_create(const kvant_builder_options* options, kvant_builder** builder) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"builder", builder}}));
    kvant_builder_options given;
    KVANT_RETURN_IF_ERROR(Read("kvant_builder_options", options, given));
    GraphOptions graph;
    graph.apply_to_int = given.apply_to_int;
    KVANT_ASSIGN_OR_RETURN(graph.fpmath, FpMathOf(given.fpmath));
    *builder = new kvant_builder{GraphBuilder(std::move(graph)), {}, {}};
    return absl::OkStatus();
  });
}

void kvant_builder_destroy(kvant_builder* builder) { delete builder; }

kvant_status kvant_builder_input(kvant_builder* builder, const kvant_tensor* tensor,
                                 kvant_value* value) {
  return Add(builder, [&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"tensor", tensor}, {"value", value}}));
    kvant_tensor given;
    KVANT_RETURN_IF_ERROR(Read("tensor", tensor, given));
    KVANT_ASSIGN_OR_RETURN(LogicalTensor input, TensorOf(given));
    if (!input.dims) {
      return InvalidArguments("input '", input.name, "' has no rank; dims may be unknown");
    }
    const Value made = builder->builder.Input(input.name, input.type, *std::move(input.dims),
                                              std::move(input.strides), input.property);
    KVANT_RETURN_IF_ERROR(builder->builder.status());
    *value = builder->values.size();
    builder->values.push_back(made);
    return absl::OkStatus();
  });
}

kvant_status kvant_builder_constant(kvant_builder* builder, kvant_type type, double number,
                                    kvant_value* value) {
  return Add(builder, [&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"value", value}}));
    KVANT_ASSIGN_OR_RETURN(const DataType known, TypeOf(type));
    const Value made = builder->builder.Scalar(known, number);
    KVANT_RETURN_IF_ERROR(builder->builder.status());
    *value = builder->values.size();
    builder->values.push_back(made);
    return absl::OkStatus();
  });
}

kvant_status kvant_builder_op(kvant_builder* builder, const char* op, const char* name,
                              const kvant_value* inputs, size_t inputs_count,
                              const kvant_attr* attrs, size_t attrs_count,
                              const kvant_tensor* results, size_t results_count,
                              kvant_value* values) {
  return Add(builder, [&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"op", op}}));
    if (inputs_count > 0) KVANT_RETURN_IF_ERROR(NotNull({{"inputs", inputs}}));
    if (results_count > 0) KVANT_RETURN_IF_ERROR(NotNull({{"values", values}}));
    const std::optional<OpKind> kind = OpKindFromName(op);
    if (!kind) return InvalidArguments("there is no op '", op, "'");
    std::vector<Value> sources;
    for (size_t i = 0; i < inputs_count; ++i) {
      KVANT_ASSIGN_OR_RETURN(sources.emplace_back(), ValueAt(*builder, inputs[i]));
    }
    KVANT_ASSIGN_OR_RETURN(Attributes attributes, AttributesOf(*kind, attrs, attrs_count));
    KVANT_ASSIGN_OR_RETURN(const auto described,
                           ResultsOf(*builder, sources, results, results_count));
    const std::vector<Value> made = builder->builder.AddOp(
        *kind, name == nullptr ? "" : name, sources, described, std::move(attributes));
    KVANT_RETURN_IF_ERROR(builder->builder.status());
    for (size_t i = 0; i < results_count; ++i) {
      values[i] = builder->values.size();
      builder->values.push_back(made[i]);
    }
    return absl::OkStatus();
  });
}

kvant_status kvant_builder_output(kvant_builder* builder, const char* name, kvant_value value,
                                  const int64_t* strides) {
  return Add(builder, [&]() -> absl::Status {
    KVANT_ASSIGN_OR_RETURN(const Value output, ValueAt(*builder, value));
    std::optional<Dims> given;
    const int rank = builder->builder.Describe(output).rank();
    if (strides != nullptr) {
      if (rank < 0) return InvalidArguments("strides of an output whose rank is not known");
      given = Dims(strides, strides + rank);
    }
    builder->builder.Output(name == nullptr ? "" : name, output, std::move(given));
    return builder->builder.status();
  });
}

kvant_status kvant_builder_describe(const kvant_builder* builder, kvant_value value,
                                    kvant_tensor* tensor) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"builder", builder}}));
    KVANT_ASSIGN_OR_RETURN(const Value known, ValueAt(*builder, value));
    return Write("tensor", Describe(builder->builder.Describe(known)), tensor);
  });
}

kvant_status kvant_builder_build(kvant_builder* builder, kvant_graph** graph) {
  if (builder != nullptr && !builder->failed.ok()) return Call([&] { return builder->failed; });
  return Add(builder, [&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"graph", graph}}));
    KVANT_ASSIGN_OR_RETURN(Graph built, std::move(builder->builder).Build());
    builder->values.clear();
    *graph = new kvant_graph{std::move(built)};
    return absl::OkStatus();
  });
}

}  // extern "C"
}  // namespace kvant::c
