// Calls on modules and functions, and launches.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

#include "kvant/tests/ptxemu/driver.h"
#include "kvant/tests/ptxemu/text.h"

namespace kvant::ptxemu {
namespace {

// What nvrtc_shim.cc makes instead of a cubin.
struct Image {
  std::string arch, log;
  const char* ptx;
};

bool ParseImage(const char* text, Image* image) {
  constexpr char kMagic[] = "PTXEMU1\n";
  const size_t magic = std::strlen(kMagic);
  if (std::strncmp(text, kMagic, magic) != 0) return false;
  const char* const arch_end = std::strchr(text + magic, '\n');
  image->arch.assign(text + magic, arch_end);
  const size_t log_bytes = std::strtoul(arch_end + 1, nullptr, 10);
  const char* const log = std::strchr(arch_end + 1, '\n') + 1;
  image->log.assign(log, log_bytes);
  image->ptx = log + log_bytes;
  return true;
}

// Code of sm_XYa runs on X.Y alone; of sm_XY on X.Z with Z >= Y.
bool RunsHere(const std::string& arch) {
  const int number = std::atoi(arch.c_str() + std::strlen("sm_"));
  const int major = number / 10, minor = number % 10;
  if (major != Device().major) return false;
  return arch.back() == 'a' ? minor == Device().minor : minor <= Device().minor;
}

// The text with the bug of PTXEMU_EDIT in it.
std::string Edited(std::string text) {
  const char* edit = std::getenv("PTXEMU_EDIT");
  if (edit == nullptr) return text;
  long place = -1;
  if (std::isdigit(static_cast<unsigned char>(edit[0])) != 0) {
    char* end = nullptr;
    place = std::strtol(edit, &end, 10);
    edit = end + 1;
  }
  const std::string rule = edit;
  const size_t arrow = rule.find("=>");
  const std::string from = rule.substr(0, arrow), to = rule.substr(arrow + 2);
  long seen = 0;
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; ++seen) {
    if (place >= 0 && seen != place) {
      at += from.size();
      continue;
    }
    text.replace(at, from.size(), to);
    at += to.size();
    Note("places edited");
  }
  return text;
}

void PlaceGlobals(Module& module) {
  DeviceMemory& memory = TheState().memory;
  for (const Variable& v : module.text.variables) {
    if (v.space != "global" && v.space != "const") continue;
    const auto bytes = static_cast<size_t>(v.bytes);
    const uint64_t base = memory.Allocate(bytes);
    Allocation& a = *memory.Find(base);
    std::fill(a.data.begin(), a.data.end(), uint8_t{0});
    std::fill_n(a.known.data(), bytes, uint8_t{1});
    std::copy(v.init.begin(), v.init.end(), a.data.begin());
    module.globals[v.name] = base;
  }
}

// Of ptxas: "Compiling entry function 'NAME'", then "Used N registers".
int RegistersOf(const std::string& log, const std::string& name) {
  const size_t begin = log.find("function '" + name + "'");
  const size_t used = begin == std::string::npos ? begin : log.find("Used ", begin);
  return used == std::string::npos ? 0 : std::atoi(log.c_str() + used + std::strlen("Used "));
}

CUresult LoadFunction(Module& module, const std::string& name, std::unique_ptr<Function>* loaded) {
  const std::vector<Entry>& entries = module.text.entries;
  const auto entry =
      std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.name == name; });
  if (entry == entries.end()) return Misuse(kNotFound, "no kernel " + name);
  auto function = std::make_unique<Function>();
  function->module = &module;
  try {
    function->kernel = Decode(*entry, module.text, module.globals, TheState().options);
  } catch (const std::exception& error) {
    return Misuse(kInvalidImage, name + ": " + error.what());
  }
  function->kernel->registers = RegistersOf(module.log, name);
  if (function->kernel->registers == 0) Note("no registers in ptxas' log");
  TheState().functions.insert(function.get());
  *loaded = std::move(function);
  return kSuccess;
}

Module* LoadedModule(const void* handle) {
  for (const auto& module : TheState().modules) {
    if (module.get() == handle && !module->unloaded) return module.get();
  }
  return nullptr;
}

bool IsFunction(void* handle) {
  return TheState().functions.count(static_cast<Function*>(handle)) != 0;
}

// ---- Launches

// How many blocks fit on a multiprocessor, beside what the kernel was compiled for.
void NoteOccupancy(const Kernel& kernel, const LaunchShape& shape, unsigned threads,
                   unsigned registers_per_warp) {
  const Arch& device = Device();
  const unsigned warps = (threads + kLanes - 1) / kLanes;
  const unsigned by_registers = registers_per_warp != 0 ? 65536 / registers_per_warp / warps : 32;
  const size_t shared = kernel.static_shared + shape.dynamic_shared + 1024;
  const auto by_shared = static_cast<unsigned>(
      (static_cast<size_t>(device.shared_kib_per_multiprocessor) << 10) / shared);
  const unsigned by_warps = static_cast<unsigned>(device.warps) / warps;
  const unsigned fit = std::min({by_registers, by_shared, by_warps, 32u});
  const int wanted = kernel.entry->min_blocks;
  if (fit >= static_cast<unsigned>(wanted)) return;
  const std::string what = StrCat(kernel.name, " ", threads, " threads, ", kernel.registers,
                                  " registers, ", shape.dynamic_shared, " shared");
  TheState().occupancy[what] = StrCat(fit, " blocks fit, compiled for ", wanted);
}

// Why a driver refuses a launch, or nothing.
CUresult CheckLaunch(const Function& function, const LaunchShape& shape, size_t param_bytes) {
  const Kernel& kernel = *function.kernel;
  const auto refuse = [&](CUresult result, const std::string& why) {
    return Misuse(result, "cuLaunchKernel of " + kernel.name + ": " + why);
  };
  for (int n = 0; n < 3; ++n) {
    if (shape.grid[n] == 0 || shape.block[n] == 0) {
      return refuse(kInvalidValue, "an empty grid or block");
    }
    if (n > 0 && shape.grid[n] > 65535) {
      return refuse(kInvalidValue, "grid of more than 65535 in y or z");
    }
  }
  if (shape.grid[0] > 0x7fffffffu) return refuse(kInvalidValue, "grid of more than 2^31 - 1 in x");
  const unsigned threads = shape.block[0] * shape.block[1] * shape.block[2];
  if (shape.block[0] > 1024 || shape.block[1] > 1024 || shape.block[2] > 64 || threads > 1024) {
    return refuse(kInvalidValue, StrCat("a block of ", threads, " threads"));
  }
  const auto most_threads = static_cast<unsigned>(kernel.entry->max_threads);
  if (most_threads != 0 && threads > most_threads) {
    return refuse(kInvalidValue,
                  StrCat(threads, " threads, but __launch_bounds__ of ", most_threads));
  }
  if (shape.dynamic_shared > function.dynamic_limit) {
    return refuse(kInvalidValue,
                  StrCat(shape.dynamic_shared, " bytes of dynamic shared memory, allowed are ",
                         function.dynamic_limit));
  }
  const size_t shared = kernel.static_shared + shape.dynamic_shared;
  if (shared > static_cast<size_t>(Device().shared_kib_per_block) << 10) {
    return refuse(kOutOfResources, "shared memory");
  }
  if (param_bytes != kernel.param_bytes) {
    return refuse(kInvalidValue,
                  StrCat(param_bytes, " bytes of parameters, but .param has ", kernel.param_bytes));
  }
  // Registers are given to warps by 256.
  const unsigned per_warp = (static_cast<unsigned>(kernel.registers) * kLanes + 255) / 256 * 256;
  if (per_warp * ((threads + kLanes - 1) / kLanes) > 65536) {
    return refuse(kOutOfResources, StrCat(kernel.registers, " registers a thread"));
  }
  NoteOccupancy(kernel, shape, threads, per_warp);
  return kSuccess;
}

// Parameters as one buffer. False for any other form.
bool ParseExtra(void** extra, std::vector<uint8_t>* params) {
  const auto kBuffer = reinterpret_cast<void*>(1), kBufferBytes = reinterpret_cast<void*>(2);
  const uint8_t* buffer = nullptr;
  size_t bytes = 0;
  for (; *extra != nullptr; extra += 2) {
    if (extra[0] == kBuffer) {
      buffer = static_cast<const uint8_t*>(extra[1]);
    } else if (extra[0] == kBufferBytes) {
      bytes = *static_cast<const size_t*>(extra[1]);
    } else {
      return false;
    }
  }
  params->assign(buffer, buffer + bytes);
  return true;
}

}  // namespace

extern "C" {

CUresult cuModuleLoadData(void** handle, const void* data) {
  return OutsideCapture("cuModuleLoadData", [&] {
    Image image;
    if (!ParseImage(static_cast<const char*>(data), &image)) {
      return Misuse(kInvalidImage, "an image that is not ptxemu's: compile with its NVRTC");
    }
    if (!RunsHere(image.arch)) {
      return Misuse(kNoBinaryForGpu, StrCat("code for ", image.arch, " on ", Device().name));
    }
    auto module = std::make_unique<Module>();
    module->log = std::move(image.log);
    try {
      module->text = ParsePtx(Edited(image.ptx));
    } catch (const std::exception& error) {
      return Misuse(kInvalidImage, error.what());
    }
    PlaceGlobals(*module);
    *handle = module.get();
    TheState().modules.push_back(std::move(module));
    return kSuccess;
  });
}

CUresult cuModuleUnload(void* handle) {
  return OutsideCapture("cuModuleUnload", [&] {
    State& s = TheState();
    Module* const module = LoadedModule(handle);
    if (module == nullptr) return Misuse(kInvalidHandle, "cuModuleUnload of no loaded module");
    for (const Work& work : s.pending) {
      if (work.function == nullptr || work.function->module != module) continue;
      Note("a module unloaded with a launch of it under way");
      break;
    }
    RunPending(nullptr);
    module->unloaded = true;
    for (const auto& [name, address] : module->globals) s.memory.Free(address);
    for (const auto& [name, function] : module->functions) s.functions.erase(function.get());
    return kSuccess;
  });
}

CUresult cuModuleGetFunction(void** handle, void* module_handle, const char* name) {
  return InContext("cuModuleGetFunction", [&] {
    Module* const module = LoadedModule(module_handle);
    if (module == nullptr) return Misuse(kInvalidHandle, "cuModuleGetFunction of no loaded module");
    std::unique_ptr<Function>& function = module->functions[name];
    if (function == nullptr) {
      const CUresult result = LoadFunction(*module, name, &function);
      if (result != kSuccess) {
        module->functions.erase(name);
        return result;
      }
    }
    *handle = function.get();
    return kSuccess;
  });
}

CUresult cuFuncSetAttribute(void* handle, int attribute, int value) {
  return InContext("cuFuncSetAttribute", [&] {
    constexpr int kDynamicShared = 8, kCarveout = 9;
    if (!IsFunction(handle)) return Misuse(kInvalidHandle, "cuFuncSetAttribute of no function");
    auto& function = *static_cast<Function*>(handle);
    if (attribute == kDynamicShared) {
      const int most =
          (Device().shared_kib_per_block << 10) - static_cast<int>(function.kernel->static_shared);
      if (value < 0 || value > most) {
        return Misuse(kInvalidValue, StrCat("dynamic shared memory of ", value));
      }
      function.dynamic_limit = static_cast<size_t>(value);
      return kSuccess;
    }
    if (attribute == kCarveout) {
      const bool fine = value >= -1 && value <= 100;
      return fine ? kSuccess : Misuse(kInvalidValue, StrCat("carveout of ", value));
    }
    return Misuse(kInvalidValue, StrCat("function attribute ", attribute));
  });
}

CUresult cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                        void* stream_handle, void** params, void** extra) {
  return OnStream("cuLaunchKernel", stream_handle, [&](Stream& stream) {
    if (!IsFunction(handle)) {
      return Misuse(kInvalidHandle, "cuLaunchKernel of no function, or of a module that is gone");
    }
    auto* function = static_cast<Function*>(handle);
    std::vector<uint8_t> buffer;
    if (params != nullptr || extra == nullptr || !ParseExtra(extra, &buffer)) {
      return Misuse(kInvalidValue, "cuLaunchKernel: parameters other than as a buffer");
    }
    const LaunchShape shape = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared};
    const CUresult result = CheckLaunch(*function, shape, buffer.size());
    if (result != kSuccess) return result;
    auto run = [function, shape, buffer = std::move(buffer)] {
      State& s = TheState();
      RunKernel(*function->kernel, shape, buffer, s.memory, s.options, ++s.launches);
    };
    return Enqueue(stream, {"a launch", std::move(run), function});
  });
}

}  // extern "C"

}  // namespace kvant::ptxemu
