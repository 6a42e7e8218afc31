// A kernel as its decoder leaves it: instructions with handlers, and where its operands are.
#ifndef KVANT_TESTS_PTXEMU_KERNEL_H_
#define KVANT_TESTS_PTXEMU_KERNEL_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kvant/tests/ptxemu/machine.h"
#include "kvant/tests/ptxemu/ptx_text.h"

namespace kvant::ptxemu {

struct Warp;
struct Instruction;
// Does what an instruction does, in the active lanes of a warp.
using Handler = void (*)(Warp&, const Instruction&);

// A register of the file, or a constant. Each has its values of all lanes in a row; a predicate is
// one mask.
struct Slot {
  uint32_t offset = 0;
  int reg = -1;
  int bytes = 0;
  const void* constant = nullptr;
  bool negated = false;  // a predicate
};

enum Space { kGeneric, kGlobal, kShared, kParam, kLocal, kConst };

enum class Flow : uint8_t { kNext, kBranch, kExit, kBarrier };

// The lanes that an instruction waits for.
enum class Together : uint8_t { kNobody, kMembers, kWarp };

struct Instruction {
  Handler run = nullptr;
  Flow flow = Flow::kNext;
  Together together = Together::kNobody;
  int guard = -1;
  bool guard_negated = false;
  int target = 0;        // of a branch
  Slot members;          // Together::kMembers
  bool sink = false;     // what is not defined must not come here
  int first_needed = 0;  // of src: the result is defined where these and all after are
  int dsts = 0, srcs = 0;
  Slot dst[5], src[11];
  int64_t offset = 0;         // of an address
  int64_t source_offset = 0;  // of the other address, of a copy
  Space space = kGeneric;
  int element = 0;  // bytes
  int count = 1;    // of a vector
  bool is_signed = false, coherent = true;
  uint32_t mode = 0;  // what its handler says
  int opcode = 0;     // Kernel::opcodes
  const Statement* text = nullptr;
};

struct Kernel {
  std::string name;
  const Entry* entry = nullptr;  // of the module's text, which outlives the kernel
  std::vector<Instruction> program;
  std::vector<std::string> opcodes;
  std::vector<uint32_t> register_offsets;  // into the file of a warp
  size_t file_bytes = 0;
  std::vector<std::unique_ptr<uint64_t[]>> constants;
  std::map<std::string, uint64_t> symbols;  // addresses, each in its space
  size_t param_bytes = 0, static_shared = 0, local_bytes = 0;
  mutable std::vector<uint64_t> executed;  // by instruction, how often warps executed it
  int registers = 0;                       // of a thread, by ptxas' log
};

// Where dynamic shared memory may begin: the first KiB is the system's, as on recent GPUs.
inline constexpr uint32_t kSharedBase = 1024;
// Windows of generic addresses. Those of global memory have none.
inline constexpr uint64_t kSharedWindow = 0x0100000000000000, kLocalWindow = 0x0200000000000000,
                          kParamWindow = 0x0300000000000000, kWindowMask = 0xff00000000000000;

// globals: where the module's variables are. Throws std::runtime_error for what is not known.
std::unique_ptr<Kernel> Decode(const Entry& entry, const ModuleText& module,
                               const std::map<std::string, uint64_t>& globals,
                               const Options& options);

}  // namespace kvant::ptxemu

#endif  // KVANT_TESTS_PTXEMU_KERNEL_H_
