// A KvCache for other languages: what tools/kv_report calls. Functions that give an int give 0, or
// 1 with the sentence in kvant_kv_error(); those that give a pointer, null.
#ifndef KVANT_TOOLS_KV_REPORT_KV_API_H_
#define KVANT_TOOLS_KV_REPORT_KV_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvant_kv kvant_kv;

// Of the last call that failed in this thread.
const char* kvant_kv_error(void);

// `scheme` as ParseCacheScheme takes it. threads <= 0: one per hardware thread.
kvant_kv* kvant_kv_create(const char* scheme, int64_t layers, int64_t batch, int64_t heads,
                          int64_t head_size, int64_t capacity, int threads);
void kvant_kv_destroy(kvant_kv* kv);
int kvant_kv_reset(kvant_kv* kv);

// k, v: dense f32 [batch, heads, tokens, head_size].
int kvant_kv_append(kvant_kv* kv, int64_t layer, const float* k, const float* v, int64_t tokens);
// q, out: dense f32 [batch, query_heads, tokens, head_size], the last tokens of the sequences.
int kvant_kv_attend(kvant_kv* kv, int64_t layer, const float* q, float* out, int64_t query_heads,
                    int64_t tokens);
// Token by token: append k and v's, then attend with q's.
int kvant_kv_teacher_force(kvant_kv* kv, int64_t layer, const float* q, const float* k,
                           const float* v, float* out, int64_t query_heads, int64_t tokens);

// Of all memory of the cache; of what its tokens take; and bits per element in the long run.
int64_t kvant_kv_bytes(const kvant_kv* kv);
int64_t kvant_kv_used_bytes(const kvant_kv* kv);
double kvant_kv_bits_per_element(const kvant_kv* kv);
// The attention kernel that ran last; empty before.
const char* kvant_kv_kernel(kvant_kv* kv);

// A part as it is stored: values 0 for K, 1 for V; part 0 sinks, 1 codes, 2 scales, 3 zero points,
// 4 window. `bytes` and `dims` [4] (batch, heads, slots or groups, channels or groups) may be null.
const void* kvant_kv_part(const kvant_kv* kv, int64_t layer, int values, int part, int64_t* bytes,
                          int64_t* dims);
// Its type, as "u4"; empty if there is none.
const char* kvant_kv_part_type(const kvant_kv* kv, int64_t layer, int values, int part);

#ifdef __cplusplus
}
#endif

#endif  // KVANT_TOOLS_KV_REPORT_KV_API_H_
