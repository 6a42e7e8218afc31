// kvant run: a graph on tensors from a file.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/graph/status.h"
#include "kvant/tools/command.h"
#include "kvant/tools/graph_runner.h"
#include "kvant/tools/progress.h"
#include "kvant/tools/safetensors.h"
#include "kvant/tools/tensor_walk.h"

namespace kvant {
namespace {

bool IsDense(const LogicalTensor& tensor) {
  return tensor.StridesOrDense() == DenseStrides(*tensor.dims);
}

// Whole bytes are moved as they are; packed elements have small values, which
// doubles hold.
void CopyElement(DataType type, const std::byte* from, int64_t from_index, std::byte* to,
                 int64_t to_index) {
  const int bits = BitsOf(type);
  if (bits < 8) return StoreElement(type, to, to_index, LoadElement(type, from, from_index));
  const int64_t bytes = bits / 8;
  std::memcpy(to + to_index * bytes, from + from_index * bytes, static_cast<size_t>(bytes));
}

bool SameElement(DataType type, const std::byte* a, int64_t a_index, const std::byte* b,
                 int64_t b_index) {
  const int bits = BitsOf(type);
  if (bits < 8) return LoadElement(type, a, a_index) == LoadElement(type, b, b_index);
  const int64_t bytes = bits / 8;
  return std::memcmp(a + a_index * bytes, b + b_index * bytes, static_cast<size_t>(bytes)) == 0;
}

bool AllOnes(const Dims& dims) {
  return std::all_of(dims.begin(), dims.end(), [](int64_t dim) { return dim == 1; });
}

// Packed types travel as bytes in one dimension.
Dims FileDims(const LogicalTensor& tensor) {
  if (BitsOf(tensor.type) >= 8) return *tensor.dims;
  return {BytesFor(tensor.type, tensor.elements())};
}

absl::Status CheckFits(const LogicalTensor& tensor, const SafeTensor& given) {
  const bool packed = BitsOf(tensor.type) < 8;
  const bool bytes_for_bools = tensor.type == kBoolean && given.type == kU8;
  const bool type_fits = given.type == (packed ? kU8 : tensor.type) || bytes_for_bools;
  const Dims want = FileDims(tensor);
  const bool dims_fit = given.dims == want || (!packed && AllOnes(given.dims) && AllOnes(want));
  if (type_fits && dims_fit) return absl::OkStatus();
  const std::string expected =
      packed ? absl::StrCat("u8[", DimsToString(want), "], packed,") : tensor.ToString();
  return InvalidArguments("graph input ", tensor.Label(), " (", tensor.ToString(), ") needs ",
                          expected, " but the file has ", DataTypeName(given.type), "[",
                          DimsToString(given.dims), "]");
}

// The first names, in quotes.
std::string NamesOf(const SafeTensors& tensors) {
  constexpr size_t kMost = 16;
  if (tensors.empty()) return "none";
  const size_t count = std::min(tensors.size(), kMost);
  const auto name = [](std::string* out, const auto& one) {
    absl::StrAppend(out, "'", one.first, "'");
  };
  const auto end = std::next(tensors.begin(), static_cast<ptrdiff_t>(count));
  return absl::StrCat(
      absl::StrJoin(tensors.begin(), end, ", ", name),
      count < tensors.size() ? absl::StrCat(" and ", tensors.size() - count, " others") : "");
}

// Where strides put several elements into one place, they must be the same.
absl::Status Scatter(const LogicalTensor& tensor, const std::byte* from, std::byte* to) {
  ForEachElement(tensor, [&](int64_t index, int64_t offset, const Dims&) {
    CopyElement(tensor.type, from, index, to, offset);
  });
  absl::Status done;
  ForEachElement(tensor, [&](int64_t index, int64_t offset, const Dims& at) {
    if (!done.ok() || SameElement(tensor.type, from, index, to, offset)) return;
    done = InvalidArguments("graph input ", tensor.Label(), " (", tensor.ToString(),
                            ") has strides ", DimsToString(tensor.StridesOrDense()),
                            ", by which element [", DimsToString(at),
                            "] lies where another does, and the file has different bytes for them");
  });
  return done;
}

// A name that is another input's id is that input's.
bool NamesAnother(const Graph& graph, const LogicalTensor& tensor) {
  return std::any_of(graph.inputs().begin(), graph.inputs().end(), [&](TensorId id) {
    return id != tensor.id && absl::StrCat(id) == tensor.name;
  });
}

absl::StatusOr<BufferMap> MakeInputs(const Graph& graph, const SafeTensors& given) {
  BufferMap buffers;
  for (TensorId id : graph.inputs()) {
    const LogicalTensor& tensor = graph.tensor(id);
    auto it = given.find(absl::StrCat(id));
    const bool by_name = !tensor.name.empty() && !NamesAnother(graph, tensor);
    if (it == given.end() && by_name) it = given.find(tensor.name);
    if (it == given.end()) {
      return InvalidArguments("the file of inputs has no tensor '", id, "'",
                              by_name ? absl::StrCat(", nor '", tensor.name, "',") : "",
                              " for graph input ", tensor.Label(), ", ", tensor.ToString(),
                              ", but ", NamesOf(given));
    }
    KVANT_RETURN_IF_ERROR(CheckFits(tensor, it->second));
    KVANT_ASSIGN_OR_RETURN(Buffer buffer, Buffer::For(tensor));
    const std::byte* const from = it->second.data.data();
    if (IsDense(tensor)) {
      if (buffer.bytes() > 0) std::memcpy(buffer.data(), from, buffer.bytes());
    } else {
      KVANT_RETURN_IF_ERROR(Scatter(tensor, from, buffer.data()));
    }
    buffers.emplace(id, std::move(buffer));
  }
  return buffers;
}

SafeTensor ToFile(const LogicalTensor& tensor, const Buffer& buffer) {
  SafeTensor out;
  out.type = BitsOf(tensor.type) < 8 ? kU8 : tensor.type;
  out.dims = FileDims(tensor);
  out.data.resize(static_cast<size_t>(BytesFor(tensor.type, tensor.elements())));
  ForEachElement(tensor, [&](int64_t index, int64_t offset, const Dims&) {
    CopyElement(tensor.type, buffer.data(), offset, out.data.data(), index);
  });
  return out;
}

struct RunArguments {
  GraphArguments graph_arguments;
  std::string inputs;
  std::string outputs;

  void AddTo(CLI::App& command) {
    graph_arguments.AddTo(command);
    command
        .add_option("--inputs", inputs,
                    "safetensors file: each graph input under its decimal id, else under its name "
                    "(unless that is another input's id), "
                    "dense row-major; 4- and 2-bit types as U8, packed, in one dimension")
        ->required();
    command.add_option("--outputs", outputs, "safetensors file to write, under decimal ids")
        ->required();
  }

  absl::StatusOr<int> Run() const {
    KVANT_ASSIGN_OR_RETURN(const Graph graph, graph_arguments.Load());
    KVANT_ASSIGN_OR_RETURN(Engine engine, graph_arguments.MakeEngine());
    KVANT_ASSIGN_OR_RETURN(
        const GraphRunner runner,
        GraphRunner::Create(graph, std::move(engine), graph_arguments.partition_options()));
    auto progress = std::make_unique<Progress>("reading " + inputs);
    KVANT_ASSIGN_OR_RETURN(const SafeTensors given, ReadSafeTensors(inputs));
    KVANT_ASSIGN_OR_RETURN(BufferMap buffers, MakeInputs(graph, given));
    progress.reset();
    progress = std::make_unique<Progress>("running " + runner.backends());
    KVANT_RETURN_IF_ERROR(runner.Run(buffers));
    progress.reset();
    progress = std::make_unique<Progress>("writing " + outputs);
    SafeTensors results;
    for (TensorId id : graph.outputs()) {
      results[absl::StrCat(id)] = ToFile(graph.tensor(id), buffers.at(id));
    }
    KVANT_RETURN_IF_ERROR(WriteSafeTensors(outputs, results));
    return 0;
  }
};

}  // namespace

void AddRunCommand(CLI::App& app, Action& action) {
  AddCommand<RunArguments>(app, action, "run", "Run a graph on tensors from a safetensors file");
}

}  // namespace kvant
