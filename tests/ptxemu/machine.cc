#include "kvant/tests/ptxemu/machine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "kvant/tests/ptxemu/text.h"
#include "kvant/tests/ptxemu/warp.h"

namespace kvant::ptxemu {

Options Options::FromEnvironment() {
  const auto number = [](const char* name, long long fallback) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::strtoll(text, nullptr, 0) : fallback;
  };
  Options o;
  o.seed = static_cast<uint64_t>(number("PTXEMU_SEED", 1));
  o.resident_blocks = static_cast<int>(number("PTXEMU_RESIDENT", 3));
  o.approx_ulps = static_cast<int>(number("PTXEMU_APPROX_ULPS", 2));
  o.contract = number("PTXEMU_CONTRACT", 0) != 0;
  o.truncate_mma = number("PTXEMU_TRUNCATE_MMA", 0) != 0;
  o.races = number("PTXEMU_RACES", 0) != 0;
  o.host_memory = number("PTXEMU_HOST_MEMORY", 0) != 0;
  return o;
}

Counters& GlobalCounters() {
  static auto* const counters = new Counters;
  return *counters;
}

namespace {

// Where the warps of a block are.
std::string Whereabouts(const Block& block) {
  std::string text;
  for (const auto& w : block.warps) {
    for (const Group& group : w->groups) {
      const Statement& s = *w->launch->kernel->program[static_cast<size_t>(group.pc)].text;
      text += StrCat("\n  warp ", w->index, " lanes ", std::hex, group.mask, std::dec, " at line ",
                     s.line, ": ", s.text);
    }
  }
  return text;
}

// Lets a block's warps go on from a barrier once all that live are there.
void Release(Block& block) {
  const Warp* first = nullptr;
  for (const auto& w : block.warps) {
    if (w->live == 0) continue;
    if (!w->at_barrier) return;
    if (first == nullptr) first = w.get();
    if (w->barrier != first->barrier) {
      throw Fault(kLaunchFailed, StrCat("kernel ", w->launch->kernel->name,
                                        ": warps at different barriers", Whereabouts(block)));
    }
  }
  if (first == nullptr) return;
  ++block.bars;
  for (const auto& w : block.warps) {
    if (w->live == 0) continue;
    w->at_barrier = false;
    for (Group& group : w->groups) {
      group.waits = false;
      ++group.pc;
    }
  }
}

std::unique_ptr<Warp> MakeWarp(Launch& launch, Block& block, int index, unsigned lanes) {
  const Kernel& kernel = *launch.kernel;
  auto w = std::make_unique<Warp>();
  w->launch = &launch;
  w->block = &block;
  w->index = index;
  w->live = lanes >= kLanes ? kAllLanes : (1u << lanes) - 1;
  w->groups.push_back({0, w->live, false});
  w->file = std::make_unique_for_overwrite<uint8_t[]>(kernel.file_bytes);
  // What is not defined is a number that no kernel means.
  std::memset(w->file.get(), 0xfb, kernel.file_bytes);
  w->valid.assign(kernel.entry->registers.size(), 0);
  w->local.assign(kernel.local_bytes * kLanes, 0xdd);
  w->local_known.assign(kernel.local_bytes * kLanes, 0);
  return w;
}

std::unique_ptr<Block> MakeBlock(Launch& launch, uint64_t number) {
  const LaunchShape& shape = *launch.shape;
  auto block = std::make_unique<Block>();
  block->index[0] = static_cast<unsigned>(number % shape.grid[0]);
  block->index[1] = static_cast<unsigned>(number / shape.grid[0] % shape.grid[1]);
  block->index[2] = static_cast<unsigned>(number / shape.grid[0] / shape.grid[1]);
  const size_t shared = launch.kernel->static_shared + shape.dynamic_shared;
  block->shared.assign(shared, 0xee);
  block->state.assign(shared, kUnknown);
  if (launch.options->races) block->touches.assign(shared, Touch());
  const unsigned threads = shape.block[0] * shape.block[1] * shape.block[2];
  for (unsigned first = 0; first < threads; first += kLanes) {
    block->warps.push_back(
        MakeWarp(launch, *block, static_cast<int>(first / kLanes), threads - first));
  }
  return block;
}

// Runs one of a block's warps for a while. False once all have left the kernel.
bool Advance(Launch& launch, Block& block) {
  std::vector<Warp*> able;
  bool done = true;
  for (const auto& w : block.warps) {
    done = done && w->live == 0;
    if (w->live != 0 && !w->at_barrier) able.push_back(w.get());
  }
  if (done) return false;
  if (able.empty()) {
    throw Fault(kLaunchFailed, StrCat("kernel ", launch.kernel->name,
                                      ": no warp of a block can go on", Whereabouts(block)));
  }
  Warp& w = *able[launch.random() % able.size()];
  const int budget = 1 << (launch.random() % 13);
  if (!w.Run(budget) && w.live != 0 && !w.at_barrier) {
    throw Fault(kLaunchFailed,
                StrCat("kernel ", launch.kernel->name, ", block ", block.index[0],
                       ": lanes wait for others that do not come", Whereabouts(block)));
  }
  Release(block);
  return true;
}

void RunBlocks(Launch& launch) {
  const LaunchShape& shape = *launch.shape;
  std::vector<uint64_t> order(size_t{shape.grid[0]} * shape.grid[1] * shape.grid[2]);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), launch.random);
  GlobalCounters().blocks += order.size();

  const auto most_resident = static_cast<size_t>(launch.options->resident_blocks);
  std::vector<std::unique_ptr<Block>> resident;
  size_t next = 0;
  while (next < order.size() || !resident.empty()) {
    while (next < order.size() && resident.size() < most_resident) {
      resident.push_back(MakeBlock(launch, order[next++]));
    }
    const size_t chosen = launch.random() % resident.size();
    if (!Advance(launch, *resident[chosen])) {
      resident.erase(resident.begin() + static_cast<int64_t>(chosen));
    }
  }
}

// Adds what a launch executed to the counters, whether or not it ended in a fault.
class Count {
 public:
  explicit Count(const Launch& launch) : launch_(launch), before_(launch.kernel->executed) {}
  ~Count() {
    const Kernel& kernel = *launch_.kernel;
    Counters& counters = GlobalCounters();
    counters.instructions = launch_.instructions;
    for (size_t n = 0; n < before_.size(); ++n) {
      const uint64_t more = kernel.executed[n] - before_[n];
      const auto opcode = static_cast<size_t>(kernel.program[n].opcode);
      if (more != 0) counters.opcodes[kernel.opcodes[opcode]] += more;
    }
  }

 private:
  const Launch& launch_;
  const std::vector<uint64_t> before_;
};

}  // namespace

void RunKernel(const Kernel& kernel, const LaunchShape& shape, const std::vector<uint8_t>& params,
               DeviceMemory& memory, const Options& options, uint32_t number) {
  Counters& counters = GlobalCounters();
  ++counters.launches;
  ++counters.kernels[kernel.name];
  kernel.executed.resize(kernel.program.size());
  Launch launch{&kernel, &shape, &params, &memory, &options, number, false, counters.instructions,
                {}};
  launch.random.seed(options.seed * 0x9e3779b97f4a7c15 + number);
  launch.copies_early = (launch.random() & 1) != 0;
  const Count count(launch);
  RunBlocks(launch);
}

}  // namespace kvant::ptxemu
