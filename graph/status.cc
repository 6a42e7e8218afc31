#include "kvant/graph/status.h"

#include <cstdint>
#include <exception>
#include <new>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kvant/graph/data_type.h"

namespace kvant {
namespace {

constexpr char kPayloadUrl[] = "kvant/error_kind";

constexpr std::string_view kNames[] = {"none",          "invalid_graph",     "invalid_graph_op",
                                       "invalid_shape", "invalid_data_type", "invalid_arguments",
                                       "unimplemented", "invalid_json"};

// Bytes of the character that `text` begins with; 0 if that is not UTF-8, or a control character.
size_t PrintableBytes(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<uint8_t>(text[i]); };
  if (byte(0) < 0x80) return byte(0) < 0x20 || byte(0) == 0x7f ? 0 : 1;
  const size_t bytes = byte(0) < 0xc2 ? 0 : byte(0) < 0xe0 ? 2 : byte(0) < 0xf0 ? 3 : 4;
  if (bytes == 0 || byte(0) > 0xf4 || bytes > text.size()) return 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Control characters once more, numbers written too long, halves of pairs, beyond the last.
  const bool from_a0 = byte(0) == 0xc2 || byte(0) == 0xe0;
  const uint8_t least = from_a0 ? 0xa0 : byte(0) == 0xf0 ? 0x90 : 0x80;
  const uint8_t most = byte(0) == 0xed ? 0x9f : byte(0) == 0xf4 ? 0x8f : 0xbf;
  return byte(1) < least || byte(1) > most ? 0 : bytes;
}

}  // namespace

std::string_view ErrorKindName(ErrorKind kind) { return kNames[static_cast<size_t>(kind)]; }

absl::Status MakeError(ErrorKind kind, std::string_view message) {
  const auto code = kind == ErrorKind::kUnimplemented ? absl::StatusCode::kUnimplemented
                                                      : absl::StatusCode::kInvalidArgument;
  absl::Status status(code, Printable(message));
  const std::string_view name = ErrorKindName(kind);
  status.SetPayload(kPayloadUrl, absl::Cord(absl::string_view(name.data(), name.size())));
  return status;
}

ErrorKind ErrorKindOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayloadUrl);
  if (!payload) return ErrorKind::kNone;
  return FindByName<ErrorKind>(kNames, std::string(*payload)).value_or(ErrorKind::kNone);
}

std::string Printable(std::string_view text) {
  std::string printable;
  printable.reserve(text.size());
  while (!text.empty()) {
    const size_t bytes = PrintableBytes(text);
    if (bytes > 0) {
      printable.append(text.substr(0, bytes));
    } else if (text[0] == '\n') {
      printable += "\\n";
    } else {
      absl::StrAppend(&printable, "\\x", absl::Hex(static_cast<uint8_t>(text[0]), absl::kZeroPad2));
    }
    text.remove_prefix(bytes > 0 ? bytes : 1);
  }
  return printable;
}

absl::Status StatusOfException() {
  try {
    try {
      throw;
    } catch (const std::bad_alloc&) {
      return absl::ResourceExhaustedError("there is not enough memory");
    } catch (const std::exception& error) {
      return absl::InternalError(error.what());
    } catch (...) {
      return absl::InternalError("an exception that says nothing of itself");
    }
  } catch (...) {  // not even for the message; a code alone takes none
    return absl::Status(absl::StatusCode::kResourceExhausted, "");
  }
}

}  // namespace kvant
