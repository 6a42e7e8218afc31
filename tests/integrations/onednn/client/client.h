// A client of oneDNN Graph that knows nothing of kvant. It writes down what it sees: each line is
// compared with that of the same program without kvant (onednn_test.py).
//
//   CASE: what = value             must be the same
//   CASE: ~what = numbers          may differ as rounding does
//
// It is compiled against the headers of an old oneDNN too, which lack what CLIENT_NEW guards.
#ifndef KVANT_TESTS_INTEGRATIONS_ONEDNN_CLIENT_CLIENT_H_
#define KVANT_TESTS_INTEGRATIONS_ONEDNN_CLIENT_CLIENT_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "oneapi/dnnl/dnnl.h"
#include "oneapi/dnnl/dnnl_graph.hpp"

#define CLIENT_NEW (DNNL_VERSION_MAJOR > 3 || DNNL_VERSION_MINOR >= 13)

namespace client {

namespace dg = dnnl::graph;
using Desc = dg::logical_tensor;
using Dims = Desc::dims;
using Type = Desc::data_type;
using Layout = Desc::layout_type;
using Property = Desc::property_type;
using Kind = dg::op::kind;
using Attr = dg::op::attr;

// The case whose lines follow.
void Begin(const std::string& name);
void Line(const std::string& what, const std::string& value);
void Line(const std::string& what, int64_t value);

// What a call comes to: 0, or the status of the dnnl::error that it throws.
template <typename F>
int StatusOf(const F& call) {
  try {
    call();
    return 0;
  } catch (const dnnl::error& error) {
    return error.status;
  }
}
// Its line.
template <typename F>
void Status(const std::string& what, const F& call) {
  Line("status of " + what, StatusOf(call));
}

std::string Text(const std::vector<int64_t>& values);
std::string Text(const Desc& desc);

size_t SizeOf(Type type);  // of an element in bytes; s4 and u4 are packed in twos
// Numbers that differ from element to element, of a size that suits the type and `scale`.
std::vector<uint8_t> Fill(const Desc& desc, uint32_t seed, float scale = 1);
// As a list of numbers of the type.
std::string Numbers(const Desc& desc, const uint8_t* data);

struct Place {
  Place() : engine(dnnl::engine::kind::cpu, 0), stream(engine) {}
  dnnl::engine engine;
  dnnl::stream stream;
};

// A graph under construction, with a number for each op and tensor that is made.
class Builder {
 public:
#if CLIENT_NEW
  explicit Builder(dnnl::fpmath_mode mode = dnnl::fpmath_mode::strict, bool apply_to_int = false)
      : graph_(dnnl::engine::kind::cpu) {
    graph_.set_fpmath_mode(mode, apply_to_int);
  }
#else
  Builder() : graph_(dnnl::engine::kind::cpu) {}
#endif

  Desc Input(Type type, const Dims& dims, Property property = Property::undef, float scale = 1);
  Desc Strided(Type type, const Dims& dims, const Dims& strides);
  // A result; without dims its rank is not known.
  Desc Result(Type type, const Dims& dims) { return {id_++, type, dims, Layout::strided}; }
  Desc Result(Type type) { return {id_++, type, Layout::strided}; }
  Desc Op(Kind kind, const std::vector<Desc>& inputs, const Desc& output);
  // The op, to set attributes of; Add puts it in.
  dg::op Make(Kind kind, const std::vector<Desc>& inputs, const std::vector<Desc>& outputs) {
    const size_t id = op_++;
    for (const Desc& input : inputs) used_.insert(input.get_id());
    return {id, kind, inputs, outputs, "op" + std::to_string(id)};
  }
  dg::op& Keep(dg::op op) {
    ops_.push_back(std::move(op));
    return ops_.back();
  }

  // Adds and finalizes.
  dg::graph& Build();
  // Writes the partitions, compiles and executes them on data of its own, and writes what comes
  // out: exactly alike, or as rounding allows.
  void Run(bool exact);
  // Values instead of what Fill gives.
  void Set(const Desc& desc, const std::vector<float>& values);

 private:
  dg::graph graph_;
  std::vector<dg::op> ops_;
  size_t id_ = 0, op_ = 0;
  std::set<size_t> used_;  // tensors that an op takes
  std::map<size_t, float> scales_;
  std::map<size_t, std::vector<float>> values_;
};

void WritePartitions(const std::vector<dg::partition>& partitions);

// The cases, a file each.
void RunOps();
void RunAttention();
void RunCompressed();
void RunShapes();
void RunMixed();
void RunStatuses();
void RunHandles();
void RunPlaces();
// What oneDNN itself does not survive: each status is of invalid arguments.
void RunMisuse();

}  // namespace client

#endif  // KVANT_TESTS_INTEGRATIONS_ONEDNN_CLIENT_CLIENT_H_
