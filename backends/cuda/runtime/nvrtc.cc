#include "kvant/backends/cuda/runtime/nvrtc.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/backends/cuda/runtime/embedded_sources.h"
#include "kvant/backends/cuda/runtime/shared_library.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {
namespace {

// The part of nvrtc.h that is called here.
using nvrtcResult = int;
using nvrtcProgram = struct _nvrtcProgram*;
constexpr nvrtcResult NVRTC_SUCCESS = 0;

// ENTRY(member, exported symbol, result, parameters).
#define KVANT_NVRTC_ENTRIES(ENTRY)                                                            \
  ENTRY(GetErrorString, nvrtcGetErrorString, const char*, (nvrtcResult result))               \
  ENTRY(Version, nvrtcVersion, nvrtcResult, (int* major, int* minor))                         \
  ENTRY(GetNumSupportedArchs, nvrtcGetNumSupportedArchs, nvrtcResult, (int* count))           \
  ENTRY(GetSupportedArchs, nvrtcGetSupportedArchs, nvrtcResult, (int* archs))                 \
  ENTRY(CreateProgram, nvrtcCreateProgram, nvrtcResult,                                       \
        (nvrtcProgram * program, const char* text, const char* name, int header_count,        \
         const char* const* header_texts, const char* const* header_names))                   \
  ENTRY(DestroyProgram, nvrtcDestroyProgram, nvrtcResult, (nvrtcProgram * program))           \
  ENTRY(CompileProgram, nvrtcCompileProgram, nvrtcResult,                                     \
        (nvrtcProgram program, int option_count, const char* const* options))                 \
  ENTRY(GetCUBINSize, nvrtcGetCUBINSize, nvrtcResult, (nvrtcProgram program, size_t * bytes)) \
  ENTRY(GetCUBIN, nvrtcGetCUBIN, nvrtcResult, (nvrtcProgram program, char* bytes))            \
  ENTRY(GetProgramLogSize, nvrtcGetProgramLogSize, nvrtcResult,                               \
        (nvrtcProgram program, size_t * bytes))                                               \
  ENTRY(GetProgramLog, nvrtcGetProgramLog, nvrtcResult, (nvrtcProgram program, char* text))

absl::Status Unusable(const std::string& message) {
  return MakeError(ErrorKind::kUnimplemented, message);
}

std::vector<std::string> UsualNames() {
  std::vector<std::string> names;
  std::vector<std::string> folders = {"", "/usr/local/cuda/lib64/"};
#ifdef KVANT_NVRTC_DIR
  folders.push_back(KVANT_NVRTC_DIR "/");
#endif
  for (const std::string& folder : folders) {
    for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) {
      names.push_back(folder + name);
    }
  }
  return names;
}

// The number that stands before `suffix` in `text`.
std::optional<int64_t> NumberBefore(std::string_view text, std::string_view suffix) {
  const size_t end = text.find(suffix);
  if (end == std::string_view::npos) return std::nullopt;
  size_t begin = end;
  while (begin > 0 && text[begin - 1] >= '0' && text[begin - 1] <= '9') --begin;
  if (begin == end || end - begin > 15) return std::nullopt;
  return std::stoll(std::string(text.substr(begin, end - begin)));
}

}  // namespace

struct NvrtcApi {
#define KVANT_NVRTC_MEMBER(member, symbol, result, parameters) result(*member) parameters = nullptr;
  KVANT_NVRTC_ENTRIES(KVANT_NVRTC_MEMBER)
#undef KVANT_NVRTC_MEMBER
};

namespace {

// The name of the first entry that is missing; null if all are there.
const char* Resolve(const SharedLibrary& library, NvrtcApi& api) {
#define KVANT_NVRTC_RESOLVE(member, symbol, result, parameters)                 \
  api.member = reinterpret_cast<result(*) parameters>(library.Symbol(#symbol)); \
  if (api.member == nullptr) return #symbol;
  KVANT_NVRTC_ENTRIES(KVANT_NVRTC_RESOLVE)
#undef KVANT_NVRTC_RESOLVE
  return nullptr;
}

// NVRTC opens a second library by its name alone, and up to 13.0 finds it only where the loader
// looks. One that lies beside it and is open already is found too.
void OpenBuiltins(const std::string& nvrtc_path, int major, int minor) {
  const std::string folder = nvrtc_path.substr(0, nvrtc_path.rfind('/') + 1);
  // Where there is none, NVRTC's own error tells when it is needed.
  SharedLibrary::Open({absl::StrCat(folder, "libnvrtc-builtins.so.", major, ".", minor)})
      .IgnoreError();
}

// A program under compilation, and the sentences of what goes wrong.
class Program {
 public:
  explicit Program(const NvrtcApi& api) : api_(api) {}
  ~Program() {
    if (program_ != nullptr) api_.DestroyProgram(&program_);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  nvrtcResult Create(const KernelSource& source) {
    std::vector<const char*> names, texts;
    for (const EmbeddedSource& header : EmbeddedSources()) {
      names.push_back(header.name);
      texts.push_back(header.text);
    }
    return api_.CreateProgram(&program_, source.text.c_str(), (source.name + ".cu").c_str(),
                              static_cast<int>(names.size()), texts.data(), names.data());
  }

  nvrtcResult Compile(int major, int minor, const std::string& arch_option) {
    std::vector<const char*> options = {arch_option.c_str()};
    for (const NvrtcOption& option : NvrtcOptions()) {
      if (std::pair(major, minor) < std::pair(option.major, option.minor)) continue;
      options.push_back(option.text);
    }
    return api_.CompileProgram(program_, static_cast<int>(options.size()), options.data());
  }

  std::string Log() const {
    std::string log = Text([&](size_t* bytes) { return api_.GetProgramLogSize(program_, bytes); },
                           [&](char* text) { return api_.GetProgramLog(program_, text); })
                          .value_or("");
    return log.substr(0, log.find('\0'));
  }

  std::optional<std::string> Image() const {
    return Text([&](size_t* bytes) { return api_.GetCUBINSize(program_, bytes); },
                [&](char* text) { return api_.GetCUBIN(program_, text); });
  }

 private:
  template <class Size, class Get>
  static std::optional<std::string> Text(Size size, Get get) {
    size_t bytes = 0;
    if (size(&bytes) != NVRTC_SUCCESS || bytes == 0) return std::nullopt;
    std::string text(bytes, '\0');
    if (get(text.data()) != NVRTC_SUCCESS) return std::nullopt;
    return text;
  }

  const NvrtcApi& api_;
  nvrtcProgram program_ = nullptr;
};

// The digits of "sm_90a".
int ArchNumber(std::string_view arch) {
  int number = 0;
  for (const char c : arch) {
    if (c >= '0' && c <= '9') number = number * 10 + (c - '0');
  }
  return number;
}

}  // namespace

absl::Span<const NvrtcOption> NvrtcOptions() {
  static constexpr NvrtcOption kOptions[] = {
      {"--std=c++20"},
      // Without declarations of textures and the like: a quarter of the time.
      {"--minimal", 12, 4},
      {"--ptxas-options=-v"},
  };
  return kOptions;
}

std::optional<KernelStats> ParsePtxasLog(std::string_view log, std::string_view entry) {
  // The entry's part: up to that of the next one, or the end.
  constexpr std::string_view kBegin = "Compiling entry function '";
  const std::string own = absl::StrCat(std::string(kBegin), std::string(entry), "'");
  const size_t begin = log.find(own);
  if (begin == std::string_view::npos) return std::nullopt;
  std::string_view rest = log.substr(begin + own.size());
  rest = rest.substr(0, rest.find(kBegin));

  KernelStats stats;
  bool has_registers = false, has_spills = false;
  while (!rest.empty()) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    // A line per function: the entry, and what it calls.
    if (const auto bytes = NumberBefore(line, " bytes spill stores")) {
      has_spills = true;
      stats.spill_store_bytes += *bytes;
    }
    stats.spill_load_bytes += NumberBefore(line, " bytes spill loads").value_or(0);
    stats.stack_bytes += NumberBefore(line, " bytes stack frame").value_or(0);
    if (const auto registers = NumberBefore(line, " registers")) {
      has_registers = true;
      stats.registers = static_cast<int>(*registers);
      stats.static_shared_bytes = NumberBefore(line, " bytes smem").value_or(0);
    }
  }
  if (!has_registers || !has_spills) return std::nullopt;
  return stats;
}

absl::StatusOr<std::shared_ptr<const Nvrtc>> Nvrtc::Open(int driver_version) {
  return Open(NamesOrOverride("KVANT_LIBNVRTC", UsualNames()), driver_version);
}

absl::StatusOr<std::shared_ptr<const Nvrtc>> Nvrtc::Open(absl::Span<const std::string> names,
                                                         int driver_version) {
  std::vector<std::string> reasons;
  for (const std::string& name : names) {
    const absl::StatusOr<SharedLibrary> library = SharedLibrary::Open({name});
    if (!library.ok()) {
      reasons.emplace_back(library.status().message());
      continue;
    }
    auto api = std::make_shared<NvrtcApi>();
    if (const char* missing = Resolve(*library, *api)) {
      reasons.push_back(absl::StrCat(name, " has no ", missing));
      continue;
    }
    auto nvrtc = std::make_shared<Nvrtc>();
    api->Version(&nvrtc->major_, &nvrtc->minor_);
    if (driver_version != 0 && nvrtc->major_ > driver_version / 1000) {
      reasons.push_back(absl::StrCat(name, " is version ", nvrtc->major_, ".", nvrtc->minor_,
                                     ", and the driver loads code of CUDA ", driver_version / 1000,
                                     " at most"));
      continue;
    }
    nvrtc->path_ = FileOfSymbol(reinterpret_cast<void*>(api->Version));
    OpenBuiltins(nvrtc->path_, nvrtc->major_, nvrtc->minor_);
    nvrtc->api_ = std::move(api);
    return nvrtc;
  }
  return Unusable(absl::StrCat("no NVRTC to compile kernels with: ", absl::StrJoin(reasons, "; "),
                               ". Install NVRTC, or name its library in KVANT_LIBNVRTC"));
}

absl::StatusOr<Cubin> Nvrtc::Compile(const KernelSource& source, std::string_view arch) const {
  const std::string what = absl::StrCat("kernel '", source.name, "' for ", std::string(arch),
                                        " with NVRTC ", major_, ".", minor_);
  int count = 0;
  std::vector<int> known;
  if (api_->GetNumSupportedArchs(&count) == NVRTC_SUCCESS && count > 0) {
    known.resize(static_cast<size_t>(count));
    api_->GetSupportedArchs(known.data());
    if (std::find(known.begin(), known.end(), ArchNumber(arch)) == known.end()) {
      return Unusable(
          absl::StrCat(what, ": that version knows only sm_", absl::StrJoin(known, ", sm_")));
    }
  }
  const auto failure = [&](nvrtcResult result, const std::string& log) {
    return absl::InternalError(absl::StrCat(what, ": ", api_->GetErrorString(result), "\n", log));
  };
  Program program(*api_);
  if (const nvrtcResult result = program.Create(source); result != NVRTC_SUCCESS) {
    return failure(result, "");
  }
  const nvrtcResult result =
      program.Compile(major_, minor_, absl::StrCat("--gpu-architecture=", std::string(arch)));
  const std::string log = program.Log();
  if (result != NVRTC_SUCCESS) return failure(result, log);
  std::optional<std::string> image = program.Image();
  if (!image) return absl::InternalError(absl::StrCat(what, ": it gave no cubin\n", log));

  Cubin cubin;
  cubin.bytes = *std::move(image);
  cubin.arch = std::string(arch);
  cubin.stats = ParsePtxasLog(log, source.entry);
  cubin.nvrtc_major = major_;
  cubin.nvrtc_minor = minor_;
  return cubin;
}

}  // namespace kvant::cuda
