// The safetensors format: 8 bytes with the length of a JSON header, little-end
// first, the header {"name": {"dtype", "shape", "data_offsets": [begin, end]}},
// then the data that the offsets count in.
#ifndef KVANT_TOOLS_SAFETENSORS_H_
#define KVANT_TOOLS_SAFETENSORS_H_

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/graph/data_type.h"
#include "kvant/graph/logical_tensor.h"

namespace kvant {

// One tensor, dense row-major.
struct SafeTensor {
  DataType type = kUndef;  // no type below one byte exists in the format
  Dims dims;
  std::vector<std::byte> data;
};

using SafeTensors = std::map<std::string, SafeTensor>;

// kInvalidArguments for anything that does not hold together: a header beyond
// the text or not JSON, an unknown dtype, a shape that overflows or does not
// match its offsets, offsets outside the data or overlapping.
absl::StatusOr<SafeTensors> ParseSafeTensors(std::string_view bytes);
absl::StatusOr<SafeTensors> ReadSafeTensors(const std::string& path);

std::string SerializeSafeTensors(const SafeTensors& tensors);
absl::Status WriteSafeTensors(const std::string& path, const SafeTensors& tensors);

}  // namespace kvant

#endif  // KVANT_TOOLS_SAFETENSORS_H_
