// Arguments of topk_aggregate_logits and aggregate_logits: what can be told without reading device data
// is checked on every device; lengths and tables only on the CPU, where they are host data.
#include "common/check_overlap.h"
#include "common/dispatch.h"
#include "select/values.h"

namespace vegas_ops {
namespace {

constexpr int kMaxTokens = 1 << 29;  // positions plus what a kernel adds to them stay within int32

int check_dump(const VegasSelectParams& p) {
  const bool token = p.dump == VEGAS_DUMP_TOKEN || p.dump == VEGAS_DUMP_TOKEN_WEIGHT;
  const bool raw = p.dump == VEGAS_DUMP_ROWS || p.dump == VEGAS_DUMP_ALL;
  VEGAS_CHECK(token || raw || p.dump == VEGAS_DUMP_KV_HEAD, "`dump` must be a kind of dump that holds logits, got %d",
              static_cast<int>(p.dump));
  VEGAS_CHECK(p.logits_dtype == VEGAS_FLOAT32 || (!token && p.logits_dtype == VEGAS_BFLOAT16),
              token ? "`logits` of a token dump must be float32, got dtype %d"
                    : "`logits` must be float32 or bfloat16, got dtype %d",
              static_cast<int>(p.logits_dtype));
  VEGAS_CHECK(p.mode == VEGAS_MODE_LOGIT || p.mode == VEGAS_MODE_WEIGHT, "`mode` must be logit or weight, got %d",
              static_cast<int>(p.mode));
  VEGAS_CHECK(p.layers >= 0 && p.batch >= 0 && p.max_seqlen_k >= 0,
              "`logits` must have no negative dimension, got %d layers, batch %d, %d tokens", p.layers, p.batch,
              p.max_seqlen_k);
  VEGAS_CHECK(p.max_seqlen_k <= kMaxTokens, "`logits` must have at most %d columns, got %d", kMaxTokens,
              p.max_seqlen_k);
  VEGAS_CHECK(token || p.num_heads > 0, "`logits` must have at least one head, got %d", p.num_heads);
  VEGAS_CHECK(p.total_q >= 0, "`logits` must have no negative dimension, got %d rows", p.total_q);
  const int64_t rows = static_cast<int64_t>(p.layers) * p.batch;
  VEGAS_CHECK(rows <= INT32_MAX / (p.per_kv_head && p.num_heads > 0 ? p.num_heads : 1),
              "`logits` must make fewer than 2^31 lists, got %d layers, batch %d, %d heads", p.layers, p.batch,
              p.num_heads);
  const bool empty = rows == 0;
  VEGAS_CHECK(empty || p.seqlens, "`seqlens` must be given, got none");
  VEGAS_CHECK(empty || p.max_seqlen_k == 0 || (p.dump == VEGAS_DUMP_ALL && p.total_q == 0) || p.logits,
              "`logits` must be given, got none");
  VEGAS_CHECK(p.dump != VEGAS_DUMP_ALL || empty || p.cu_seqlens_q,
              "`cu_seqlens_q` must be given for this dump, got none");
  if (p.mode == VEGAS_MODE_WEIGHT && !empty) {
    VEGAS_CHECK(p.dump != VEGAS_DUMP_KV_HEAD || p.guide_lse, "`guide_lse` must be given for weights, got none");
    VEGAS_CHECK(!raw || p.lse || p.total_q == 0, "`lse` must be given for weights, got none");
    VEGAS_CHECK(!raw || p.cu_seqlens_q, "`cu_seqlens_q` must be given for weights, got none");
  }
  return VEGAS_OK;
}

int check_memory(const VegasSelectParams& p) {
  const int64_t layers = p.layers, batch = p.batch, heads = p.num_heads, lists = p.per_kv_head ? heads : 1;
  const int64_t lists_in_all = layers * batch * lists;
  const int64_t* stride = p.logits_stride;
  const auto logits = [&]() -> Span {
    const int64_t bytes = element_bytes(p.logits_dtype), width = p.max_seqlen_k;
    const Span::Dim layer = {layers, stride[0]};
    switch (p.dump) {
      case VEGAS_DUMP_KV_HEAD:
        return Span("logits", p.logits, bytes, width, {layer, {batch, stride[1]}, {2, stride[2]}, {heads, stride[3]}});
      case VEGAS_DUMP_ROWS:
        return Span("logits", p.logits, bytes, width, {layer, {batch, stride[1]}, {heads, stride[2]}, {2, stride[3]}});
      case VEGAS_DUMP_ALL:
        return Span("logits", p.logits, bytes, width, {layer, {p.total_q, stride[1]}, {heads, stride[2]}});
      default:
        return Span("logits", p.logits, bytes, width, {layer, {batch, stride[1]}});
    }
  };
  return check_overlap(
      {Span("out", p.sums, 4, p.max_seqlen_k, {{layers, p.sums_stride_layer}, {batch, p.sums_stride_batch}}),
       Span("indices", p.indices, 4, lists_in_all * p.max_k), Span("topk_length", p.topk_length, 4, lists_in_all),
       Span("workspace", p.workspace, 1, static_cast<int64_t>(p.workspace_bytes))},
      {logits(), Span("seqlens", p.seqlens, 4, batch), Span("k", p.k_per_request, 4, batch),
       Span("lse", p.lse, 4, layers * heads * p.total_q), Span("guide_lse", p.guide_lse, 4, layers * batch * 2 * heads),
       Span("cu_seqlens_q", p.cu_seqlens_q, 4, batch + 1), Span("dump_rows", p.dump_rows, 4, batch),
       Span("sinks", p.sinks, 4, heads, {{layers, p.sinks_stride_layer}}),
       Span("block_table", p.block_table, 4, p.max_pages, {{batch, p.block_table_stride}})});
}

int check_values_of(const VegasSelectParams& p, VegasDevice device, void* stream) {
  return check_values<SelectValues>(p, device, stream, VEGAS_CUDA_KERNEL(select_values_cuda));
}

int check_host_data(const VegasSelectParams& p) {
  // A token or KV-head dump does not say how many rows its requests had in all.
  const bool rows_known = p.dump == VEGAS_DUMP_ALL || (p.dump == VEGAS_DUMP_ROWS && p.mode == VEGAS_MODE_WEIGHT);
  for (int32_t b = 0; b < p.batch; ++b) {
    if (!p.cu_seqlens_q) break;
    const int32_t begin = p.cu_seqlens_q[b], end = p.cu_seqlens_q[b + 1];
    VEGAS_CHECK(begin >= 0 && begin <= end, "`cu_seqlens_q` must not decrease, got %d before %d at request %d", begin,
                end, b);
    VEGAS_CHECK(!rows_known || end <= p.total_q, "`cu_seqlens_q` must be at most %d, the rows of the dump, got %d",
                p.total_q, end);
  }
  return VEGAS_OK;
}

int check_selection(const VegasSelectParams& p) {
  VEGAS_CHECK(!p.per_kv_head || p.dump == VEGAS_DUMP_KV_HEAD,
              "`per_kv_head` must come with a kv_head dump, got dump %d", static_cast<int>(p.dump));
  VEGAS_CHECK(p.pool_before >= 0 && p.pool_after >= 0, "`pool` must be two numbers >= 0, got (%d, %d)", p.pool_before,
              p.pool_after);
  VEGAS_CHECK(p.num_sink >= 0, "`num_sink` must be >= 0, got %d", p.num_sink);
  VEGAS_CHECK(p.num_recent >= 0, "`num_recent` must be >= 0, got %d", p.num_recent);
  VEGAS_CHECK(p.max_k >= 0, "`max_k` must be >= 0, got %d", p.max_k);
  VEGAS_CHECK(p.page_size >= 0, "`page_size` must not be negative, got %d", p.page_size);
  VEGAS_CHECK(p.max_pages >= 0, "`block_table` must have no negative dimension, got %d", p.max_pages);
  VEGAS_CHECK(!p.block_table || p.page_size > 0, "`page_size` must be positive, got %d", p.page_size);
  if (int status = check_workspace(p.workspace)) return status;
  const bool empty = p.layers == 0 || p.batch == 0;
  VEGAS_CHECK(empty || p.max_k == 0 || p.indices, "`indices` must be given, got none");
  VEGAS_CHECK(empty || p.topk_length, "`topk_length` must be given, got none");
  VEGAS_CHECK(empty || p.page_size == 0 || p.max_pages == 0 || p.block_table,
              "`block_table` must be given with `page_size`, got none");
  return VEGAS_OK;
}

int check_host_table(const VegasSelectParams& p) {
  if (p.page_size == 0) return VEGAS_OK;
  const int64_t capacity = static_cast<int64_t>(p.max_pages) * p.page_size;
  for (int32_t b = 0; b < p.batch; ++b) {
    const int32_t length = p.seqlens[b] < p.max_seqlen_k ? p.seqlens[b] : p.max_seqlen_k;
    VEGAS_CHECK(length <= capacity, "`seqlens` must fit `block_table`, got %d tokens for %d pages of %d at request %d",
                length, p.max_pages, p.page_size, b);
  }
  return VEGAS_OK;
}

}  // namespace
}  // namespace vegas_ops

int vegas_topk_aggregate_logits(const VegasSelectParams* params, VegasDevice device, void* stream) {
  using namespace vegas_ops;
  if (int status = check_call(params, device)) return status;
  const VegasSelectParams& p = *params;
  if (int status = check_dump(p)) return status;
  if (int status = check_selection(p)) return status;
  if (int status = check_memory(p)) return status;
  if (device == VEGAS_CPU && p.layers > 0) {
    if (int status = check_host_data(p)) return status;
    if (int status = check_host_table(p)) return status;
  }
  if (int status = check_values_of(p, device, stream)) return status;
  return dispatch(p, device, stream, cpu_kernels().select, VEGAS_CUDA_KERNEL(select_cuda));
}

int vegas_aggregate_logits(const VegasSelectParams* params, VegasDevice device, void* stream) {
  using namespace vegas_ops;
  if (int status = check_call(params, device)) return status;
  const VegasSelectParams& p = *params;
  if (int status = check_dump(p)) return status;
  VEGAS_CHECK(p.layers == 0 || p.batch == 0 || p.max_seqlen_k == 0 || p.sums, "`out` must be given, got none");
  if (int status = check_memory(p)) return status;
  if (device == VEGAS_CPU && p.layers > 0) {
    if (int status = check_host_data(p)) return status;
  }
  if (int status = check_values_of(p, device, stream)) return status;
  return dispatch(p, device, stream, cpu_kernels().aggregate, VEGAS_CUDA_KERNEL(aggregate_portable));
}
