// What tests of the C ABI share: handles that destroy themselves, and tensors.
#ifndef KVANT_TESTS_INTEGRATIONS_C_ABI_H_
#define KVANT_TESTS_INTEGRATIONS_C_ABI_H_

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "kvant/integrations/c/kvant_c.h"

namespace kvant::c_abi {

template <auto destroy>
struct Destroy {
  template <typename T>
  void operator()(T* handle) const {
    destroy(handle);
  }
};
using Graph = std::unique_ptr<kvant_graph, Destroy<kvant_graph_destroy>>;
using Builder = std::unique_ptr<kvant_builder, Destroy<kvant_builder_destroy>>;
using Engine = std::unique_ptr<kvant_engine, Destroy<kvant_engine_destroy>>;
using Compiled = std::unique_ptr<kvant_compiled, Destroy<kvant_compiled_destroy>>;
using Cache = std::unique_ptr<kvant_cache, Destroy<kvant_cache_destroy>>;
using Attention = std::unique_ptr<kvant_attention, Destroy<kvant_attention_destroy>>;
using Partitions = std::unique_ptr<kvant_partitions, Destroy<kvant_partitions_destroy>>;

#define EXPECT_OK(call) EXPECT_EQ(call, KVANT_OK) << kvant_error()
#define ASSERT_OK(call) ASSERT_EQ(call, KVANT_OK) << kvant_error()

inline Engine MakeEngine(const char* backends = nullptr) {
  kvant_engine_options options = {};
  options.size = sizeof options;
  options.threads = 2;
  options.backends = backends;
  kvant_engine* engine = nullptr;
  EXPECT_OK(kvant_engine_create(&options, &engine));
  return Engine(engine);
}

// A DLTensor with its memory.
template <typename T>
struct Array {
  std::vector<T> data;
  std::vector<int64_t> dims, strides;
  DLTensor dl{};

  Array(std::vector<int64_t> shape, uint8_t code, uint8_t bits = sizeof(T) * 8) : dims(shape) {
    int64_t count = 1;
    for (const int64_t dim : dims) count *= dim;
    data.resize(static_cast<size_t>(count));
    dl.device = {kDLCPU, 0};
    dl.dtype = {code, bits, 1};
    dl.data = data.data();
    dl.ndim = static_cast<int>(dims.size());
    dl.shape = dims.data();
  }
  Array(Array&&) = delete;

  template <typename F>
  void Fill(const F& f) {
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<T>(f(static_cast<double>(i)));
  }
};

}  // namespace kvant::c_abi

#endif  // KVANT_TESTS_INTEGRATIONS_C_ABI_H_
