// The ops that are attention by themselves.
#include <string>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "kvant/graph/builder.h"

namespace kvant {

std::pair<Value, std::optional<Value>> GraphBuilder::ScaledDotProductAttention(
    Value q, Value k, Value v, AttentionOptions options) {
  absl::InlinedVector<Value, 12> inputs{q, k, v};
  std::string names;
  const auto optional_input = [&](const char* name, const std::optional<Value>& value) {
    if (!value) return;
    absl::StrAppend(&names, names.empty() ? "" : ",", name);
    inputs.push_back(*value);
  };
  optional_input("bias", options.bias);
  optional_input("select", options.select);
  optional_input("kv_lengths", options.kv_lengths);
  optional_input("kv_first", options.kv_first);
  optional_input("query_offsets", options.query_offsets);
  optional_input("sinks", options.sinks);
  optional_input("alibi_slopes", options.alibi_slopes);

  Attributes attrs;
  if (!names.empty()) attrs.Set(Attr::kOptionalInputs, std::move(names));
  if (options.scale) attrs.Set(Attr::kScale, *options.scale);
  if (options.soft_cap) attrs.Set(Attr::kSoftCap, *options.soft_cap);
  if (options.bottom_right) attrs.Set(Attr::kMaskAlignment, std::string("bottom_right"));
  attrs.Set(Attr::kLeftWindow, options.left_window);
  attrs.Set(Attr::kRightWindow, options.right_window);
  const Result results[] = {Describe(q).type, kF32};
  const Value first = Emit(OpKind::kScaledDotProductAttention, "", inputs,
                           absl::MakeSpan(results).first(options.stats ? 2 : 1), std::move(attrs));
  if (!options.stats) return {first, std::nullopt};
  return {first, ValueOf(first.id + 1)};
}

std::pair<Value, std::optional<Value>> GraphBuilder::MergeAttention(
    absl::Span<const AttentionPart> parts, MergeOptions options) {
  absl::InlinedVector<Value, 8> inputs;
  for (const AttentionPart& part : parts) inputs.insert(inputs.end(), {part.output, part.stats});
  if (options.type == kUndef && !parts.empty()) options.type = Describe(parts[0].output).type;
  const Result results[] = {options.type, kF32};
  const Value first = Emit(OpKind::kMergeAttention, "", inputs,
                           absl::MakeSpan(results).first(options.stats ? 2 : 1), {});
  if (!options.stats) return {first, std::nullopt};
  return {first, ValueOf(first.id + 1)};
}

}  // namespace kvant
