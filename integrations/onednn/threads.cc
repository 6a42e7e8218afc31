#include "kvant/integrations/onednn/threads.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include "kvant/graph/status.h"
#include "kvant/integrations/onednn/next.h"

namespace kvant::dnnl_abi {
namespace {

int OpenMpThreads() {
  static const auto most = reinterpret_cast<int (*)()>(dlsym(NextLibrary(), "omp_get_max_threads"));
  return most == nullptr ? 1 : std::max(most(), 1);
}

// oneTBB's own number, or less where SYCL's CPU device has been told to be smaller.
int TbbThreads(bool sycl) {
  const char* const units = sycl ? std::getenv("DPCPP_CPU_NUM_CUS") : nullptr;
  return units == nullptr ? 0 : std::max(std::atoi(units), 0);
}

absl::StatusOr<Engine> MakeEngine(unsigned runtime, int threads) {
  EngineOptions options;
  options.backends = {"cpu"};
  switch (runtime) {
    case kSequential:
      options.executor = MakeSerialExecutor();
      break;
    case kOpenMp:
      options.executor = MakeOpenMpExecutor(threads, NextLibrary());
      if (options.executor == nullptr) {
        return MakeError(ErrorKind::kUnimplemented, "oneDNN's OpenMP runtime has no GOMP_parallel");
      }
      break;
    case kTbb:
    case kSycl:
      options.executor = MakeTbbExecutor(threads);
      break;
    default:
      return MakeError(ErrorKind::kUnimplemented,
                       runtime == kThreadPool ? "oneDNN runs on a thread pool of the client's"
                                              : "oneDNN has no CPU engine");
  }
  return Engine::Create(options);
}

}  // namespace

absl::StatusOr<Engine> ClientEngine() {
  // Never destroyed: clients' static objects may compile and execute after main.
  static auto* const mutex = new std::mutex();
  static auto* const engines = new std::map<int, Engine>();
  static const unsigned runtime = NextVersion().cpu_runtime;
  const int threads = runtime == kOpenMp ? OpenMpThreads() : TbbThreads(runtime == kSycl);
  const std::lock_guard<std::mutex> lock(*mutex);
  if (const auto found = engines->find(threads); found != engines->end()) return found->second;
  KVANT_ASSIGN_OR_RETURN(Engine engine, MakeEngine(runtime, threads));
  return engines->emplace(threads, std::move(engine)).first->second;
}

}  // namespace kvant::dnnl_abi
