// Case on the CUDA backend's kernels, by the executor.
#include <algorithm>
#include <cstring>
#include <utility>

#include "gtest/gtest.h"
#include "kvant/backends/cuda/cuda_backend.h"
#include "kvant/backends/cuda/simt/launcher.h"
#include "kvant/tests/backends/attention/harness.h"
#include "kvant/tests/common/simt_turn.h"

namespace kvant::cpu {

absl::StatusOr<std::unique_ptr<Executable>> Case::CompileForCudaSimt(uint64_t seed) {
  return cuda::CompileAttention(spec, cuda::MakeSimtLauncher({.seed = seed}), "cuda_simt");
}

absl::Status Case::RunOnCudaSimt(const Executable& executable) {
  const auto aligned = [](const GuardedBuffer& buffer) { return (buffer.bytes() + 15) / 16 * 16; };
  std::deque<GuardedBuffer> copies;
  std::vector<const void*> in;
  std::vector<void*> out;
  for (const GuardedBuffer& buffer : inputs) {
    copies.emplace_back(aligned(buffer));
    std::memcpy(copies.back().data(), buffer.data(), buffer.bytes());
    in.push_back(copies.back().data());
  }
  for (const GuardedBuffer& buffer : outputs) {
    copies.emplace_back(aligned(buffer));
    std::memset(copies.back().data(), 0xA5, copies.back().bytes());
    out.push_back(copies.back().data());
  }
  // Counts of splits are zeros before the first execution, and after each.
  std::vector<std::byte> scratch(executable.scratch_bytes(1));
  ThreadExecutor executor(1);
  const absl::Status status = executable.Run({executor, in, out, scratch.data()});
  for (size_t i = 0; i < outputs.size(); ++i) {
    std::memcpy(outputs[i].data(), out[i], outputs[i].bytes());
  }
  return status;
}

std::string Case::CheckOnCudaSimt(double tolerance) {
  const absl::StatusOr<std::unique_ptr<Executable>> executable = CompileForCudaSimt();
  EXPECT_TRUE(executable.ok()) << executable.status();
  if (!executable.ok()) return "";
  if (!HasSimtTurn()) return (*executable)->kernel();
  SCOPED_TRACE((*executable)->kernel());
  const absl::Status status = RunOnCudaSimt(**executable);
  EXPECT_TRUE(status.ok()) << status;
  if (status.ok()) CompareWithOracle(std::max(tolerance, (*executable)->rounding()));
  return (*executable)->kernel();
}

void Case::CheckEverywhere(double tolerance) {
  Check(tolerance);
  CheckOnCudaSimt(tolerance);
}

}  // namespace kvant::cpu
