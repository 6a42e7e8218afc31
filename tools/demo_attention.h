// The demo's attention: causal, grouped queries, over a cache in any format.
#ifndef KVANT_TOOLS_DEMO_ATTENTION_H_
#define KVANT_TOOLS_DEMO_ATTENTION_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/backends/engine.h"
#include "kvant/tools/demo_cache.h"

namespace kvant {

// One layer of a model, as its attention reads it: q [1, Hkv, R, S, D] in f16, k
// and v [1, Hkv, 1, S, D].
struct Layer {
  int number = 0;
  FilledTensor q;
  std::vector<float> k, v;
  Dims kv_dims;
};

// The layers (tensors layerN.q, layerN.k, layerN.v) of a safetensors file, in
// order of number. All must have the shapes of the first.
absl::StatusOr<std::vector<Layer>> ReadLayers(const std::string& path);

class Attention {
 public:
  // Builds the graph that reads keys and values stored like these, and compiles it
  // as one partition. With `require_fused`, an engine that could only run it op by
  // op is an error.
  static absl::StatusOr<Attention> Create(const Engine& engine, const LogicalTensor& q,
                                          const StoredTensor& k, const StoredTensor& v,
                                          bool require_fused);

  // The output [1, Hkv, R, S, D]. `best_ms`, if not null: the best of several runs.
  absl::StatusOr<std::vector<float>> Run(const FilledTensor& q, const StoredTensor& k,
                                         const StoredTensor& v, double* best_ms = nullptr) const;

  std::string kernel() const { return compiled_.kernel(); }

 private:
  Attention(CompiledPartition compiled, Stream stream)
      : compiled_(std::move(compiled)), stream_(std::move(stream)) {}
  CompiledPartition compiled_;
  Stream stream_;
};

// Root of sum (a - b)^2 / sum b^2.
double RelativeRms(const std::vector<float>& a, const std::vector<float>& b);

}  // namespace kvant

#endif  // KVANT_TOOLS_DEMO_ATTENTION_H_
