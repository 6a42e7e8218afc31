// kvant precompile: fills the cache of compiled CUDA kernels. Needs no GPU.
#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/cuda_backend.h"
#include "kvant/backends/cuda/runtime/device_properties.h"
#include "kvant/backends/cuda/runtime/jit.h"
#include "kvant/graph/status.h"
#include "kvant/tools/command.h"
#include "kvant/tools/cubin_folder.h"

namespace kvant {
namespace {

struct PrecompileArguments {
  GraphArguments graph_arguments;
  std::vector<std::string> archs;
  std::string cache;
  std::string cubins;

  void AddTo(CLI::App& command) {
    graph_arguments.AddGraphTo(command);
    command
        .add_option(
            "--arch", archs,
            "What to compile for: sm_80, sm_86, sm_87, sm_89, sm_90a, sm_100a, sm_120; may be "
            "given more than once")
        ->allow_extra_args(false)  // what follows it is the graph
        ->required();
    command.add_option("--cache", cache,
                       "The folder; else that of KVANT_CACHE_DIR, XDG_CACHE_HOME/kvant or "
                       "~/.cache/kvant");
    command.add_option(
        "--cubin", cubins,
        "Another folder, for plain cubins that tools can read, NAME.NUMBER.ARCH.cubin "
        "and what is known of each as .json; NAME is the graph file's");
  }

  absl::StatusOr<int> Run() const {
    KVANT_ASSIGN_OR_RETURN(const Graph graph, graph_arguments.Load());
    KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions,
                           PartitionGraph(graph, graph_arguments.partition_options()));
    cuda::Jit jit({.cache_dir = cache});
    int kernels = 0;
    for (const std::string& arch : std::set<std::string>(archs.begin(), archs.end())) {
      KVANT_ASSIGN_OR_RETURN(const cuda::DeviceProperties device, cuda::PropertiesOf(arch));
      int number = 0;  // of the kernel in the graph
      for (const Partition& partition : partitions) {
        const absl::StatusOr<std::vector<cuda::KernelSpec>> specs =
            cuda::KernelsOf(partition, device);
        if (!specs.ok()) {
          std::printf("partition %d: no kernel: %s\n", partition.id(),
                      std::string(specs.status().message()).c_str());
          continue;
        }
        for (const cuda::KernelSpec& spec : *specs) {
          KVANT_ASSIGN_OR_RETURN(const std::shared_ptr<const cuda::Cubin> cubin,
                                 jit.Get(spec.source, arch));
          if (!cubins.empty()) {
            const std::string name =
                absl::StrCat(std::filesystem::path(graph_arguments.path).stem().string(), ".",
                             number++, ".", arch);
            KVANT_RETURN_IF_ERROR(WriteCubin(cubins, name, spec, *cubin, device));
          }
          ++kernels;
          Print(partition.id(), spec, arch, *cubin);
        }
      }
    }
    if (!jit.cache_note().empty()) {
      return absl::FailedPreconditionError(jit.cache_note());
    }
    if (kernels == 0) {
      return MakeError(ErrorKind::kUnimplemented, graph_arguments.path,
                       ": no partition runs on a GPU");
    }
    std::printf("%d kernels in %s\n", kernels, jit.cache_dir().c_str());
    return 0;
  }

  static void Print(int partition, const cuda::KernelSpec& spec, const std::string& arch,
                    const cuda::Cubin& cubin) {
    std::printf("partition %d: %s for %s, %zu bytes%s\n", partition, spec.source.name.c_str(),
                arch.c_str(), cubin.bytes.size(),
                cubin.stats ? absl::StrCat(", ", cubin.stats->registers, " registers, ",
                                           cubin.stats->spill_store_bytes, " bytes spilled")
                                  .c_str()
                            : "");
  }
};

}  // namespace

void AddPrecompileCommand(CLI::App& app, Action& action) {
  AddCommand<PrecompileArguments>(app, action, "precompile",
                                  "Compile a graph's CUDA kernels ahead of time into the folder "
                                  "where they are looked for; needs NVRTC, but no GPU");
}

}  // namespace kvant
