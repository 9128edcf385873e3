// Checks that both attention ops ask of their arguments; each returns VEGAS_OK or a failure.
#pragma once

#include <math.h>
#include <stdint.h>

#include "common/check_overlap.h"
#include "common/status.h"

namespace vegas_ops {

inline bool is_query_dtype(VegasDtype dtype) {
  return dtype == VEGAS_FLOAT32 || dtype == VEGAS_BFLOAT16 || dtype == VEGAS_FLOAT16;
}

// Rows are read 16 bytes at a time. The stride of a dimension of size 1 leads nowhere and may be anything.
inline int check_view(const VegasPagedCache& cache, const VegasCacheView& view, const char* name) {
  VEGAS_CHECK(cache.num_pages == 0 || view.data, "`%s` must be given, got NULL", name);
  const int64_t unit = cache.dtype == VEGAS_FP8_E4M3 ? 16 : cache.dtype == VEGAS_FLOAT32 ? 4 : 8;
  const bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0 &&
                       (cache.num_pages <= 1 || view.stride_page % unit == 0) &&
                       (cache.page_size <= 1 || view.stride_token % unit == 0) &&
                       (cache.num_heads_kv <= 1 || view.stride_head % unit == 0);
  VEGAS_CHECK(aligned, "`%s` must have rows aligned to 16 bytes, got address %p and strides (%lld, %lld, %lld)", name,
              view.data, (long long)view.stride_page, (long long)view.stride_token, (long long)view.stride_head);
  return VEGAS_OK;
}

inline int check_cache(const VegasPagedCache& cache, VegasDtype q_dtype, int num_heads_q, VegasDevice device) {
  VEGAS_CHECK(is_query_dtype(q_dtype), "`q` must be float32, bfloat16 or float16, got dtype code %d", int(q_dtype));
  VEGAS_CHECK(device == VEGAS_CPU || q_dtype != VEGAS_FLOAT32, "`q` must be bfloat16 or float16 on CUDA, got float32");
  VEGAS_CHECK(cache.dtype == q_dtype || cache.dtype == VEGAS_FP8_E4M3,
              "`k_cache` must have q's dtype or be float8_e4m3fn, got dtype code %d", int(cache.dtype));
  VEGAS_CHECK(cache.num_pages >= 0, "`k_cache` must have 0 pages or more, got %lld", (long long)cache.num_pages);
  VEGAS_CHECK(cache.page_size > 0, "`k_cache` must have pages of 1 token or more, got %d", cache.page_size);
  VEGAS_CHECK(cache.head_dim > 0, "`k_cache` must have a head_dim of 1 or more, got %d", cache.head_dim);
  VEGAS_CHECK(cache.num_heads_kv > 0, "`k_cache` must have 1 head or more, got %d", cache.num_heads_kv);
  VEGAS_CHECK(num_heads_q > 0 && num_heads_q % cache.num_heads_kv == 0,
              "`q` must have a multiple of the cache's %d heads, got %d", cache.num_heads_kv, num_heads_q);
  VEGAS_CHECK(cache.max_pages >= 0, "`block_table` must have 0 columns or more, got %d", cache.max_pages);
  if (int status = check_view(cache, cache.k, "k_cache")) return status;
  return check_view(cache, cache.v, "v_cache");
}

inline Span cache_span(const VegasPagedCache& cache, const VegasCacheView& view, const char* name) {
  return Span(name, view.data, element_bytes(cache.dtype), cache.head_dim,
              {{cache.num_pages, view.stride_page},
               {cache.page_size, view.stride_token},
               {cache.num_heads_kv, view.stride_head}});
}

inline int check_softmax(float softmax_scale, float softcap, int window_left, int window_right, int num_splits) {
  VEGAS_CHECK(isfinite(softmax_scale), "`softmax_scale` must be finite, got %g", double(softmax_scale));
  VEGAS_CHECK(isfinite(softcap) && softcap >= 0, "`softcap` must be finite and 0 or more, got %g", double(softcap));
  VEGAS_CHECK(window_left >= -1 && window_right >= -1, "`window_size` must be -1 or more on either side, got (%d, %d)",
              window_left, window_right);
  VEGAS_CHECK(num_splits >= 0, "`num_splits` must be 0 or more, got %d", num_splits);
  return VEGAS_OK;
}

// Lengths are host data on the CPU: where keys are looked up in the table, they must fit it. A table without
// columns may come as NULL, and has room for nothing.
inline int check_seqused_k(const VegasPagedCache& cache, const int32_t* seqused_k, int batch, int max_seqlen_k,
                           bool uses_table) {
  const int64_t tokens = int64_t(cache.max_pages) * cache.page_size;
  for (int b = 0; b < batch; ++b) {
    VEGAS_CHECK(seqused_k[b] >= 0, "`seqused_k` must be 0 or more, got %d for request %d", seqused_k[b], b);
    VEGAS_CHECK(!uses_table || seqused_k[b] <= tokens,
                "`seqused_k` must be at most the %lld tokens that `block_table` has room for, got %d for request %d",
                (long long)tokens, seqused_k[b], b);
    VEGAS_CHECK(seqused_k[b] <= max_seqlen_k, "`seqused_k` must be at most max_seqlen_k, %d, got %d for request %d",
                max_seqlen_k, seqused_k[b], b);
  }
  return VEGAS_OK;
}

}  // namespace vegas_ops
