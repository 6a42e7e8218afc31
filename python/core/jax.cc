// Compiled graphs as XLA's custom calls, for kvant.jax.
//
// A call has its graph with it, as JSON: so an executable that JAX has kept on disk runs in another
// process too. What is compiled of it is kept by its hash.
#include <nanobind/nanobind.h>

#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "call.h"
#include "describe.h"
#include "exchange.h"
#include "module.h"
#include "xla_ffi.h"

namespace kvant_python {
namespace {

// What a call's attributes say, which are named as here.
struct CallAttributes {
  std::string_view graph, key, backends;
  int64_t inputs = 0;  // of the graph; arguments behind them are the memory of results
  int64_t threads = 0;
};

// Why a call fails: of kvant, or of this.
struct Failure {
  kvant_status status = KVANT_INTERNAL;
  std::string sentence;
};

xla::ErrorCode CodeOf(kvant_status status) {
  switch (status) {
    case KVANT_UNIMPLEMENTED:
      return xla::kUnimplemented;
    case KVANT_OUT_OF_MEMORY:
      return xla::kResourceExhausted;
    case KVANT_INTERNAL:
      return xla::kInternal;
    default:
      return xla::kInvalidArgument;
  }
}

void Succeed(kvant_status status) {
  if (status != KVANT_OK) throw Failure{status, kvant_error()};
}

std::string_view Text(const xla::ByteSpan& span) { return {span.data, span.size}; }

CallAttributes Read(const xla::Attributes& attributes) {
  CallAttributes result;
  for (int64_t i = 0; i < attributes.size; ++i) {
    const std::string_view name = Text(*attributes.names[i]);
    const void* const value = attributes.values[i];
    if (attributes.types[i] == xla::AttributeType::kString) {
      const std::string_view text = Text(*static_cast<const xla::ByteSpan*>(value));
      if (name == "graph") result.graph = text;
      if (name == "key") result.key = text;
      if (name == "backends") result.backends = text;
    } else if (attributes.types[i] == xla::AttributeType::kScalar) {
      const auto& scalar = *static_cast<const xla::Scalar*>(value);
      if (scalar.type != xla::DataType::kS64) continue;
      const int64_t number = *static_cast<const int64_t*>(scalar.value);
      if (name == "inputs") result.inputs = number;
      if (name == "threads") result.threads = number;
    }
  }
  return result;
}

struct Place {
  const char* device;  // "cpu" or "cuda"
  int32_t index = 0;
  void* stream = nullptr;
};

// Graphs that calls have compiled, those that were called last.
class Kept {
 public:
  std::shared_ptr<const kvant_compiled> Find(const Place& place, const CallAttributes& call) {
    const std::string key = place.device + std::to_string(place.index) + std::string(call.key);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto at = compiled_.begin(); at != compiled_.end(); ++at) {
      if (at->first != key) continue;
      compiled_.splice(compiled_.begin(), compiled_, at);
      return at->second;
    }
    compiled_.emplace_front(key, Compile(place, call));
    if (compiled_.size() > kMost) compiled_.pop_back();
    return compiled_.front().second;
  }

 private:
  static constexpr size_t kMost = 256;

  std::shared_ptr<const kvant_compiled> Compile(const Place& place, const CallAttributes& call) {
    kvant_graph* parsed;
    Succeed(kvant_graph_from_json(call.graph.data(), call.graph.size(), &parsed));
    const GraphHandle graph(parsed);
    auto options = Sized<kvant_compile_options>();
    kvant_compiled* compiled;
    Succeed(kvant_compile(EngineFor(place, call), parsed, &options, &compiled));
    return {compiled, Destroy<kvant_compiled_destroy>()};
  }

  const kvant_engine* EngineFor(const Place& place, const CallAttributes& call) {
    const std::string backends(call.backends);
    EngineHandle& engine = engines_[{place.device, place.index, backends, call.threads}];
    if (engine != nullptr) return engine.get();
    auto options = Sized<kvant_engine_options>();
    options.device = place.device;
    options.device_index = place.index;
    options.threads = static_cast<int32_t>(call.threads);
    if (!backends.empty()) options.backends = backends.c_str();
    kvant_engine* made;
    Succeed(kvant_engine_create(&options, &made));
    engine.reset(made);
    return made;
  }

  std::mutex mutex_;
  std::map<std::tuple<std::string, int32_t, std::string, int64_t>, EngineHandle> engines_;
  std::list<std::pair<std::string, std::shared_ptr<const kvant_compiled>>> compiled_;
};

// Lives until the process ends, as executables may.
Kept& TheKept() {
  static auto* const kept = new Kept();
  return *kept;
}

DLDataType TypeOf(xla::DataType type) {
  switch (type) {
    case xla::DataType::kPred:
      return {dlpack::kBool, 8, 1};
    case xla::DataType::kS2:
      return {kDLInt, 2, 1};
    case xla::DataType::kS4:
      return {kDLInt, 4, 1};
    case xla::DataType::kS8:
      return {kDLInt, 8, 1};
    case xla::DataType::kS32:
      return {kDLInt, 32, 1};
    case xla::DataType::kS64:
      return {kDLInt, 64, 1};
    case xla::DataType::kU2:
      return {kDLUInt, 2, 1};
    case xla::DataType::kU4:
      return {kDLUInt, 4, 1};
    case xla::DataType::kU8:
      return {kDLUInt, 8, 1};
    case xla::DataType::kF16:
      return {kDLFloat, 16, 1};
    case xla::DataType::kF32:
      return {kDLFloat, 32, 1};
    case xla::DataType::kBF16:
      return {kDLBfloat, 16, 1};
    case xla::DataType::kF8E4M3:
      return {dlpack::kF8E4M3, 8, 1};
    case xla::DataType::kF8E5M2:
      return {dlpack::kF8E5M2, 8, 1};
  }
  throw Failure{KVANT_INVALID_DATA_TYPE,
                "XLA's type " + std::to_string(static_cast<int>(type)) + " is none of kvant's"};
}

// A call's tensors, of which the first `count` are the graph's.
std::vector<DLTensor> TensorsOf(const xla::Buffers& buffers, int64_t count, const Place& place) {
  const bool on_host = std::string_view(place.device) == "cpu";
  std::vector<DLTensor> tensors;
  for (int64_t i = 0; i < count; ++i) {
    const xla::Buffer& buffer = *buffers.buffers[i];
    DLTensor& tensor = tensors.emplace_back();
    tensor.data = buffer.data;
    tensor.device = {on_host ? kDLCPU : kDLCUDA, place.index};
    tensor.ndim = static_cast<int32_t>(buffer.rank);
    tensor.dtype = TypeOf(buffer.type);
    tensor.shape = buffer.dims;
    tensor.strides = nullptr;
    tensor.byte_offset = 0;
  }
  return tensors;
}

void Execute(const xla::CallFrame& frame, const Place& place) {
  if (InForkedChild()) throw Failure{KVANT_INVALID_ARGUMENTS, kForked};
  const CallAttributes call = Read(frame.attributes);
  const auto compiled = TheKept().Find(place, call);
  const std::vector<DLTensor> inputs = TensorsOf(frame.arguments, call.inputs, place);
  const std::vector<DLTensor> outputs = TensorsOf(frame.results, frame.results.size, place);
  std::vector<const DLTensor*> tensors;
  for (const auto* list : {&inputs, &outputs}) {
    for (const DLTensor& tensor : *list) tensors.push_back(&tensor);
  }
  Succeed(kvant_execute(compiled.get(), place.stream, tensors.data(), inputs.size(),
                        tensors.data() + inputs.size(), outputs.size()));
}

xla::Error* ErrorOf(const xla::CallFrame& frame, const Failure& failure) {
  xla::ErrorArgs args{sizeof args, nullptr, failure.sentence.c_str(), CodeOf(failure.status)};
  return frame.api->create_error(&args);
}

// `find`: of a frame, where it runs.
template <typename Find>
xla::Error* Handle(xla::CallFrame* frame, const Find& find) {
  xla::Extension* const extension = frame->extension_start;
  if (extension != nullptr && extension->type == xla::kMetadataExtension) {
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(extension)->metadata;
    metadata.api_version = {sizeof(xla::ApiVersion), nullptr, xla::kApiMajor, xla::kApiMinor};
    metadata.traits = 0;
    return nullptr;
  }
  if (frame->stage != xla::Stage::kExecute) return nullptr;
  try {
    Place place{};
    if (xla::Error* const error = find(*frame, place)) return error;
    Execute(*frame, place);
    return nullptr;
  } catch (const Failure& failure) {
    return ErrorOf(*frame, failure);
  } catch (const std::bad_alloc&) {
    return ErrorOf(*frame, {KVANT_OUT_OF_MEMORY, "the memory for a call cannot be had"});
  } catch (const std::exception& error) {
    return ErrorOf(*frame, {KVANT_INTERNAL, error.what()});
  }
}

xla::Error* HandleOnCpu(xla::CallFrame* frame) {
  return Handle(frame, [](const xla::CallFrame&, Place& place) -> xla::Error* {
    place = {"cpu", 0, nullptr};
    return nullptr;
  });
}

xla::Error* HandleOnCuda(xla::CallFrame* frame) {
  return Handle(frame, [](const xla::CallFrame& of, Place& place) -> xla::Error* {
    xla::StreamArgs stream{sizeof stream, nullptr, of.context, nullptr};
    if (xla::Error* const error = of.api->get_stream(&stream)) return error;
    xla::DeviceOrdinalArgs device{sizeof device, nullptr, of.context, 0};
    if (xla::Error* const error = of.api->get_device_ordinal(&device)) return error;
    place = {"cuda", device.device_ordinal, stream.stream};
    return nullptr;
  });
}

}  // namespace

void BindJax(nb::module_& m) {
  // As jax.ffi.register_ffi_target takes them.
  m.def("xla_handler", [](const char* platform) {
    auto* const handler = std::string_view(platform) == "cpu" ? &HandleOnCpu : &HandleOnCuda;
    EngineMade();
    return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
  });
}

}  // namespace kvant_python
