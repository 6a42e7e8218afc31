// kvant's C ABI, of libkvant.so: graphs, partitions, compiled graphs and KV caches for C11 and for
// all that calls C.
//
//   kvant_graph* graph;
//   kvant_compiled* compiled;
//   if (kvant_graph_from_json(text, strlen(text), &graph) != KVANT_OK ||
//       kvant_compile(engine, graph, NULL, &compiled) != KVANT_OK) puts(kvant_error());
//   kvant_execute(compiled, NULL, inputs, inputs_count, outputs, outputs_count);
//
// Every function that can fail gives a kvant_status. If it fails, kvant_error() has a sentence that
// says what went wrong, and what the function would have made is not touched. No exception leaves
// the library. A null handle or a null pointer where none may be is KVANT_INVALID_ARGUMENTS; a
// handle that was destroyed is the caller's mistake, as everywhere in C.
//
// Handles are made by the functions whose last parameter is a pointer to one, and given back to
// their kvant_*_destroy, which takes null. What is made of a handle keeps what it needs of it
// alive: handles may be destroyed in any order. Several threads may use one handle at once, but for
// a kvant_builder, and none may use it while it is destroyed.
//
// Structs with a `size` begin with it: callers set it to the sizeof of their struct, so that later
// versions can add members at the end. Members that a caller's struct does not have count as zero.
// Members that are zero stand for the default that C++ has, unless this header says otherwise.
//
// Texts that functions give are UTF-8 and end with 0. Texts "of this thread" are no handle's: they
// are valid until this thread's next call that gives one.
#ifndef KVANT_INTEGRATIONS_C_KVANT_C_H_
#define KVANT_INTEGRATIONS_C_KVANT_C_H_

#include <dlpack/dlpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// In C any int may be in an enum, and so may it in C++ with this.
#ifdef __cplusplus
#define KVANT_ENUM(name) enum name : int
extern "C" {
#else
#define KVANT_ENUM(name) enum name
#endif

// The version grows by one where something that was there changes or goes. Additions do not count.
#define KVANT_ABI_VERSION 1
int32_t kvant_abi_version(void);
// The version of kvant, "0.1.0".
const char* kvant_version(void);

typedef KVANT_ENUM(kvant_status){
    KVANT_OK = 0,
    KVANT_INVALID_GRAPH = 1,      // cycles, two producers, tensors that disagree
    KVANT_INVALID_GRAPH_OP = 2,   // counts, types, attributes of an op
    KVANT_INVALID_SHAPE = 3,      // shapes that contradict each other
    KVANT_INVALID_DATA_TYPE = 4,  // a type that the op does not take
    KVANT_INVALID_ARGUMENTS = 5,  // a bad argument to a call
    KVANT_UNIMPLEMENTED = 6,      // nothing here can run it
    KVANT_INVALID_JSON = 7,       // malformed text, or not a graph
    KVANT_OUT_OF_MEMORY = 8,
    KVANT_INTERNAL = 9,
} kvant_status;

// The sentence of this thread's last call that failed; empty before.
const char* kvant_error(void);
// "invalid_shape" and the like.
const char* kvant_status_name(kvant_status status);

// Element types. Those of less than a byte are packed, the first element in the lowest bits.
typedef KVANT_ENUM(kvant_type){
    KVANT_UNDEF = 0, KVANT_F16 = 1, KVANT_BF16 = 2,    KVANT_F32 = 3,     KVANT_S32 = 4,
    KVANT_S8 = 5,    KVANT_U8 = 6,  KVANT_BOOLEAN = 7, KVANT_F8_E5M2 = 8, KVANT_F8_E4M3 = 9,
    KVANT_S4 = 10,   KVANT_U4 = 11, KVANT_S64 = 12,    KVANT_S2 = 13,     KVANT_U2 = 14,
} kvant_type;
// "f8_e4m3" and the like; null for what is no type.
const char* kvant_type_name(kvant_type type);
// KVANT_UNDEF if none has that name.
kvant_type kvant_type_from_name(const char* name);
// 2 to 64; 0 for KVANT_UNDEF.
int32_t kvant_type_bits(kvant_type type);

// ---- Tensors ------------------------------------------------------------------------------------

// A dim, or a stride, that is not known.
#define KVANT_UNKNOWN_DIM INT64_MIN

typedef KVANT_ENUM(kvant_property){
    KVANT_VARIABLE = 0,
    KVANT_CONSTANT = 1,     // an input that does not change between executions
    KVANT_HOST_SCALAR = 2,  // f32, s32 or s64 without dims, read on the host on every engine
} kvant_property;

// What is known of a tensor.
typedef struct kvant_tensor {
  size_t size;
  uint64_t id;
  const char* name;  // "" where it has none; null reads as ""
  kvant_type type;
  kvant_property property;
  int32_t rank;            // -1: not known
  const int64_t* dims;     // [rank]
  const int64_t* strides;  // [rank], in elements; null: dense, or not known yet
  int64_t bytes;           // of memory that it takes; 0 where dims are not known. Only given.
} kvant_tensor;

// ---- Graphs -------------------------------------------------------------------------------------

typedef struct kvant_graph kvant_graph;

// The format of oneDNN's graph dumps. Its input_ports and output_ports are not read: inputs are
// what no op produces, outputs what no op but an End consumes.
kvant_status kvant_graph_from_json(const char* text, size_t bytes, kvant_graph** graph);
// Of this thread.
kvant_status kvant_graph_to_json(const kvant_graph* graph, const char** text);
// In Graphviz's language, with a box around each partition. Of this thread.
kvant_status kvant_graph_to_dot(const kvant_graph* graph, const char** text);
void kvant_graph_destroy(kvant_graph* graph);
// How many. Inputs are in order of first use, outputs in the order in which they are made. An
// execution's tensors have the same order.
size_t kvant_graph_inputs(const kvant_graph* graph);
size_t kvant_graph_outputs(const kvant_graph* graph);
// `tensor->size` must be set. What it points to lives as long as the graph.
kvant_status kvant_graph_input(const kvant_graph* graph, size_t at, kvant_tensor* tensor);
kvant_status kvant_graph_output(const kvant_graph* graph, size_t at, kvant_tensor* tensor);

// ---- Building graphs ----------------------------------------------------------------------------

typedef struct kvant_builder kvant_builder;
// A tensor of the builder's graph.
typedef uint64_t kvant_value;

typedef struct kvant_builder_options {
  size_t size;
  const char* fpmath;  // "strict", "bf16", "f16", "any" or "tf32"; null: "strict"
  bool apply_to_int;   // integer inputs may be multiplied in floating point
} kvant_builder_options;

// Null options: all default.
kvant_status kvant_builder_create(const kvant_builder_options* options, kvant_builder** builder);
void kvant_builder_destroy(kvant_builder* builder);
// An input of the graph, with name, type, dims, strides and property of `tensor`. No two inputs
// have the same name.
kvant_status kvant_builder_input(kvant_builder* builder, const kvant_tensor* tensor,
                                 kvant_value* value);
// A constant without dims, rounded to the type; a number beyond the type is refused.
kvant_status kvant_builder_constant(kvant_builder* builder, kvant_type type, double number,
                                    kvant_value* value);

typedef KVANT_ENUM(kvant_attr_type){
    KVANT_ATTR_S64 = 0,    KVANT_ATTR_F32 = 1,  KVANT_ATTR_BOOL = 2,
    KVANT_ATTR_STRING = 3, KVANT_ATTR_S64S = 4, KVANT_ATTR_F32S = 5,
} kvant_attr_type;

typedef struct kvant_attr {
  const char* name;  // as in docs/ops.md
  kvant_attr_type type;
  union {
    int64_t s64;
    float f32;
    bool boolean;
    const char* string;
    const int64_t* s64s;
    const float* f32s;
  } value;
  size_t count;  // of a list
} kvant_attr;

// Adds an op of docs/ops.md, "SoftMax" for one, and checks it at once.
//
// results[i] gives the type of a result (KVANT_UNDEF: that of the first input), and its dims, where
// `dims` is not null. Dims are needed only where the op leaves them open (the capacity of Append).
// `name` is that of the first result; null: one is made. values: [results_count].
//
// A builder of which one call failed gives no graph: later calls fail and repeat the first error.
kvant_status kvant_builder_op(kvant_builder* builder, const char* op, const char* name,
                              const kvant_value* inputs, size_t inputs_count,
                              const kvant_attr* attrs, size_t attrs_count,
                              const kvant_tensor* results, size_t results_count,
                              kvant_value* values);
// Names a result and makes it an output. strides [rank], null: dense.
kvant_status kvant_builder_output(kvant_builder* builder, const char* name, kvant_value value,
                                  const int64_t* strides);
// What is known of a value. Pointers are valid until the builder's next call.
kvant_status kvant_builder_describe(const kvant_builder* builder, kvant_value value,
                                    kvant_tensor* tensor);
// May be called once.
kvant_status kvant_builder_build(kvant_builder* builder, kvant_graph** graph);

// ---- Partitions ---------------------------------------------------------------------------------

typedef struct kvant_partitions kvant_partitions;

typedef KVANT_ENUM(kvant_partition_kind){
    KVANT_ATTENTION = 0, KVANT_ATTENTION_BACKWARD = 1,
    KVANT_STORE = 2,  // what is written into a cache
    KVANT_OPS = 3,    // runs op by op
    KVANT_MERGE = 4,  // attention over parts of the tokens into one
} kvant_partition_kind;

typedef struct kvant_partition {
  size_t size;
  kvant_partition_kind kind;
  const char* pattern;  // what was recognised: "attention: compressed K and V, scale"
  const char* notes;    // why it is not more than it is, and what was nearly found: a line each
  const uint64_t* ops;  // ids
  size_t ops_count;
} kvant_partition;

kvant_status kvant_graph_partitions(const kvant_graph* graph, kvant_partitions** partitions);
void kvant_partitions_destroy(kvant_partitions* partitions);
size_t kvant_partitions_count(const kvant_partitions* partitions);
// Pointers live as long as the partitions.
kvant_status kvant_partitions_at(const kvant_partitions* partitions, size_t at,
                                 kvant_partition* partition);
// The partition's ops, as a graph of their own.
kvant_status kvant_partitions_graph(const kvant_partitions* partitions, size_t at,
                                    kvant_graph** graph);

// ---- Engines ------------------------------------------------------------------------------------

typedef struct kvant_engine kvant_engine;

typedef struct kvant_engine_options {
  size_t size;
  const char* device;    // "cpu" or "cuda"; null: "cpu"
  int32_t device_index;  // which GPU
  const char* backends;  // names to ask, in order, separated by commas; null: the device's
  int32_t threads;       // <= 0: one per hardware thread
  // On the threads of GCC's OpenMP, if the process has loaded it, as PyTorch does; else on kvant's.
  bool openmp;
} kvant_engine_options;

// Null options: the CPU.
kvant_status kvant_engine_create(const kvant_engine_options* options, kvant_engine** engine);
void kvant_engine_destroy(kvant_engine* engine);

// ---- Compiled graphs ----------------------------------------------------------------------------

typedef struct kvant_compiled kvant_compiled;

typedef struct kvant_compile_options {
  size_t size;
  bool require_fused;           // fail where a partition would run op by op, with the reasons
  const kvant_tensor* tensors;  // by id: dims, and strides, of tensors of the graph
  size_t tensors_count;
} kvant_compile_options;

kvant_status kvant_compile(const kvant_engine* engine, const kvant_graph* graph,
                           const kvant_compile_options* options, kvant_compiled** compiled);
void kvant_compiled_destroy(kvant_compiled* compiled);
// The graph with all shapes known; a handle of its own.
kvant_status kvant_compiled_graph(const kvant_compiled* compiled, kvant_graph** graph);
// What runs, which backends were passed over and why, and why attention was not found where it
// nearly was: a line each. Of this thread.
kvant_status kvant_compiled_explain(const kvant_compiled* compiled, const char** text);

typedef struct kvant_compiled_info {
  size_t size;
  bool fused;            // nothing runs op by op
  double rounding;       // how far results may be from f32 arithmetic's; see docs/c.md
  size_t scratch_bytes;  // of one execution
} kvant_compiled_info;
kvant_status kvant_compiled_describe(const kvant_compiled* compiled, kvant_compiled_info* info);

// Takes one tensor for each of the graph's inputs and outputs, in their order. Type, dims and
// strides must be the port's (a null `strides` is dense), and the device the engine's. Null data is
// refused but for tensors without elements.
//
// A port of a type that DLPack or its producer lacks takes bytes, u8 or s8. f8 and boolean come as
// they are. 4 and 2 bits come packed: the last dim, which must be dense, is divided by the elements
// of a byte. Where there is one row it is rounded up; of several rows each is of whole bytes.
//
// `stream` is a CUstream of device "cuda", null the default stream. "cpu" ignores it, and has run
// when the call returns.
//
// Errors are those of CompiledGraph::Execute (backends/compiled_graph.h). Where arguments are
// wrong, nothing has been written, unless lengths or positions that the graph itself computes are
// wrong. Outputs must overlap neither inputs nor each other, here and wherever kvant executes
// something. This is not checked.
kvant_status kvant_execute(const kvant_compiled* compiled, void* stream,
                           const DLTensor* const* inputs, size_t inputs_count,
                           const DLTensor* const* outputs, size_t outputs_count);

// ---- KV caches ----------------------------------------------------------------------------------
// cache/kv_cache.h and docs/kv_cache.md say what each function does.

typedef struct kvant_cache kvant_cache;

typedef struct kvant_scales {
  const float* values;
  size_t count;  // 1, heads, or heads * head_size
} kvant_scales;

typedef struct kvant_cache_options {
  size_t size;
  const char* scheme;  // of all layers: "int4_g64_R128_s4" or as docs/kv_cache.md; null: f16
  // [layers]: a scheme for each layer; null: `scheme` for all.
  const char* const* layer_schemes;
  int64_t layers, batch, heads;  // of K and V; 0: 1
  int64_t head_size, v_head_size;
  int64_t capacity;  // tokens of a sequence
  int64_t rollback;  // of the last tokens, that kvant_cache_crop can take back
  bool allow_non_finite;
  // [layers], for storage with static scales; null: none.
  const kvant_scales* k_scales;
  const kvant_scales* v_scales;
  // [layers]: how many of a sequence's last tokens a layer keeps, for attention with windows; 0, or
  // null: all.
  const int64_t* keep;
  // What attention may be computed in, of codes as well: "strict", "bf16", "f16", "any" or "tf32";
  // null: "strict".
  const char* fpmath;
} kvant_cache_options;

typedef struct kvant_cache_bytes {
  size_t size;
  int64_t codes, parameters, window, bookkeeping, total;
} kvant_cache_bytes;

kvant_status kvant_cache_create(const kvant_engine* engine, const kvant_cache_options* options,
                                kvant_cache** cache);
void kvant_cache_destroy(kvant_cache* cache);
// What a cache of these options takes, without making it.
kvant_status kvant_cache_bytes_for(const kvant_cache_options* options, kvant_cache_bytes* bytes);
kvant_status kvant_cache_memory(const kvant_cache* cache, kvant_cache_bytes* bytes);
// How much of that memory the sequences hold now; and bytes that attention computes in.
int64_t kvant_cache_used_bytes(const kvant_cache* cache);
int64_t kvant_cache_scratch_bytes(const kvant_cache* cache);
// The layer's scheme, as text that kvant_cache_options takes. Of this thread.
kvant_status kvant_cache_scheme(const kvant_cache* cache, int64_t layer, const char** text);

// k, v: [batch, heads, tokens, head size], f32, f16 or bf16, with any strides that are not
// negative. Row b takes counts[b] tokens from its starts[b] on. Null starts: from the first on;
// null counts: all. `stream`: as kvant_execute's.
kvant_status kvant_cache_append(kvant_cache* cache, void* stream, int64_t layer, const DLTensor* k,
                                const DLTensor* v, const int64_t* counts, const int64_t* starts);
int64_t kvant_cache_length(const kvant_cache* cache, int64_t layer, int64_t row);
// As `layer` of what follows: all layers.
#define KVANT_ALL_LAYERS (-1)
// tokens [batch], or one for all rows where tokens_count is 1.
kvant_status kvant_cache_crop(kvant_cache* cache, int64_t layer, const int64_t* tokens,
                              size_t tokens_count);
kvant_status kvant_cache_reset(kvant_cache* cache);
// Row i becomes what row rows[i] was. rows: [batch].
kvant_status kvant_cache_reorder(kvant_cache* cache, int64_t layer, const int64_t* rows,
                                 size_t rows_count);
// A cache of its own with the same tokens. Its row i is row rows[i] of `cache`; null rows: all
// rows. capacity 0: as that of `cache`.
kvant_status kvant_cache_fork(const kvant_cache* cache, const int64_t* rows, size_t rows_count,
                              int64_t capacity, kvant_cache** fork);
// A layer's sequences as bytes for another cache of the same scheme, heads and sizes
// (KvCache::Save). lengths: [batch], of the layer's rows when it was saved. The bytes do not hold
// the lengths; wrong ones are noticed only by the size. out, data: u8 [bytes], dense.
kvant_status kvant_cache_saved_bytes(const kvant_cache* cache, int64_t layer,
                                     const int64_t* lengths, int64_t* bytes);
kvant_status kvant_cache_save(const kvant_cache* cache, void* stream, int64_t layer,
                              const DLTensor* out);
kvant_status kvant_cache_load(kvant_cache* cache, void* stream, int64_t layer,
                              const int64_t* lengths, const DLTensor* data);
// Tokens that a sequence has room for in a layer's memory: a bias has as many columns or more.
int64_t kvant_cache_columns(const kvant_cache* cache);

typedef KVANT_ENUM(kvant_part){
    KVANT_PART_SINKS = 0,       KVANT_PART_CODES = 1,  KVANT_PART_SCALES = 2,
    KVANT_PART_ZERO_POINTS = 3, KVANT_PART_WINDOW = 4,
} kvant_part;
// A part of K (of V, if `values`) as it is stored: [batch, heads, slots, channels], with type and
// dims in `tensor`. The memory is the cache's, on its engine's device. A part that the scheme lacks
// is null and of rank -1.
kvant_status kvant_cache_part(const kvant_cache* cache, int64_t layer, bool values, kvant_part part,
                              kvant_tensor* tensor, const void** data);

typedef struct kvant_range {
  int64_t first, tokens;
} kvant_range;
// Which slots of sinks, quantized tokens and window a row has. ranges: [3]. A window is a ring.
kvant_status kvant_cache_ranges(const kvant_cache* cache, int64_t layer, bool values, int64_t row,
                                kvant_range* ranges);

typedef struct kvant_attention kvant_attention;

typedef struct kvant_attention_options {
  size_t size;
  int64_t query_heads;
  int64_t query_tokens;  // the last of each sequence; 0: 1
  kvant_type type;       // of queries and output: f32, f16 or bf16; KVANT_UNDEF: f32
  float scale;           // 0: 1 / sqrt(head_size)
  float soft_cap;        // scores become soft_cap * tanh(score / soft_cap); 0: they stay
  int64_t window;        // the last tokens up to its own that a query sees; 0: all
  bool sinks;            // executions take a logit for each query head
  // The query tokens are not in the cache yet: executions take their keys and values.
  bool new_tokens;
  // Dims of the bias that executions add to the scaled scores: [batch or 1, query heads or 1, query
  // tokens, kvant_cache_columns or more, and the new tokens]; zeros: nothing is added. New tokens
  // have the columns right behind a row's own: the j-th new token has column length + j, with
  // `starts` length - start + j.
  int64_t bias[4];
  // The queries are of tokens that come after all that the cache has: each sees all.
  bool sees_all;
  bool stats;  // executions write statistics too, by which MergeAttention joins parts
} kvant_attention_options;

// What an execution takes beside queries. What the attention's options do not ask for is null.
typedef struct kvant_attention_inputs {
  size_t size;
  const DLTensor* sinks;  // f32 [query heads]
  const DLTensor* bias;   // f32, as in the options; column j is of a row's j-th token that is kept
  // Of new tokens, dense: [batch, heads, query tokens, head size], of the queries' type.
  const DLTensor *k, *v;
  const int64_t* starts;  // [batch]: row b has those from its starts[b] on; null: all
  // Written, with the option `stats`: f32 [batch, query heads, query tokens, 1], dense, of max +
  // ln(sum exp(score - max)), -inf where a query sees nothing.
  const DLTensor* stats;
} kvant_attention_inputs;

// Compiles, or finds, attention over the cache, which it keeps alive.
kvant_status kvant_cache_attention(kvant_cache* cache, const kvant_attention_options* options,
                                   kvant_attention** attention);
void kvant_attention_destroy(kvant_attention* attention);
// q: [batch, query heads, query tokens, head size], dense; out likewise, of v_head_size. inputs:
// null: none.
kvant_status kvant_attention_execute(const kvant_attention* attention, void* stream, int64_t layer,
                                     const DLTensor* q, const DLTensor* out,
                                     const kvant_attention_inputs* inputs);
// The kernel that runs for a layer; and the same in a sentence, with why nothing better runs. Of
// this thread.
kvant_status kvant_attention_kernel(const kvant_attention* attention, int64_t layer,
                                    const char** text);
kvant_status kvant_attention_explain(const kvant_attention* attention, int64_t layer,
                                     const char** text);

// Schemes that have names: their number, and one of them with what it is.
size_t kvant_schemes(void);
kvant_status kvant_scheme_at(size_t at, const char** name, const char** what);
// A scheme by its name, where it has one, else as its parts. Of this thread.
kvant_status kvant_scheme_text(const char* scheme, const char** text);
// What an element of K or V takes in the long run, scales included. What a cache of such heads
// refuses is refused.
kvant_status kvant_scheme_bits(const char* scheme, int64_t head_size, int64_t heads, double* bits);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // KVANT_INTEGRATIONS_C_KVANT_C_H_
