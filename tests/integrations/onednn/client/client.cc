#include "client.h"

#include <cmath>
#include <cstdio>
#include <cstring>

namespace client {
namespace {

std::string case_name;

float FloatOfHalf(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  float value = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                : exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                 : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return (bits & 0x8000) != 0 ? -value : value;
}

// Exact for what Fill and Set make: multiples of 1/64 below 32.
uint16_t HalfOfFloat(float value) {
  if (value == 0) return 0;
  const uint16_t sign = value < 0 ? 0x8000 : 0;
  if (std::isinf(value)) return sign | 0x7c00;
  int exponent;
  const float fraction = std::frexp(std::fabs(value), &exponent);
  return static_cast<uint16_t>(sign | ((exponent + 14) << 10) |
                               (static_cast<int>(fraction * 2048) & 1023));
}

uint16_t BFloatOfFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

float FloatOfBFloat(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

bool IsPacked(Type type) {
#if CLIENT_NEW
  return type == Type::s4 || type == Type::u4;
#else
  (void)type;
  return false;
#endif
}

void Store(Type type, size_t i, float value, uint8_t* data) {
  const auto put = [&](auto v) { std::memcpy(data + i * sizeof(v), &v, sizeof(v)); };
  if (IsPacked(type)) {
    const int code = static_cast<int>(value) & 15;
    data[i / 2] = static_cast<uint8_t>(i % 2 == 0 ? (data[i / 2] & 0xf0) | code
                                                  : (data[i / 2] & 0x0f) | code << 4);
    return;
  }
  switch (type) {
    case Type::f32:
      return put(value);
    case Type::f16:
      return put(HalfOfFloat(value));
    case Type::bf16:
      return put(BFloatOfFloat(value));
    case Type::s32:
      return put(static_cast<int32_t>(value));
#if CLIENT_NEW
    case Type::s64:
      return put(static_cast<int64_t>(value));
#endif
    case Type::s8:
      return put(static_cast<int8_t>(value));
    default:
      return put(static_cast<uint8_t>(value));
  }
}

double Load(Type type, size_t i, const uint8_t* data) {
  const auto get = [&](auto v) {
    std::memcpy(&v, data + i * sizeof(v), sizeof(v));
    return v;
  };
  if (IsPacked(type)) return data[i / 2] >> (i % 2 * 4) & 15;
  switch (type) {
    case Type::f32:
      return get(0.f);
    case Type::f16:
      return FloatOfHalf(get(uint16_t{}));
    case Type::bf16:
      return FloatOfBFloat(get(uint16_t{}));
    case Type::s32:
      return get(int32_t{});
    case Type::s8:
      return get(int8_t{});
    default:
      return get(uint8_t{});
  }
}

size_t Elements(const Desc& desc) {
  size_t count = 1;
  for (const int64_t dim : desc.get_dims()) count *= static_cast<size_t>(dim);
  return count;
}

}  // namespace

void Begin(const std::string& name) { case_name = name; }

void Line(const std::string& what, const std::string& value) {
  std::printf("%s: %s = %s\n", case_name.c_str(), what.c_str(), value.c_str());
}

void Line(const std::string& what, int64_t value) { Line(what, std::to_string(value)); }

std::string Text(const std::vector<int64_t>& values) {
  std::string text;
  for (const int64_t value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return "[" + text + "]";
}

std::string Text(const Desc& desc) {
  std::string text = "id " + std::to_string(static_cast<int64_t>(desc.get_id())) + " type " +
                     std::to_string(static_cast<int>(desc.get_data_type())) + " layout " +
                     std::to_string(static_cast<int>(desc.get_layout_type())) + " property " +
                     std::to_string(static_cast<int>(desc.get_property_type()));
  Dims dims, strides;
  if (StatusOf([&] { dims = desc.get_dims(); }) == 0) text += " dims " + Text(dims);
  if (StatusOf([&] { strides = desc.get_strides(); }) == 0) text += " strides " + Text(strides);
  return text;
}

size_t SizeOf(Type type) {
  switch (type) {
    case Type::f32:
    case Type::s32:
      return 4;
    case Type::f16:
    case Type::bf16:
      return 2;
#if CLIENT_NEW
    case Type::s64:
      return 8;
#endif
    default:
      return 1;
  }
}

std::vector<uint8_t> Fill(const Desc& desc, uint32_t seed, float scale) {
  std::vector<uint8_t> data(desc.get_mem_size() + 64);
  const Type type = desc.get_data_type();
  const size_t count = desc.get_mem_size() * (IsPacked(type) ? 2 : 1) / SizeOf(type);
  for (size_t i = 0; i < count; ++i) {
    uint32_t hash = static_cast<uint32_t>(i) * 2654435761u + seed * 40503u + 12345u;
    hash ^= hash >> 15;
    hash *= 2246822519u;
    hash ^= hash >> 13;
    const int small = static_cast<int>(hash % 127) - 63;
    float value = static_cast<float>(small) / 64 * scale;
    switch (type) {
      case Type::f32:
      case Type::f16:
      case Type::bf16:
        break;
      case Type::boolean:
        value = static_cast<float>(hash % 4 != 0);
        break;
      case Type::u8:
        value = static_cast<float>(hash % 16);
        break;
      default:
        value = static_cast<float>(small / 8);
    }
    Store(type, i, value, data.data());
  }
  return data;
}

std::string Numbers(const Desc& desc, const uint8_t* data) {
  std::string text;
  const Dims dims = desc.get_dims(), strides = desc.get_strides();
  const size_t count = Elements(desc);
  char buffer[32];
  for (size_t i = 0; i < count; ++i) {
    size_t rest = i, at = 0;
    for (size_t d = dims.size(); d-- > 0;) {
      at += rest % static_cast<size_t>(dims[d]) * static_cast<size_t>(strides[d]);
      rest /= static_cast<size_t>(dims[d]);
    }
    std::snprintf(buffer, sizeof(buffer), "%s%.9g", i == 0 ? "" : " ",
                  Load(desc.get_data_type(), at, data));
    text += buffer;
  }
  return text;
}

Desc Builder::Input(Type type, const Dims& dims, Property property, float scale) {
  scales_[id_] = scale;
  return {id_++, type, dims, Layout::strided, property};
}

Desc Builder::Strided(Type type, const Dims& dims, const Dims& strides) {
  return {id_++, type, dims, strides};
}

Desc Builder::Op(Kind kind, const std::vector<Desc>& inputs, const Desc& output) {
  Keep(Make(kind, inputs, {output}));
  return output;
}

void Builder::Set(const Desc& desc, const std::vector<float>& values) {
  values_[desc.get_id()] = values;
}

dg::graph& Builder::Build() {
  for (const dg::op& op : ops_) Line("add_op", static_cast<int>(graph_.add_op(op, false)));
  Status("finalize", [&] { graph_.finalize(); });
  return graph_;
}

void WritePartitions(const std::vector<dg::partition>& partitions) {
  Line("partitions", static_cast<int64_t>(partitions.size()));
  for (const dg::partition& partition : partitions) {
    std::string text = partition.is_supported() ? "supported, ops" : "unsupported, ops";
    for (const size_t op : partition.get_ops()) text += " " + std::to_string(op);
    text += ", engine " + std::to_string(static_cast<int>(partition.get_engine_kind()));
    Line("partition", text);
    for (const Desc& port : partition.get_input_ports()) Line("input port", Text(port));
    for (const Desc& port : partition.get_output_ports()) Line("output port", Text(port));
  }
}

void Builder::Run(bool exact) {
  Place place;
  std::vector<dg::partition> partitions;
  Status("get_partitions", [&] { partitions = Build().get_partitions(); });
  WritePartitions(partitions);
  std::map<size_t, Desc> descs;
  std::map<size_t, std::vector<uint8_t>> memory;
  for (const dg::partition& partition : partitions) {
    std::vector<Desc> inputs = partition.get_input_ports();
    std::vector<Desc> outputs = partition.get_output_ports();
    for (Desc& input : inputs) {
      const auto known = descs.find(input.get_id());
      if (known != descs.end()) input = known->second;
    }
    dg::compiled_partition compiled;
    int status = StatusOf([&] { compiled = partition.compile(inputs, outputs, place.engine); });
    Line("status of compile", status);
    if (status != 0) return;
    for (Desc& desc : inputs) desc = compiled.query_logical_tensor(desc.get_id());
    for (Desc& desc : outputs) desc = compiled.query_logical_tensor(desc.get_id());
    Line("inplace ports", static_cast<int64_t>(compiled.get_inplace_ports().size()));
    std::vector<dg::tensor> in, out;
    for (const Desc& desc : inputs) {
      const size_t id = desc.get_id();
      if (memory.count(id) == 0) {
        const auto scale = scales_.find(id);
        memory[id] =
            Fill(desc, static_cast<uint32_t>(id), scale == scales_.end() ? 1 : scale->second);
        const auto values = values_.find(id);
        for (size_t i = 0; values != values_.end() && i < values->second.size(); ++i) {
          Store(desc.get_data_type(), i, values->second[i], memory[id].data());
        }
      }
#if CLIENT_NEW
      if (desc.get_property_type() == Property::host_scalar) {
        in.push_back(dg::tensor::make_scalar_tensor(desc, memory[id].data()));
        continue;
      }
#endif
      in.emplace_back(desc, place.engine, memory[id].data());
    }
    for (const Desc& desc : outputs) {
      Line("compiled output", Text(desc));
      descs[desc.get_id()] = desc;
      memory[desc.get_id()].assign(desc.get_mem_size() + 64, 0xa5);
      out.emplace_back(desc, place.engine, memory[desc.get_id()].data());
    }
    status = StatusOf([&] {
      compiled.execute(place.stream, in, out);
      place.stream.wait();
    });
    Line("status of execute", status);
    if (status != 0) return;
    for (const Desc& desc : outputs) {
      Line(exact ? "output" : "~output", Numbers(desc, memory[desc.get_id()].data()));
      bool guarded = true;
      for (size_t i = desc.get_mem_size(); i < memory[desc.get_id()].size(); ++i) {
        guarded = guarded && memory[desc.get_id()][i] == 0xa5;
      }
      Line("nothing beyond the output", guarded);
    }
  }
  // The same however the graph is cut.
  for (const auto& [id, desc] : descs) {
    if (used_.count(id) == 0)
      Line("~result " + std::to_string(id), Numbers(desc, memory[id].data()));
  }
}

}  // namespace client

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what a crash leaves tells where it was
  if (argc > 1 && std::string(argv[1]) == "misuse") {
    client::RunMisuse();
    return 0;
  }
  client::RunOps();
  client::RunAttention();
  client::RunCompressed();
  client::RunShapes();
  client::RunMixed();
  client::RunStatuses();
  client::RunHandles();
  client::RunPlaces();
  return 0;
}
