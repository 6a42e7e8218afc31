// Attention over an int8 cache from C: the graph is built by calls, and tensors are DLPack's.
#include <stdio.h>
#include <stdlib.h>

#include "kvant/integrations/c/kvant_c.h"

enum { HEADS = 8, TOKENS = 1024, SIZE = 64 };

static void check(kvant_status status) {
  if (status == KVANT_OK) return;
  fprintf(stderr, "%s: %s\n", kvant_status_name(status), kvant_error());
  exit(1);
}

static kvant_value input(kvant_builder* g, const char* name, kvant_type type, int64_t tokens,
                         int64_t channels) {
  const int64_t dims[] = {1, HEADS, tokens, channels};
  kvant_value value;
  check(kvant_builder_input(
      g,
      &(kvant_tensor){
          .size = sizeof(kvant_tensor), .name = name, .type = type, .rank = 4, .dims = dims},
      &value));
  return value;
}

static kvant_value op(kvant_builder* g, const char* kind, kvant_value a, kvant_value b,
                      const kvant_attr* attrs, size_t attrs_count) {
  const kvant_tensor f32 = {.size = sizeof f32, .type = KVANT_F32};
  const kvant_value inputs[] = {a, b};
  kvant_value value;
  check(
      kvant_builder_op(g, kind, NULL, inputs, a == b ? 1 : 2, attrs, attrs_count, &f32, 1, &value));
  return value;
}

static DLTensor tensor(void* data, int64_t* dims, uint8_t code, uint8_t bits) {
  return (DLTensor){
      .data = data, .device = {kDLCPU, 0}, .ndim = 4, .dtype = {code, bits, 1}, .shape = dims};
}

int main(void) {
  kvant_builder* g;
  check(kvant_builder_create(
      &(kvant_builder_options){.size = sizeof(kvant_builder_options), .apply_to_int = true}, &g));
  const int64_t by_token[] = {1, 1, 1, SIZE};
  const kvant_attr groups[] = {
      {.name = "qtype", .type = KVANT_ATTR_STRING, .value.string = "per_group"},
      {.name = "group_shape", .type = KVANT_ATTR_S64S, .value.s64s = by_token, .count = 4}};
  const kvant_attr transpose = {
      .name = "transpose_b", .type = KVANT_ATTR_BOOL, .value.boolean = true};
  const kvant_attr last_axis = {.name = "axis", .type = KVANT_ATTR_S64, .value.s64 = -1};

  const kvant_value q = input(g, "q", KVANT_F32, 1, SIZE);
  const kvant_value k = op(g, "DynamicDequantize", input(g, "k", KVANT_S8, TOKENS, SIZE),
                           input(g, "k_scales", KVANT_F32, TOKENS, 1), groups, 2);
  const kvant_value v = op(g, "DynamicDequantize", input(g, "v", KVANT_S8, TOKENS, SIZE),
                           input(g, "v_scales", KVANT_F32, TOKENS, 1), groups, 2);
  kvant_value eighth;
  check(kvant_builder_constant(g, KVANT_F32, 0.125, &eighth));
  const kvant_value scores =
      op(g, "Multiply", op(g, "MatMul", q, k, &transpose, 1), eighth, NULL, 0);
  const kvant_value probs = op(g, "SoftMax", scores, scores, &last_axis, 1);
  check(kvant_builder_output(g, "o", op(g, "MatMul", probs, v, NULL, 0), NULL));

  kvant_graph* graph;
  kvant_engine* engine;
  kvant_compiled* attention;
  const char* explanation;
  check(kvant_builder_build(g, &graph));
  check(kvant_engine_create(NULL, &engine));
  check(kvant_compile(
      engine, graph,
      &(kvant_compile_options){.size = sizeof(kvant_compile_options), .require_fused = true},
      &attention));
  check(kvant_compiled_explain(attention, &explanation));
  puts(explanation);

  // Every value is 3 * 0.5, so that the output is too.
  static float query[HEADS * SIZE], scales[HEADS * TOKENS], out[HEADS * SIZE];
  static int8_t codes[HEADS * TOKENS * SIZE];
  for (size_t i = 0; i < sizeof codes; ++i) codes[i] = 3;
  for (size_t i = 0; i < HEADS * TOKENS; ++i) scales[i] = 0.5f;
  for (size_t i = 0; i < HEADS * SIZE; ++i) query[i] = 1.f;
  int64_t row[] = {1, HEADS, 1, SIZE}, all[] = {1, HEADS, TOKENS, SIZE};
  int64_t of_tokens[] = {1, HEADS, TOKENS, 1};
  const DLTensor query_tensor = tensor(query, row, kDLFloat, 32);
  const DLTensor out_tensor = tensor(out, row, kDLFloat, 32);
  const DLTensor code_tensor = tensor(codes, all, kDLInt, 8);
  const DLTensor scale_tensor = tensor(scales, of_tokens, kDLFloat, 32);
  // By name, as a graph's inputs are in the order of their first use.
  const DLTensor* inputs[8];
  const DLTensor* const outputs[] = {&out_tensor};
  for (size_t i = 0; i < kvant_graph_inputs(graph); ++i) {
    kvant_tensor port = {.size = sizeof port};
    check(kvant_graph_input(graph, i, &port));
    inputs[i] = port.name[0] == 'q' ? &query_tensor : port.name[1] ? &scale_tensor : &code_tensor;
  }
  check(kvant_execute(attention, NULL, inputs, kvant_graph_inputs(graph), outputs, 1));
  printf("o[0] = %g\n", out[0]);

  kvant_compiled_destroy(attention);
  kvant_engine_destroy(engine);
  kvant_graph_destroy(graph);
  kvant_builder_destroy(g);
  return out[0] > 1.499f && out[0] < 1.501f ? 0 : 1;
}
