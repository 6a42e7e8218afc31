// KV caches of the extension.
#ifndef KVANT_PYTHON_CORE_CACHE_H_
#define KVANT_PYTHON_CORE_CACHE_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "call.h"

namespace kvant_python {

struct Cache {
  CacheHandle handle;
  int64_t layers, batch;
};

// A number for each row, or nothing.
using ByRow = std::optional<std::vector<int64_t>>;
// Null where there is none; throws where there are not as many as rows.
const int64_t* DataOf(const char* what, const ByRow& rows, int64_t batch);

// Attention over caches: methods of theirs, and a class.
void BindAttention(nb::module_& m, nb::class_<Cache>& cache);

}  // namespace kvant_python

#endif  // KVANT_PYTHON_CORE_CACHE_H_
