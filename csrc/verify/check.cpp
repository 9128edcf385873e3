#include "common/check_attention.h"
#include "common/dispatch.h"

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
  return device == VEGAS_CPU && p.batch > 0 ? check_lengths(p) : VEGAS_OK;
}

}  // namespace
}  // namespace vegas_ops

int vegas_flash_attn_with_logit_dump(const VegasVerifyParams* params, VegasDevice device, void* stream) {
  if (int status = vegas_ops::check_call(params, device)) return status;
  if (int status = vegas_ops::check(*params, device)) return status;
  return vegas_ops::dispatch(*params, device, stream, vegas_ops::cpu_kernels().verify, VEGAS_CUDA_KERNEL(verify_cuda));
}
