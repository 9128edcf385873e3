// Plain argument structs of the three ops: what a binding in any language fills in. Shapes use the
// names of the Python docstrings; strides count elements, the last dimension is always contiguous.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { VEGAS_FLOAT32 = 0, VEGAS_BFLOAT16 = 1, VEGAS_FLOAT16 = 2, VEGAS_FP8_E4M3 = 3 } VegasDtype;

typedef enum {
  VEGAS_DUMP_NONE = 0,
  VEGAS_DUMP_TOKEN = 1,         // (batch, max_seqlen_k) fp32: sum of logits over heads and dumped rows
  VEGAS_DUMP_TOKEN_WEIGHT = 2,  // (batch, max_seqlen_k) fp32: sum over KV heads and rows of exp(guide logit - hint)
  VEGAS_DUMP_KV_HEAD = 3,       // (batch, 2, num_heads_kv, max_seqlen_k) bf16 | fp32: guide logits
  VEGAS_DUMP_ROWS = 4,          // (batch, num_heads_q, 2, max_seqlen_k) bf16 | fp32: first and last query row
  VEGAS_DUMP_ALL = 5,           // (total_q, num_heads_q, max_seqlen_k) bf16 | fp32: every query row
} VegasDump;

// Bits of dump_rows.
enum { VEGAS_FIRST_ROW = 1, VEGAS_LAST_ROW = 2 };

typedef enum { VEGAS_MODE_LOGIT = 0, VEGAS_MODE_WEIGHT = 1 } VegasMode;

typedef enum { VEGAS_CPU = 0, VEGAS_CUDA = 1 } VegasDevice;

// One of the two views (K or V) of a paged cache: (num_pages, page_size, num_heads_kv, head_dim).
typedef struct {
  const void* data;
  int64_t stride_page;
  int64_t stride_token;
  int64_t stride_head;
  const float* descale;  // (batch, num_heads_kv) through the strides below (0 broadcasts), or NULL
  int64_t descale_stride_batch;
  int64_t descale_stride_head;
} VegasCacheView;

// The cache and what both attention ops ask of it.
typedef struct {
  VegasCacheView k;
  VegasCacheView v;
  VegasDtype dtype;  // the query's dtype, or VEGAS_FP8_E4M3
  int64_t num_pages;
  int32_t page_size;  // tokens
  int32_t num_heads_kv;
  int32_t head_dim;
  const int32_t* block_table;  // (batch, max_pages); entries at or beyond ceil(length / page_size) are never read
  int64_t block_table_stride;
  int32_t max_pages;
} VegasPagedCache;

// flash_attn_with_logit_dump
typedef struct {
  VegasPagedCache cache;
  const void* q;  // (total_q, num_heads_q, head_dim)
  int64_t q_stride_row;
  int64_t q_stride_head;
  VegasDtype q_dtype;
  const int32_t* seqused_k;     // (batch,) keys, the new rows included
  const int32_t* cu_seqlens_q;  // (batch + 1,)
  int32_t batch;
  int32_t total_q;  // rows of q; those at or beyond cu_seqlens_q[batch] are neither read nor written
  int32_t num_heads_q;
  int32_t max_seqlen_q;
  int32_t max_seqlen_k;
  float softmax_scale;
  int32_t causal;       // 0 | 1, aligned to the bottom right
  int32_t window_left;  // keys in [p - left, p + right], p = seqused_k - q_len + row; -1 is unbounded
  int32_t window_right;
  float softcap;       // 0 is off
  const float* sinks;  // (num_heads_q,) or NULL
  VegasDump dump;
  const float* guide_lse_hint;  // (batch, 2, num_heads_kv), contiguous, natural log; for TOKEN_WEIGHT
  const int32_t* dump_rows;     // (batch,) bits, NULL: 3 everywhere
  const int32_t* dump_len;      // (batch,), NULL: seqused_k - q_len + 1; clamped to [0, seqused_k]
  int32_t batch_invariant;      // 0 | 1
  int32_t num_splits;           // 0: by heuristic
  void* out;                    // (total_q, num_heads_q, head_dim), q's dtype
  int64_t out_stride_row;
  int64_t out_stride_head;
  float* lse;    // (num_heads_q, total_q), contiguous, natural log, sink excluded
  void* logits;  // the shape of `dump`; strides of all dimensions but the last, outermost first
  int64_t logits_stride[3];
  VegasDtype logits_dtype;  // VEGAS_FLOAT32 | VEGAS_BFLOAT16
  float* guide_lse;         // (batch, 2, num_heads_kv), contiguous; written for TOKEN_WEIGHT and KV_HEAD
  void* workspace;          // vegas_workspace_bytes(...) bytes, zeroed once, or NULL where that is 0
  size_t workspace_bytes;
} VegasVerifyParams;

// topk_aggregate_logits, and aggregate_logits (stops after the sum)
typedef struct {
  const void* logits;  // (layers, ...) a dump; strides of all dimensions but the last, layers first
  int64_t logits_stride[4];
  VegasDtype logits_dtype;  // VEGAS_FLOAT32 | VEGAS_BFLOAT16
  VegasDump dump;
  VegasMode mode;
  int32_t layers;
  int32_t batch;
  int32_t num_heads;            // of the dump: num_heads_kv for KV_HEAD, num_heads_q for ROWS and ALL, else 1
  int32_t total_q;              // rows of ALL, and of lse
  int32_t max_seqlen_k;         // last dimension of logits
  const int32_t* seqlens;       // (batch,) candidates; clamped to [0, max_seqlen_k]
  const float* lse;             // (layers, num_heads, total_q), contiguous; ROWS and ALL in weight mode
  const float* guide_lse;       // (layers, batch, 2, num_heads), contiguous; KV_HEAD in weight mode
  const int32_t* cu_seqlens_q;  // (batch + 1,) or NULL
  const int32_t* dump_rows;     // (batch,) bits or NULL: 3
  const float* sinks;           // (num_heads,) or (layers, num_heads) by the stride, or NULL
  int64_t sinks_stride_layer;
  int32_t k;                     // used where k_per_request is NULL
  const int32_t* k_per_request;  // (batch,) or NULL
  int32_t pool_before;           // a score is the maximum over [i - before, i + after]
  int32_t pool_after;
  int32_t num_sink;            // forced: [0, num_sink)
  int32_t num_recent;          // forced: the last num_recent candidates
  int32_t count_forced;        // 1: forced tokens count towards k
  int32_t per_kv_head;         // 1: one list per head of a KV_HEAD dump
  const int32_t* block_table;  // (batch, max_pages); may be NULL where max_pages is 0
  int64_t block_table_stride;
  int32_t max_pages;
  int32_t page_size;  // tokens: emit slots, through the table; 0: emit token indices
  int32_t max_k;      // width of indices
  float* sums;        // aggregate_logits: (layers, batch, max_seqlen_k), row stride below; else NULL
  int64_t sums_stride_layer;
  int64_t sums_stride_batch;
  int32_t* indices;      // (layers, batch[, num_heads], max_k), contiguous, ascending, -1 padded
  int32_t* topk_length;  // (layers, batch[, num_heads]), contiguous
  void* workspace;
  size_t workspace_bytes;
} VegasSelectParams;

// sparse_paged_decode
typedef struct {
  VegasPagedCache cache;  // block_table may be NULL where neither logical indices nor a tail need it
  const void* q;          // (batch, num_heads_q, head_dim)
  int64_t q_stride_row;
  int64_t q_stride_head;
  VegasDtype q_dtype;
  const int32_t* indices;  // (batch[, num_heads_kv], max_k); head stride 0 where the list is shared
  int64_t indices_stride_batch;
  int64_t indices_stride_head;
  const int32_t* topk_length;  // (batch[, num_heads_kv]); clamped to [0, max_k]
  int64_t topk_length_stride_batch;
  int64_t topk_length_stride_head;
  const int32_t* tail_start;  // (batch,) or NULL: no tail
  const int32_t* seqused_k;   // (batch,) or NULL; 0 means an empty row
  int32_t batch;
  int32_t num_heads_q;
  int32_t max_k;
  int32_t indices_are_slots;  // 1: page * page_size + offset; 0: token indices, through block_table
  float softmax_scale;
  float softcap;
  const float* sinks;   // (num_heads_q,) or NULL
  int32_t window_left;  // over token positions, p = seqused_k - 1; -1 is unbounded
  int32_t window_right;
  int32_t batch_invariant;
  int32_t num_splits;
  void* out;  // (batch, num_heads_q, head_dim)
  int64_t out_stride_row;
  int64_t out_stride_head;
  float* lse;  // (num_heads_q, batch), contiguous, natural log, sink excluded
  void* workspace;
  size_t workspace_bytes;
} VegasSparseParams;

// Bounds that size a workspace.
typedef struct {
  int32_t max_batch;
  int32_t max_q_len;
  int32_t max_seqlen_k;
  int32_t max_k;
  int32_t layers;
  int32_t num_heads_q;
  int32_t num_heads_kv;
  int32_t head_dim;
} VegasBounds;

typedef enum { VEGAS_OP_VERIFY = 0, VEGAS_OP_SELECT = 1, VEGAS_OP_SPARSE = 2 } VegasOp;

#ifdef __cplusplus
}
#endif
