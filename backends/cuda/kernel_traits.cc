#include "kvant/backends/cuda/kernel_traits.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/substitute.h"

namespace kvant::cuda {
namespace {

// Aggregates within aggregates need no braces of their own.
constexpr char kTraits[] = R"(struct $0 {
  static constexpr $1 k = {$2};
  static constexpr $1 kMax = k;
};
)";

constexpr char kText[] = R"(#include "kvant/kernels/cuda/$0.h"

namespace kvant::cuda {
$1}  // namespace kvant::cuda

extern "C" __global__ void __launch_bounds__($2, $3)
$4(const __grid_constant__ kvant::cuda::$5 params) {
  using namespace kvant::cuda;
  $6<$7>::Run(params);
}
)";

}  // namespace

KernelSpec MakeKernel(const KernelRow& row, absl::Span<const NamedTraits> all, int threads,
                      int blocks_per_multiprocessor) {
  KernelSpec spec;
  std::string traits;
  std::vector<const char*> names;
  for (const auto& [name, words] : all) {
    absl::SubstituteAndAppend(&traits, kTraits, name, row.traits, absl::StrJoin(words, ", "));
    spec.traits.insert(spec.traits.end(), words.begin(), words.end());
    names.push_back(name);
  }
  spec.source.name = spec.source.entry = row.entry;
  spec.source.text = absl::Substitute(kText, row.header, traits, threads, blocks_per_multiprocessor,
                                      row.entry, row.params, row.name, absl::StrJoin(names, ", "));
  spec.threads = threads;
  spec.blocks_per_multiprocessor = blocks_per_multiprocessor;
  return spec;
}

}  // namespace kvant::cuda
