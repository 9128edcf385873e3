#include "common/check_attention.h"
#include "common/dispatch.h"
#include "verify/values.h"

namespace vegas_ops {
namespace {

int check_dump(const VegasVerifyParams& p) {
  VEGAS_CHECK(p.dump >= VEGAS_DUMP_NONE && p.dump <= VEGAS_DUMP_ALL,
              "`dump` must be one of the six kinds of VegasDump, got %d", int(p.dump));
  if (p.dump == VEGAS_DUMP_NONE) return VEGAS_OK;
  const bool sums = p.dump == VEGAS_DUMP_TOKEN || p.dump == VEGAS_DUMP_TOKEN_WEIGHT;
  const bool guides = p.dump == VEGAS_DUMP_TOKEN_WEIGHT || p.dump == VEGAS_DUMP_KV_HEAD;
  const bool empty = p.batch == 0 || p.total_q == 0;
  VEGAS_CHECK(p.logits_dtype == VEGAS_FLOAT32 || (!sums && p.logits_dtype == VEGAS_BFLOAT16),
              "`logits` must be %s, got dtype code %d", sums ? "float32" : "bfloat16 or float32", int(p.logits_dtype));
  VEGAS_CHECK(p.logits || empty || p.max_seqlen_k == 0, "`logits` must be given for a dump, got NULL");
  VEGAS_CHECK(p.guide_lse || empty || !guides, "`guide_lse` must be given for this dump, got NULL");
  VEGAS_CHECK(p.guide_lse_hint || empty || p.dump != VEGAS_DUMP_TOKEN_WEIGHT,
              "`guide_lse_hint` must be given for dump \"token_weight\", got NULL");
  return VEGAS_OK;
}

int check_lengths(const VegasVerifyParams& p) {
  const int32_t* cu = p.cu_seqlens_q;
  VEGAS_CHECK(cu[0] >= 0, "`cu_seqlens_q` must begin with 0 or more, got %d", cu[0]);
  for (int b = 0; b < p.batch; ++b) {
    VEGAS_CHECK(cu[b + 1] >= cu[b], "`cu_seqlens_q` must not decrease, got %d after %d", cu[b + 1], cu[b]);
    VEGAS_CHECK(cu[b + 1] - cu[b] <= p.max_seqlen_q,
                "`max_seqlen_q` must be at least every request's number of rows, got %d for %d rows of request %d",
                p.max_seqlen_q, cu[b + 1] - cu[b], b);
  }
  VEGAS_CHECK(cu[p.batch] <= p.total_q, "`cu_seqlens_q` must end at or below the %d rows of `q`, got %d", p.total_q,
              cu[p.batch]);
  return check_seqused_k(p.cache, p.seqused_k, p.batch, p.max_seqlen_k, true);
}

int check_memory(const VegasVerifyParams& p) {
  const int64_t q_bytes = element_bytes(p.q_dtype), batch = p.batch, rows = p.total_q;
  const int64_t heads_q = p.num_heads_q, heads_kv = p.cache.num_heads_kv, dim = p.cache.head_dim;
  const int64_t* stride = p.logits_stride;
  const auto logits = [&]() -> Span {
    const int64_t bytes = element_bytes(p.logits_dtype), width = p.max_seqlen_k;
    switch (p.dump) {
      case VEGAS_DUMP_NONE:
        return Span("logits", nullptr, 1, 0);
      case VEGAS_DUMP_KV_HEAD:
        return Span("logits", p.logits, bytes, width, {{batch, stride[0]}, {2, stride[1]}, {heads_kv, stride[2]}});
      case VEGAS_DUMP_ROWS:
        return Span("logits", p.logits, bytes, width, {{batch, stride[0]}, {heads_q, stride[1]}, {2, stride[2]}});
      case VEGAS_DUMP_ALL:
        return Span("logits", p.logits, bytes, width, {{rows, stride[0]}, {heads_q, stride[1]}});
      default:
        return Span("logits", p.logits, bytes, width, {{batch, stride[0]}});
    }
  };
  return check_overlap(
      {Span("out", p.out, q_bytes, dim, {{rows, p.out_stride_row}, {heads_q, p.out_stride_head}}),
       Span("lse", p.lse, 4, heads_q * rows), logits(), Span("guide_lse", p.guide_lse, 4, batch * 2 * heads_kv),
       Span("workspace", p.workspace, 1, static_cast<int64_t>(p.workspace_bytes))},
      {Span("q", p.q, q_bytes, dim, {{rows, p.q_stride_row}, {heads_q, p.q_stride_head}}),
       cache_span(p.cache, p.cache.k, "k_cache"), cache_span(p.cache, p.cache.v, "v_cache"),
       Span("block_table", p.cache.block_table, 4, p.cache.max_pages, {{batch, p.cache.block_table_stride}}),
       Span("seqused_k", p.seqused_k, 4, batch), Span("cu_seqlens_q", p.cu_seqlens_q, 4, batch + 1),
       Span("sinks", p.sinks, 4, heads_q), Span("guide_lse_hint", p.guide_lse_hint, 4, batch * 2 * heads_kv),
       Span("dump_rows", p.dump_rows, 4, batch), Span("dump_len", p.dump_len, 4, batch)});
}

int check(const VegasVerifyParams& p, VegasDevice device) {
  if (int status = check_cache(p.cache, p.q_dtype, p.num_heads_q, device)) return status;
  if (int status = check_workspace(p.workspace)) return status;
  if (int status = check_softmax(p.softmax_scale, p.softcap, p.window_left, p.window_right, p.num_splits)) {
    return status;
  }
  VEGAS_CHECK(p.batch >= 0, "`seqused_k` must have 0 entries or more, got %d", p.batch);
  VEGAS_CHECK(p.total_q >= 0, "`q` must have 0 rows or more, got %d", p.total_q);
  VEGAS_CHECK(p.max_seqlen_q >= 0, "`max_seqlen_q` must be 0 or more, got %d", p.max_seqlen_q);
  VEGAS_CHECK(p.max_seqlen_k >= 0, "`max_seqlen_k` must be 0 or more, got %d", p.max_seqlen_k);
  if (p.batch > 0) {
    VEGAS_CHECK(p.cu_seqlens_q, "`cu_seqlens_q` must be given, got NULL");
    VEGAS_CHECK(p.seqused_k, "`seqused_k` must be given, got NULL");
    VEGAS_CHECK(p.cache.block_table || p.cache.max_pages == 0, "`block_table` must be given, got NULL");
  }
  if (p.batch > 0 && p.total_q > 0) {
    VEGAS_CHECK(p.q, "`q` must be given, got NULL");
    VEGAS_CHECK(p.out, "`out` must be given, got NULL");
    VEGAS_CHECK(p.lse, "`lse` must be given, got NULL");
  }
  if (int status = check_dump(p)) return status;
  if (int status = check_memory(p)) return status;
  return device == VEGAS_CPU && p.batch > 0 ? check_lengths(p) : VEGAS_OK;
}

}  // namespace
}  // namespace vegas_ops

int vegas_flash_attn_with_logit_dump(const VegasVerifyParams* params, VegasDevice device, void* stream) {
  if (int status = vegas_ops::check_call(params, device)) return status;
  if (int status = vegas_ops::check(*params, device)) return status;
  if (int status = vegas_ops::check_values<vegas_ops::VerifyValues>(*params, device, stream,
                                                                    VEGAS_CUDA_KERNEL(verify_values_cuda))) {
    return status;
  }
  return vegas_ops::dispatch(*params, device, stream, vegas_ops::cpu_kernels().verify, VEGAS_CUDA_KERNEL(verify_cuda));
}
