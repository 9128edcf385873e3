// sparse_paged_decode on any GPU from sm_80: plan, attention, and a last kernel that merges chunks.
#include "common/backends.h"
#include "common/portable_launch.cuh"
#include "common/status.h"
#include "sparse/portable.cuh"
#include "sparse/portable_launch.h"

namespace vegas_ops {
namespace portable {

namespace {

__global__ void __launch_bounds__(kPlanThreads)
    sparse_plan_kernel(const __grid_constant__ VegasSparseParams p, const __grid_constant__ PlanWorkspace w,
                       SplitRule rule) {
  const auto work = [&](int b) { return RequestWork{SparseRequest(p, b).keys(p, b), w.row_tiles}; };
  make_plan(work, p.batch, rule, w);
}

// A warp per row.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    sparse_merge_kernel(const __grid_constant__ VegasSparseParams p, const __grid_constant__ PlanWorkspace w) {
  const int group = p.num_heads_q / p.cache.num_heads_kv;
  const int64_t row_index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int b = static_cast<int>(row_index / p.num_heads_q);
  if (b >= p.batch) return;
  const PlannedRequest plan = w.requests[b];
  if (plan.chunks <= 1) return;
  const int head = static_cast<int>(row_index % p.num_heads_q);
  const int kv_head = head / group;
  const int row = head % group;
  merge_chunks(w, plan, w.row_tiles, row / kSparseRows, kv_head, row % kSparseRows,
               row_output<Element>(p, b, kv_head, head));
}

PlanBounds plan_bounds(int batch, int64_t max_keys, int num_heads_q, int num_heads_kv, int head_dim) {
  const int group = num_heads_q / num_heads_kv;
  return {
      batch, ceil_div(group, kSparseRows), group < kSparseRows ? group : kSparseRows, num_heads_kv, head_dim, max_keys,
      0};
}

}  // namespace
}  // namespace portable

int sparse_portable(const VegasSparseParams& p, void* stream_handle) {
  using namespace portable;
  if (p.batch == 0) return VEGAS_OK;
  const int unit = p.cache.dtype == VEGAS_FP8_E4M3 ? 16 : 8;
  VEGAS_CHECK(p.cache.head_dim <= 256 && p.cache.head_dim % unit == 0,
              "`head_dim` must be a multiple of %d up to 256 for this cache on CUDA, got %d", unit, p.cache.head_dim);
  const int64_t max_tail = p.tail_start ? int64_t{p.cache.max_pages} * p.cache.page_size : 0;
  const PlanBounds bounds =
      plan_bounds(p.batch, p.max_k + max_tail, p.num_heads_q, p.cache.num_heads_kv, p.cache.head_dim);
  const SplitRule rule = split_rule(p.num_splits, p.batch_invariant);
  PlanWorkspace w;
  const size_t needed = lay_out(bounds, rule, static_cast<char*>(p.workspace), &w);
  VEGAS_CHECK(p.workspace && p.workspace_bytes >= needed, "`workspace` must have at least %zu bytes, got %zu", needed,
              p.workspace ? p.workspace_bytes : size_t{0});
  const int64_t units = bounds.units(rule);
  const int64_t rows = int64_t{p.batch} * p.num_heads_q;
  VEGAS_CHECK(units * p.cache.num_heads_kv <= INT_MAX && rows <= INT_MAX,
              "`batch` must need fewer than 2^31 CTAs, got batch %d", p.batch);

  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const int plan_threads = p.batch >= kPlanThreads ? kPlanThreads : ceil_div(p.batch, 32) * 32;
  sparse_plan_kernel<<<1, plan_threads, 0, stream>>>(p, w, rule);
  cudaError_t error = cudaGetLastError();
  const bool fp16 = p.q_dtype == VEGAS_FLOAT16;
  if (error == cudaSuccess) {
    error = fp16 ? launch_sparse<__half>(p, w, units, stream) : launch_sparse<__nv_bfloat16>(p, w, units, stream);
  }
  if (error == cudaSuccess && bounds.split_units(rule) > 0) {
    const auto kernel = fp16 ? sparse_merge_kernel<__half> : sparse_merge_kernel<__nv_bfloat16>;
    kernel<<<static_cast<unsigned>(ceil_div64(rows, kWarps)), kThreads, 0, stream>>>(p, w);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // returned here, so the next call must not find it
    return fail(VEGAS_CUDA_ERROR, "sparse_paged_decode: launch failed: %s", cudaGetErrorString(error));
  }
  return VEGAS_OK;
}

size_t sparse_portable_workspace(const VegasBounds& b) {
  using namespace portable;
  if (b.max_batch <= 0 || b.num_heads_kv <= 0 || b.head_dim > 256) return 0;
  return workspace_for_all_rules(
      plan_bounds(b.max_batch, int64_t{b.max_k} + b.max_seqlen_k, b.num_heads_q, b.num_heads_kv, b.head_dim));
}

}  // namespace vegas_ops
