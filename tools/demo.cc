// kvant_demo: the keys and values of a real model, stored in a table of formats,
// and what each does to the result of attention.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/status.h"
#include "kvant/tools/demo_attention.h"
#include "kvant/tools/demo_cache.h"
#include "kvant/tools/progress.h"

namespace kvant {
namespace {

struct Row {
  const char* name;
  const char* k;
  const char* v;
  bool real_zero_points = false;
};

constexpr Row kRows[] = {
    {"f16", "f16", "f16"},
    {"int8", "s8:token", "s8:token"},
    {"int8, groups of 32", "s8:g32", "s8:g32"},
    {"int4, groups of 32, symmetric", "s4:g32", "s4:g32"},
    {"int4, groups of 32, integer zero points", "u4:g32:zp", "u4:g32:zp"},
    {"int4, groups of 32, real zero points", "u4:g32:zp", "u4:g32:zp", true},
    {"int4, K per channel", "u4:channel:g64:zp", "u4:g32:zp", true},
    {"int8 K, int4 V", "s8:g32", "u4:g32:zp", true},
    {"int2, groups of 32, integer zero points", "u2:g32:zp", "u2:g32:zp"},
    {"int2, groups of 32, real zero points", "u2:g32:zp", "u2:g32:zp", true},
    {"int2, K per channel", "u2:channel:g32:zp", "u2:g32:zp", true},
};

struct LayerResult {
  int layer = 0;
  double error = 0;         // against full precision
  double kernel_error = 0;  // against f64 arithmetic on the same codes
  double ms = 0;
};

struct RowResult {
  Row row;
  std::string kernel;
  size_t bytes = 0;  // of one layer's K and V
  double bits_per_element = 0;
  std::vector<LayerResult> layers;
};

struct Engines {
  Engine fused;   // the kernels that are measured
  Engine oracle;  // f64: quantizes and judges
};

using Outputs = std::vector<std::vector<float>>;

absl::StatusOr<Engines> MakeEngines(int threads) {
  EngineOptions options{.backends = {"cpu"}, .threads = threads};
  KVANT_ASSIGN_OR_RETURN(Engine fused, Engine::Create(options));
  options.backends = {"oracle"};
  options.executor = fused.shared_executor();
  KVANT_ASSIGN_OR_RETURN(Engine oracle, Engine::Create(options));
  return Engines{std::move(fused), std::move(oracle)};
}

absl::StatusOr<RowResult> RunRow(const Engines& engines, const Row& row,
                                 const std::vector<Layer>& layers, const Outputs& exact) {
  KVANT_ASSIGN_OR_RETURN(const KvFormat k_format, ParseKvFormat(row.k));
  KVANT_ASSIGN_OR_RETURN(const KvFormat v_format, ParseKvFormat(row.v));
  RowResult result{.row = row};
  std::optional<Attention> fused, judge;  // one graph for all layers
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    KVANT_ASSIGN_OR_RETURN(
        const StoredTensor k,
        Store(engines.oracle, {k_format, row.real_zero_points}, layer.k, layer.kv_dims));
    KVANT_ASSIGN_OR_RETURN(
        const StoredTensor v,
        Store(engines.oracle, {v_format, row.real_zero_points}, layer.v, layer.kv_dims));
    if (!fused) {
      KVANT_ASSIGN_OR_RETURN(fused, Attention::Create(engines.fused, layer.q.desc, k, v, true));
      KVANT_ASSIGN_OR_RETURN(judge, Attention::Create(engines.oracle, layer.q.desc, k, v, false));
    }
    LayerResult& at = result.layers.emplace_back(LayerResult{.layer = layer.number});
    KVANT_ASSIGN_OR_RETURN(const std::vector<float> o, fused->Run(layer.q, k, v, &at.ms));
    KVANT_ASSIGN_OR_RETURN(const std::vector<float> same_codes, judge->Run(layer.q, k, v));
    at.error = RelativeRms(o, exact[i]);
    at.kernel_error = RelativeRms(o, same_codes);
    result.bytes = k.bytes() + v.bytes();
    result.bits_per_element = 8.0 * result.bytes / (layer.k.size() + layer.v.size());
  }
  result.kernel = fused->kernel();
  return result;
}

absl::StatusOr<Outputs> ExactOutputs(const Engine& oracle, const std::vector<Layer>& layers) {
  const Progress progress("attention in full precision");
  Outputs outputs;
  for (const Layer& layer : layers) {
    KVANT_ASSIGN_OR_RETURN(const StoredTensor k,
                           Store(oracle, {.format = {.type = kF16}}, layer.k, layer.kv_dims));
    KVANT_ASSIGN_OR_RETURN(const StoredTensor v,
                           Store(oracle, {.format = {.type = kF16}}, layer.v, layer.kv_dims));
    KVANT_ASSIGN_OR_RETURN(const Attention attention,
                           Attention::Create(oracle, layer.q.desc, k, v, false));
    KVANT_ASSIGN_OR_RETURN(std::vector<float> output, attention.Run(layer.q, k, v));
    outputs.push_back(std::move(output));
  }
  return outputs;
}

void PrintHeader(const std::string& path, const std::vector<Layer>& layers, int threads) {
  const Dims& q = *layers.front().q.desc.dims;
  absl::PrintF(
      "%s: %d query heads over %d KV heads, %d tokens, head size %d, causal; %d threads\n\n", path,
      q[1] * q[2], q[1], q[3], q[4], threads);
  const int width = 10 * static_cast<int>(layers.size());
  absl::PrintF("%-41s%6s %8s  %-*s%9s %8s\n", "", "bits/", "KiB/", width,
               "error of the output in layer", "kernel's", "ms/");
  absl::PrintF("%-41s%6s %8s", "cache", "value", "layer");
  for (const Layer& layer : layers) absl::PrintF("%10d", layer.number);
  absl::PrintF("  %9s %8s\n", "own", "layer");
}

void PrintRow(const RowResult& result) {
  absl::PrintF("%-41s%6.2f %8.1f", result.row.name, result.bits_per_element, result.bytes / 1024.0);
  double kernel_error = 0, ms = 0;
  for (const LayerResult& layer : result.layers) {
    absl::PrintF("%9.2f%%", 100 * layer.error);
    kernel_error = std::max(kernel_error, layer.kernel_error);
    ms += layer.ms / result.layers.size();
  }
  absl::PrintF("  %9.0e %8.2f\n", kernel_error, ms);
  std::fflush(stdout);
}

// Which kernel ran, each named once.
void PrintKernels(const std::vector<RowResult>& results) {
  std::vector<std::string> kernels;
  kernels.reserve(results.size());
  for (const RowResult& result : results) kernels.push_back(result.kernel);
  std::sort(kernels.begin(), kernels.end());
  kernels.erase(std::unique(kernels.begin(), kernels.end()), kernels.end());
  std::printf("\n");
  for (const std::string& kernel : kernels) {
    std::string rows;
    for (const RowResult& result : results) {
      if (result.kernel == kernel)
        absl::StrAppend(&rows, rows.empty() ? "" : "; ", result.row.name);
    }
    absl::PrintF("fused kernel %s: %s\n", kernel, kernels.size() == 1 ? "every row" : rows);
  }
}

void PrintFooter(const std::vector<RowResult>& results) {
  PrintKernels(results);
  std::printf(
      "\nCompared: each fused output with causal attention over the uncompressed f16 keys and "
      "values, computed in f64.\nError: root of (sum of squared differences / sum of squares). "
      "Kernel's own: the largest such difference from\nf64 arithmetic on the same stored cache, "
      "which is what computing in f32 costs. Bits and KiB include scales and\nzero points. ms: "
      "every token a query, best of several runs, mean of the layers.\n");
}

nlohmann::ordered_json ToJson(const RowResult& result) {
  nlohmann::ordered_json json = {{"name", result.row.name},
                                 {"k", result.row.k},
                                 {"v", result.row.v},
                                 {"real_zero_points", result.row.real_zero_points},
                                 {"kernel", result.kernel},
                                 {"bits_per_element", result.bits_per_element},
                                 {"bytes_per_layer", result.bytes}};
  for (const LayerResult& layer : result.layers) {
    json["layers"].push_back({{"layer", layer.layer},
                              {"error", layer.error},
                              {"kernel_error", layer.kernel_error},
                              {"ms_best", layer.ms}});
  }
  return json;
}

struct DemoArguments {
  std::string data = "tests/data/smollm2_kjv.safetensors";
  int threads = 0;
  bool json = false;

  void AddTo(CLI::App& app) {
    app.add_option("--data", data, "Tensors layerN.q, .k and .v, f16 [heads, tokens, head size]")
        ->capture_default_str();
    app.add_option("--threads", threads, "0: one per hardware thread")->capture_default_str();
    app.add_flag("--json", json, "Print JSON");
  }

  absl::Status Run() const {
    KVANT_ASSIGN_OR_RETURN(const std::vector<Layer> layers, ReadLayers(data));
    KVANT_ASSIGN_OR_RETURN(const Engines engines, MakeEngines(threads));
    KVANT_ASSIGN_OR_RETURN(const Outputs exact, ExactOutputs(engines.oracle, layers));
    if (!json) PrintHeader(data, layers, engines.fused.executor().max_concurrency());
    std::vector<RowResult> results;
    for (const Row& row : kRows) {
      const Progress progress(row.name);
      KVANT_ASSIGN_OR_RETURN(RowResult result, RunRow(engines, row, layers, exact));
      if (!json) PrintRow(result);
      results.push_back(std::move(result));
    }
    if (!json) {
      PrintFooter(results);
      return absl::OkStatus();
    }
    nlohmann::ordered_json all = {{"data", data}, {"formats", nlohmann::ordered_json::array()}};
    for (const RowResult& result : results) all["formats"].push_back(ToJson(result));
    std::printf("%s\n", all.dump(2).c_str());
    return absl::OkStatus();
  }
};

int Main(int argc, char** argv) {
  CLI::App app(
      "Stores the keys and values of a real model in a table of formats, runs fused "
      "attention over each, and prints how far the result is from full precision.",
      "kvant_demo");
  DemoArguments arguments;
  arguments.AddTo(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;  // 2 as kvant has it; 1 is a failed run
  }
  const absl::Status status = arguments.Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "kvant_demo: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace kvant

int main(int argc, char** argv) {
  try {
    return kvant::Main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvant_demo: %s\n", error.what());
    return 1;
  }
}
