#include "kvant/tools/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"
#include "kvant/tools/files.h"

namespace kvant {
namespace {

using Json = nlohmann::json;

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeader = 100 << 20;  // the format's own limit
// Of what has no size, such as a pipe: its header may ask for any number.
constexpr uint64_t kMaxUnsizedData = uint64_t{4} << 30;

struct TypeName {
  std::string_view name;
  DataType type;
};
constexpr TypeName kTypeNames[] = {
    {"F32", kF32},        {"F16", kF16}, {"BF16", kBF16}, {"F8_E4M3", kF8E4M3}, {"I8", kS8},
    {"F8_E5M2", kF8E5M2}, {"U8", kU8},   {"I32", kS32},   {"I64", kS64},        {"BOOL", kBoolean},
};

// Packed types are written as the bytes that they lie in.
std::string FormatName(DataType type) {
  for (const TypeName& row : kTypeNames) {
    if (row.type == type) return std::string(row.name);
  }
  return "U8";
}

absl::Status Bad(const std::string& why) { return InvalidArguments("safetensors: ", why); }

std::optional<uint64_t> AsUnsigned(const Json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  if (!value.is_number_unsigned() && value.get<int64_t>() < 0) return std::nullopt;
  return value.get<uint64_t>();
}

absl::StatusOr<Dims> ParseShape(const std::string& name, const Json& shape) {
  if (!shape.is_array() || shape.size() > kMaxRank) {
    return Bad(absl::StrCat("'", name, "': shape is not an array of at most ", kMaxRank));
  }
  Dims dims;
  for (const Json& entry : shape) {
    const std::optional<uint64_t> dim = AsUnsigned(entry);
    if (!dim || *dim > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Bad(absl::StrCat("'", name, "': shape holds ", entry.dump()));
    }
    dims.push_back(static_cast<int64_t>(*dim));
  }
  return dims;
}

struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
};

absl::StatusOr<Range> ParseRange(const std::string& name, const Json& offsets, uint64_t size) {
  if (!offsets.is_array() || offsets.size() != 2) {
    return Bad(absl::StrCat("'", name, "': data_offsets is not [begin, end]"));
  }
  const std::optional<uint64_t> begin = AsUnsigned(offsets[0]);
  const std::optional<uint64_t> end = AsUnsigned(offsets[1]);
  if (!begin || !end || *begin > *end || *end > size) {
    return Bad(absl::StrCat("'", name, "': data_offsets ", offsets.dump(), " do not lie in the ",
                            size, " bytes of data"));
  }
  return Range{*begin, *end};
}

absl::StatusOr<std::pair<SafeTensor, Range>> ParseTensor(const std::string& name, const Json& entry,
                                                         std::string_view data) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() ||
      !entry.contains("shape") || !entry.contains("data_offsets")) {
    return Bad(absl::StrCat("'", name, "' lacks dtype, shape or data_offsets"));
  }
  const std::string& dtype = entry["dtype"].get_ref<const std::string&>();
  const auto* known = std::find_if(std::begin(kTypeNames), std::end(kTypeNames),
                                   [&](const TypeName& row) { return row.name == dtype; });
  if (known == std::end(kTypeNames)) {
    return Bad(absl::StrCat("'", name, "' has a dtype that is not read here, '", dtype, "'"));
  }
  SafeTensor tensor;
  tensor.type = known->type;
  KVANT_ASSIGN_OR_RETURN(tensor.dims, ParseShape(name, entry["shape"]));
  KVANT_ASSIGN_OR_RETURN(const Range range, ParseRange(name, entry["data_offsets"], data.size()));
  const std::optional<int64_t> elements = CheckedProduct(tensor.dims);
  const int64_t bytes_each = BitsOf(tensor.type) / 8;
  const uint64_t bytes = range.end - range.begin;
  if (!elements || static_cast<uint64_t>(*elements) != bytes / bytes_each ||
      bytes % bytes_each != 0) {
    return Bad(absl::StrCat("'", name, "': ", dtype, " of shape [", DimsToString(tensor.dims),
                            "] does not fill its ", bytes, " bytes"));
  }
  tensor.data.resize(bytes);
  if (bytes > 0) std::memcpy(tensor.data.data(), data.data() + range.begin, bytes);
  return std::make_pair(std::move(tensor), range);
}

absl::Status CheckOverlap(std::vector<std::pair<Range, std::string>> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
  uint64_t end = 0;
  std::string last;
  for (const auto& [range, name] : ranges) {
    if (range.begin == range.end) continue;
    if (range.begin < end) return Bad(absl::StrCat("'", name, "' overlaps '", last, "'"));
    end = range.end;
    last = name;
  }
  return absl::OkStatus();
}

// What the first bytes say of the header's length.
absl::StatusOr<uint64_t> ParseLength(std::string_view bytes) {
  if (bytes.size() < kLengthBytes) return Bad("shorter than the 8 bytes of its header's length");
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length |= uint64_t{static_cast<uint8_t>(bytes[i])} << (8 * i);
  }
  if (length <= kMaxHeader) return length;
  return Bad(absl::StrCat("a header of ", length, " bytes, where ", kMaxHeader, " are the most"));
}

absl::StatusOr<Json> ParseHeader(std::string_view text, uint64_t length) {
  if (text.size() < length) {
    return Bad(
        absl::StrCat("a header of ", length, " bytes, of which ", text.size(), " are in the file"));
  }
  // The real header nests three deep; the library's parser would recurse on as
  // many brackets as there are bytes.
  bool too_deep = false;
  Json header = Json::parse(
      text,
      [&](int depth, Json::parse_event_t, Json&) {
        too_deep |= depth > 4;
        return !too_deep;
      },
      /*allow_exceptions=*/false);
  if (too_deep || !header.is_object()) return Bad("the header is not a JSON object");
  return header;
}

// How many bytes of data the header speaks of.
uint64_t DataBytes(const Json& header) {
  uint64_t most = 0;
  for (const auto& [name, entry] : header.items()) {
    if (!entry.is_object() || !entry.contains("data_offsets")) continue;
    const Json& offsets = entry["data_offsets"];
    if (!offsets.is_array() || offsets.size() != 2) continue;
    most = std::max(most, AsUnsigned(offsets[1]).value_or(0));
  }
  return most;
}

// rest: bytes that the header does not speak of.
absl::StatusOr<SafeTensors> ParseTensors(const Json& header, std::string_view data, uint64_t rest) {
  SafeTensors tensors;
  std::vector<std::pair<Range, std::string>> ranges;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    KVANT_ASSIGN_OR_RETURN(auto parsed, ParseTensor(name, entry, data));
    ranges.emplace_back(parsed.second, name);
    // Checked before the copies pile up: overlapping ranges could multiply a file's size.
    KVANT_RETURN_IF_ERROR(ranges.size() % 64 == 0 ? CheckOverlap(ranges) : absl::OkStatus());
    tensors[name] = std::move(parsed.first);
  }
  uint64_t bytes = 0;
  for (const auto& [range, name] : ranges) bytes += range.end - range.begin;
  KVANT_RETURN_IF_ERROR(CheckOverlap(std::move(ranges)));
  if (const uint64_t spoken_of = DataBytes(header); bytes != spoken_of) {
    return Bad(absl::StrCat("tensors take ", bytes, " of the ", spoken_of,
                            " bytes that its header speaks of; a name may stand there twice"));
  }
  if (rest == 0) return tensors;
  return Bad(absl::StrCat(rest, " bytes follow the data that its header speaks of"));
}

// No more than the header speaks of: what follows may have no end.
absl::StatusOr<SafeTensors> ReadFrom(InputFile& file) {
  KVANT_ASSIGN_OR_RETURN(const std::string first, file.Read(kLengthBytes));
  KVANT_ASSIGN_OR_RETURN(const uint64_t length, ParseLength(first));
  KVANT_ASSIGN_OR_RETURN(const std::string text, file.Read(length));
  KVANT_ASSIGN_OR_RETURN(const Json header, ParseHeader(text, length));
  const uint64_t bytes = DataBytes(header);
  const uint64_t before = kLengthBytes + length;
  const uint64_t most = file.size() ? std::max(*file.size(), before) - before : kMaxUnsizedData;
  if (bytes > most) {
    return Bad(absl::StrCat(
        "its header speaks of ", bytes, " bytes of data, ",
        file.size() ? "of which the file has " : "and what is no regular file may have ", most));
  }
  KVANT_ASSIGN_OR_RETURN(const std::string data, file.Read(bytes));
  return ParseTensors(header, data, file.size() ? most - bytes : 0);
}

}  // namespace

absl::StatusOr<SafeTensors> ParseSafeTensors(std::string_view bytes) {
  KVANT_ASSIGN_OR_RETURN(const uint64_t length, ParseLength(bytes));
  const std::string_view rest = bytes.substr(kLengthBytes);
  KVANT_ASSIGN_OR_RETURN(const Json header, ParseHeader(rest.substr(0, length), length));
  const std::string_view data = rest.substr(length);
  return ParseTensors(header, data, data.size() - std::min(data.size(), DataBytes(header)));
}

absl::StatusOr<SafeTensors> ReadSafeTensors(const std::string& path) {
  absl::StatusOr<InputFile> file = InputFile::Open(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<SafeTensors> tensors = ReadFrom(*file);
  if (!tensors.ok()) {
    return InvalidArguments(path, ": ", tensors.status().message());
  }
  return tensors;
}

std::string SerializeSafeTensors(const SafeTensors& tensors) {
  Json header = Json::object();
  uint64_t at = 0;
  for (const auto& [name, tensor] : tensors) {
    const uint64_t end = at + tensor.data.size();
    header[name] = {{"dtype", FormatName(tensor.type)},
                    {"shape", std::vector<int64_t>(tensor.dims.begin(), tensor.dims.end())},
                    {"data_offsets", {at, end}}};
    at = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data starts aligned, as writers do

  std::string out;
  out.reserve(kLengthBytes + text.size() + at);
  for (size_t i = 0; i < kLengthBytes; ++i) {
    out.push_back(static_cast<char>(uint64_t{text.size()} >> (8 * i) & 0xff));
  }
  out += text;
  for (const auto& [name, tensor] : tensors) {
    out.append(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size());
  }
  return out;
}

absl::Status WriteSafeTensors(const std::string& path, const SafeTensors& tensors) {
  return WriteFile(path, SerializeSafeTensors(tensors));
}

}  // namespace kvant
