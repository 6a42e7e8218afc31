// Calls of the C ABI: kvant.Error for what fails, handles that free themselves, and what a fork
// leaves behind.
#ifndef KVANT_PYTHON_CORE_CALL_H_
#define KVANT_PYTHON_CORE_CALL_H_

#include <kvant/integrations/c/kvant_c.h>
#include <nanobind/nanobind.h>

#include <memory>
#include <string>

namespace kvant_python {

namespace nb = nanobind;

// Throws the class of kvant.Error that fits.
[[noreturn]] void Fail(kvant_status kind, const std::string& sentence);
[[noreturn]] inline void Invalid(const std::string& sentence) {
  Fail(KVANT_INVALID_ARGUMENTS, sentence);
}
// Throws what the thread's last call says went wrong, if it did.
void Check(kvant_status status);

// A call that computes: other Python threads run meanwhile.
template <typename F>
void Run(const F& call) {
  kvant_status status;
  {
    nb::gil_scoped_release others;
    status = call();
  }
  Check(status);
}

// Worker threads do not survive a fork: a child of a process that had engines would wait for them
// forever. It is refused engines and all that is made of them, and frees none of it.
void EngineMade();
void Forked();
bool InForkedChild();
void CheckNotForked();
inline constexpr char kForked[] =
    "this process was forked from one that had used kvant, whose worker threads it does not have: "
    "use kvant only in children, or start them with multiprocessing's \"spawn\"";

template <auto destroy>
struct Destroy {
  template <typename T>
  void operator()(T* handle) const {
    if (!InForkedChild()) destroy(handle);
  }
};
using GraphHandle = std::unique_ptr<kvant_graph, Destroy<kvant_graph_destroy>>;
using BuilderHandle = std::unique_ptr<kvant_builder, Destroy<kvant_builder_destroy>>;
using PartitionsHandle = std::unique_ptr<kvant_partitions, Destroy<kvant_partitions_destroy>>;
using EngineHandle = std::unique_ptr<kvant_engine, Destroy<kvant_engine_destroy>>;
using CompiledHandle = std::unique_ptr<kvant_compiled, Destroy<kvant_compiled_destroy>>;
using CacheHandle = std::unique_ptr<kvant_cache, Destroy<kvant_cache_destroy>>;
using AttentionHandle = std::unique_ptr<kvant_attention, Destroy<kvant_attention_destroy>>;

struct Graph {
  GraphHandle handle;
};
struct Engine {
  EngineHandle handle;
};

}  // namespace kvant_python

#endif  // KVANT_PYTHON_CORE_CALL_H_
