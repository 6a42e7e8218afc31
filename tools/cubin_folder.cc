#include "kvant/tools/cubin_folder.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"
#include "kvant/tools/files.h"

namespace kvant {

using Json = nlohmann::ordered_json;

absl::Status WriteCubin(const std::string& folder, const std::string& name,
                        const cuda::KernelSpec& spec, const cuda::Cubin& cubin,
                        const cuda::DeviceProperties& device) {
  if (!cubin.stats) {
    return absl::InternalError(absl::StrCat("what ptxas says of kernel '", spec.source.name,
                                            "' for ", cubin.arch, " was not understood"));
  }
  const cuda::KernelStats& stats = *cubin.stats;
  const size_t shared_bytes = spec.shared_bytes + static_cast<size_t>(stats.static_shared_bytes);
  Json json = {
      {"kernel", spec.source.name},
      {"entry", spec.source.entry},
      {"arch", cubin.arch},
      {"nvrtc", absl::StrCat(cubin.nvrtc_major, ".", cubin.nvrtc_minor)},
      {"threads", spec.threads},
      {"shared_bytes", spec.shared_bytes},
      {"blocks_per_multiprocessor", spec.blocks_per_multiprocessor},
      {"register_limit", cuda::RegisterLimit(spec.threads, spec.blocks_per_multiprocessor)},
      {"blocks_that_fit",
       cuda::BlocksPerMultiprocessor(device, spec.threads, stats.registers, shared_bytes)},
      {"registers", stats.registers},
      {"spill_store_bytes", stats.spill_store_bytes},
      {"spill_load_bytes", stats.spill_load_bytes},
      {"stack_bytes", stats.stack_bytes},
  };
  if (spec.round.elements > 0) {
    json["round"] = {{"elements", spec.round.elements}, {"loops", spec.round.loops}};
  }
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return absl::UnavailableError(absl::StrCat(folder, ": ", error.message()));
  const std::string path = absl::StrCat(folder, "/", name);
  KVANT_RETURN_IF_ERROR(WriteFile(path + ".cubin", cubin.bytes));
  return WriteFile(path + ".json", json.dump(2) + "\n");
}

}  // namespace kvant
