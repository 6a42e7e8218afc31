#include "kvant/integrations/onednn/settings.h"

#include <cstdlib>
#include <string_view>

#include "kvant/graph/verbose.h"

namespace kvant::dnnl_abi {

bool TurnedOff() {
  static const bool off = [] {
    const char* const value = std::getenv("KVANT_DNNL_GRAPH");
    return value != nullptr && std::string_view(value) == "0";
  }();
  return off;
}

void Tell(absl::FunctionRef<std::string()> describe) {
  static std::FILE* const file = OpenVerboseFile("KVANT_DNNL_GRAPH_VERBOSE");
  if (file != nullptr) WriteVerboseLine(file, "kvant,dnnl_graph," + describe());
}

}  // namespace kvant::dnnl_abi
