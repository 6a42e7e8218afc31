#include "kvant/backends/reference/plan.h"

#include <algorithm>
#include <utility>

#include "kvant/backends/loops.h"
#include "kvant/backends/reference/onednn.h"
#include "kvant/backends/tensor.h"

namespace kvant::reference {

Array Plan::NewArray(Dims dims, Storage storage) {
  Array array{static_cast<int>(arrays_.size()), storage, std::move(dims)};
  arrays_.push_back(
      {.bytes = static_cast<size_t>(array.elements()) * BytesOf(storage), .place = array.id});
  return array;
}

Array Plan::PortArray(int port, Dims dims, Storage storage) {
  Array array = NewArray(std::move(dims), storage);
  arrays_.back().port = port;
  return array;
}

void Plan::AddStep(absl::Span<const Array> reads, absl::Span<const Array> writes, Step run,
                   int overwrites) {
  const auto is_empty = [](const Array& array) { return !array || array.elements() == 0; };
  // Steps without writes store to ports; others have nothing to do when all is empty.
  if (!writes.empty() && std::ranges::all_of(writes, is_empty)) return;
  const int step = static_cast<int>(steps_.size());
  for (const Array& array : writes) {
    if (array) arrays_[array.id].first = arrays_[array.id].last = step;
  }
  for (const Array& array : reads) {
    if (array) arrays_[array.id].last = step;
  }
  steps_.push_back({std::move(run)});
  if (overwrites < 0) return;
  steps_.back().overwrites = reads[overwrites].id;
  steps_.back().result = writes.front().id;
}

void Plan::Finish() {
  // What nobody reads any more gives its memory to the result that overwrites it.
  for (int step = 0; step < static_cast<int>(steps_.size()); ++step) {
    const int from = steps_[step].overwrites;
    if (from < 0) continue;
    const int to = steps_[step].result;
    // Empty inputs have no writer, and ports are not ours to write.
    if (arrays_[from].port >= 0 || arrays_[from].first < 0 || arrays_[from].last != step ||
        arrays_[from].bytes != arrays_[to].bytes) {
      continue;
    }
    const int place = arrays_[to].place = arrays_[from].place;
    arrays_[place].last = std::max(arrays_[place].last, arrays_[to].last);
  }
  // First fit in order of birth, among the arrays alive at the same time.
  std::vector<int> order;
  for (int id = 0; id < static_cast<int>(arrays_.size()); ++id) {
    if (arrays_[id].port < 0 && arrays_[id].place == id && arrays_[id].first >= 0) {
      order.push_back(id);
    }
  }
  std::ranges::stable_sort(order, {}, [&](int id) { return arrays_[id].first; });
  std::vector<int> placed;  // by offset
  for (int id : order) {
    ArrayInfo& info = arrays_[id];
    const size_t bytes = RoundUp(info.bytes, kScratchAlignment);
    size_t offset = 0;
    for (int other : placed) {
      const ArrayInfo& taken = arrays_[other];
      if (taken.last < info.first || info.last < taken.first) continue;
      if (offset + bytes <= taken.offset) break;
      offset = std::max(offset, RoundUp(taken.offset + taken.bytes, kScratchAlignment));
    }
    info.offset = offset;
    scratch_bytes_ = std::max(scratch_bytes_, offset + bytes);
    const auto later = std::ranges::upper_bound(placed, offset, {},
                                                [&](int other) { return arrays_[other].offset; });
    placed.insert(later, id);
  }
}

absl::Status Plan::Run(const Execution& run) const {
  for (const Check& check : checks_) KVANT_RETURN_IF_ERROR(check(run.inputs));
  std::vector<void*> pointers(arrays_.size(), nullptr);
  for (size_t id = 0; id < arrays_.size(); ++id) {
    const ArrayInfo& info = arrays_[id];
    if (info.port >= 0) {
      pointers[id] = const_cast<void*>(run.inputs[info.port]);
    } else if (info.first >= 0) {
      pointers[id] = run.scratch + arrays_[info.place].offset;
    }
  }
  dnnl::stream stream(CpuEngine());
  const RunContext context{run.executor, stream, run.inputs, run.outputs, pointers};
  for (const StepInfo& step : steps_) step.run(context);
  return absl::OkStatus();
}

}  // namespace kvant::reference
