// What loops of backends, and the scratch that they need, have in common. Internal to backends.
#ifndef KVANT_BACKENDS_LOOPS_H_
#define KVANT_BACKENDS_LOOPS_H_

#include <algorithm>
#include <cstdint>

#include "absl/types/span.h"
#include "kvant/backends/executor.h"
#include "kvant/graph/logical_tensor.h"

namespace kvant {

// The first multiple of `multiple` from `value` on.
template <typename Integer>
constexpr Integer RoundUp(Integer value, Integer multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// A dense array as [outer][length][inner]: an axis, which may count from the end, in the middle.
struct AxisView {
  AxisView(absl::Span<const int64_t> dims, int64_t axis) {
    axis = FromFront(axis, static_cast<int64_t>(dims.size()));
    outer = ElementsOf(dims.first(axis));
    length = dims[axis];
    inner = ElementsOf(dims.subspan(axis + 1));
  }
  // Vectors along the axis. The elements of one are `inner` apart, from Begin(vector) on.
  int64_t vectors() const { return outer * inner; }
  int64_t Begin(int64_t vector) const { return vector / inner * length * inner + vector % inner; }

  int64_t outer, length, inner;
};

// Calls body(i) for every i in [0, n), so many of them one after another in a task.
template <typename Body>
void ForEachInTasks(Executor& executor, int64_t n, int64_t of_task, const Body& body) {
  executor.ParallelFor((n + of_task - 1) / of_task, [&](int64_t task, int) {
    const int64_t end = std::min(n, (task + 1) * of_task);
    for (int64_t i = task * of_task; i < end; ++i) body(i);
  });
}

}  // namespace kvant

#endif  // KVANT_BACKENDS_LOOPS_H_
