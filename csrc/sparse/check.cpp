#include "common/check_attention.h"
#include "common/dispatch.h"
#include "sparse/values.h"

namespace vegas_ops {
namespace {

int check_memory(const VegasSparseParams& p) {
  const int64_t q_bytes = element_bytes(p.q_dtype), batch = p.batch;
  const int64_t heads_q = p.num_heads_q, heads_kv = p.cache.num_heads_kv, dim = p.cache.head_dim;
  return check_overlap(
      {Span("out", p.out, q_bytes, dim, {{batch, p.out_stride_row}, {heads_q, p.out_stride_head}}),
       Span("lse", p.lse, 4, heads_q * batch),
       Span("workspace", p.workspace, 1, static_cast<int64_t>(p.workspace_bytes))},
      {Span("q", p.q, q_bytes, dim, {{batch, p.q_stride_row}, {heads_q, p.q_stride_head}}),
       cache_span(p.cache, p.cache.k, "k_cache"), cache_span(p.cache, p.cache.v, "v_cache"),
       Span("indices", p.indices, 4, p.max_k, {{batch, p.indices_stride_batch}, {heads_kv, p.indices_stride_head}}),
       Span("topk_length", p.topk_length, 4, 1,
            {{batch, p.topk_length_stride_batch}, {heads_kv, p.topk_length_stride_head}}),
       Span("block_table", p.cache.block_table, 4, p.cache.max_pages, {{batch, p.cache.block_table_stride}}),
       Span("seqused_k", p.seqused_k, 4, batch), Span("tail_start", p.tail_start, 4, batch),
       Span("sinks", p.sinks, 4, heads_q)});
}

int check(const VegasSparseParams& p, VegasDevice device) {
  if (int status = check_cache(p.cache, p.q_dtype, p.num_heads_q, device)) return status;
  if (int status = check_workspace(p.workspace)) return status;
  if (int status = check_softmax(p.softmax_scale, p.softcap, p.window_left, p.window_right, p.num_splits)) {
    return status;
  }
  VEGAS_CHECK(p.batch >= 0, "`q` must have 0 rows or more, got %d", p.batch);
  VEGAS_CHECK(p.max_k >= 0, "`indices` must have 0 columns or more, got %d", p.max_k);
  if (p.batch == 0) return VEGAS_OK;
  VEGAS_CHECK(p.q, "`q` must be given, got NULL");
  VEGAS_CHECK(p.out, "`out` must be given, got NULL");
  VEGAS_CHECK(p.lse, "`lse` must be given, got NULL");
  VEGAS_CHECK(p.max_k == 0 || p.indices, "`indices` must be given, got NULL");
  VEGAS_CHECK(p.max_k == 0 || p.topk_length, "`topk_length` must be given, got NULL");
  VEGAS_CHECK(!p.tail_start || p.seqused_k, "`seqused_k` must be given with `tail_start`, got NULL");
  VEGAS_CHECK(!p.tail_start || p.cache.block_table || p.cache.max_pages == 0,
              "`block_table` must be given with `tail_start`, got NULL");
  VEGAS_CHECK(p.indices_are_slots || p.max_k == 0 || p.cache.block_table || p.cache.max_pages == 0,
              "`block_table` must be given for token indices, got NULL");
  if (p.window_left >= 0 || p.window_right >= 0) {
    VEGAS_CHECK(p.max_k == 0 || !p.indices_are_slots,
                "`window_size` must be (-1, -1) for slots, whose positions are unknown, got (%d, %d)", p.window_left,
                p.window_right);
    VEGAS_CHECK(p.seqused_k, "`seqused_k` must be given with `window_size`, got NULL");
  }
  if (int status = check_memory(p)) return status;
  if (device != VEGAS_CPU || !p.seqused_k) return VEGAS_OK;
  const bool uses_table = p.cache.block_table || p.tail_start || (!p.indices_are_slots && p.max_k > 0);
  return check_seqused_k(p.cache, p.seqused_k, p.batch, INT32_MAX, uses_table);
}

}  // namespace
}  // namespace vegas_ops

int vegas_sparse_paged_decode(const VegasSparseParams* params, VegasDevice device, void* stream) {
  if (int status = vegas_ops::check_call(params, device)) return status;
  if (int status = vegas_ops::check(*params, device)) return status;
  if (int status = vegas_ops::check_values<vegas_ops::SparseValues>(*params, device, stream,
                                                                    VEGAS_CUDA_KERNEL(sparse_values_cuda))) {
    return status;
  }
  return vegas_ops::dispatch(*params, device, stream, vegas_ops::cpu_kernels().sparse,
                             VEGAS_CUDA_KERNEL(sparse_portable));
}
