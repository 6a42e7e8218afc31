#include "kvant/backends/reference/plan.h"

#include <algorithm>
#include <utility>

#include "kvant/backends/reference/onednn.h"

namespace kvant::reference {
namespace {

constexpr size_t kAlignment = 64;

}  // namespace

int64_t ElementsOf(absl::Span<const int64_t> dims) {
  int64_t elements = 1;
  for (int64_t dim : dims) elements *= dim;
  return elements;
}

Array Plan::NewArray(Dims dims, Storage storage) {
  Array array{static_cast<int>(arrays_.size()), storage, std::move(dims)};
  ArrayInfo info;
  info.bytes = static_cast<size_t>(array.elements()) * BytesOf(storage);
  arrays_.push_back(info);
  return array;
}

Array Plan::PortArray(int port, Dims dims, Storage storage) {
  Array array = NewArray(std::move(dims), storage);
  arrays_.back().port = port;
  return array;
}

void Plan::AddStep(absl::Span<const Array> reads, absl::Span<const Array> writes, Step step,
                   int overwrites) {
  // Steps without writes store to ports; others have nothing to do when all is empty.
  bool empty = !writes.empty();
  for (const Array& array : writes) empty = empty && array.elements() == 0;
  if (empty) return;
  StepInfo info;
  info.run = std::move(step);
  for (const Array& array : reads) info.reads.push_back(array.id);
  for (const Array& array : writes) info.writes.push_back(array.id);
  if (overwrites >= 0) info.overwrites = reads[overwrites].id;
  steps_.push_back(std::move(info));
}

void Plan::Finish() {
  FindLifetimes();
  ShareMemory();
  PlaceArrays();
}

void Plan::FindLifetimes() {
  for (int step = 0; step < static_cast<int>(steps_.size()); ++step) {
    for (int id : steps_[step].writes) arrays_[id].first = arrays_[id].last = step;
    for (int id : steps_[step].reads) arrays_[id].last = step;
  }
}

int Plan::Root(int id) const {
  while (arrays_[id].shares >= 0) id = arrays_[id].shares;
  return id;
}

void Plan::ShareMemory() {
  for (int step = 0; step < static_cast<int>(steps_.size()); ++step) {
    const int from = steps_[step].overwrites;
    if (from < 0) continue;
    const int to = steps_[step].writes.front();
    // Empty inputs have no writer, and ports are not ours to write.
    if (arrays_[from].port >= 0 || arrays_[from].first < 0 || arrays_[from].last != step ||
        arrays_[from].bytes != arrays_[to].bytes) {
      continue;
    }
    const int root = Root(from);
    arrays_[to].shares = root;
    arrays_[root].last = std::max(arrays_[root].last, arrays_[to].last);
  }
}

// First fit in order of birth, among the arrays alive at the same time.
void Plan::PlaceArrays() {
  std::vector<int> order;
  for (int id = 0; id < static_cast<int>(arrays_.size()); ++id) {
    if (arrays_[id].port < 0 && arrays_[id].shares < 0 && arrays_[id].first >= 0) {
      order.push_back(id);
    }
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return arrays_[a].first < arrays_[b].first; });
  std::vector<int> placed;  // by offset
  for (int id : order) {
    ArrayInfo& info = arrays_[id];
    const size_t bytes = (info.bytes + kAlignment - 1) / kAlignment * kAlignment;
    size_t offset = 0;
    for (int other : placed) {
      const ArrayInfo& taken = arrays_[other];
      if (taken.last < info.first || info.last < taken.first) continue;
      if (offset + bytes <= taken.offset) break;
      offset =
          std::max(offset, (taken.offset + taken.bytes + kAlignment - 1) / kAlignment * kAlignment);
    }
    info.offset = offset;
    scratch_bytes_ = std::max(scratch_bytes_, offset + bytes);
    placed.insert(
        std::upper_bound(placed.begin(), placed.end(), id,
                         [&](int a, int b) { return arrays_[a].offset < arrays_[b].offset; }),
        id);
  }
}

void Plan::Run(Executor& executor, absl::Span<const void* const> inputs,
               absl::Span<void* const> outputs, std::byte* scratch) const {
  std::vector<void*> pointers(arrays_.size(), nullptr);
  for (size_t id = 0; id < arrays_.size(); ++id) {
    const ArrayInfo& info = arrays_[id];
    if (info.port >= 0) {
      pointers[id] = const_cast<void*>(inputs[info.port]);
    } else if (info.shares >= 0 || info.first >= 0) {
      pointers[id] = scratch + arrays_[Root(static_cast<int>(id))].offset;
    }
  }
  dnnl::stream stream(CpuEngine());
  const RunContext context{executor, stream, inputs, outputs, pointers};
  for (const StepInfo& step : steps_) step.run(context);
}

}  // namespace kvant::reference
