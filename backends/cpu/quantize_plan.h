// How a StoreSpec's quantization, or conversion, is walked on the CPU.
#ifndef KVANT_BACKENDS_CPU_QUANTIZE_PLAN_H_
#define KVANT_BACKENDS_CPU_QUANTIZE_PLAN_H_

#include <optional>
#include <string>

#include "kvant/kernels/cpu/codebook.h"
#include "kvant/kernels/cpu/quantize.h"
#include "kvant/patterns/store_spec.h"

namespace kvant::cpu {

// Any form, any strides.
class QuantizePlan {
 public:
  explicit QuantizePlan(const StoreSpec& spec);

  QuantizePlan(const QuantizePlan&) = delete;  // the problem points to the codebook

  const QuantizeProblem& problem() const { return p_; }
  // Why the kernels do not take it; empty if they do.
  std::string WhyUnsupported() const;
  // Units must run one after another: some write to the same bytes.
  bool serial() const { return serial_; }
  // "quantize with given scales: runs of 32 elements"
  std::string ToString() const;

 private:
  void PlaceRows(const StoreSpec& spec);
  void ChooseLoops(StoreAxes axes, const StoreSpec& spec);
  bool WholeBytes(int bits, int64_t QuantizeStrides::*array) const;
  void ChooseUnits();
  void Split(int64_t elements, int64_t part);
  bool SharesBytes() const;

  std::optional<Codebook> codebook_;
  QuantizeProblem p_;
  std::string reason_;
  bool serial_ = false;
};

}  // namespace kvant::cpu

#endif  // KVANT_BACKENDS_CPU_QUANTIZE_PLAN_H_
