// flash_attn_with_logit_dump on any GPU from sm_80: plan, attention, and a last kernel that merges chunks and
// adds up the KV heads' parts of a summed dump.
#include <algorithm>

#include "common/backends.h"
#include "common/cuda_launch.h"
#include "common/portable_launch.cuh"
#include "common/status.h"
#include "verify/portable.cuh"
#include "verify/portable_launch.h"

namespace vegas_ops {
namespace portable {

namespace {

constexpr int kDumpCtas = 2048;  // about as many as finish dumps, over all requests

__global__ void __launch_bounds__(kPlanThreads)
    verify_plan_kernel(const __grid_constant__ VegasVerifyParams p, const __grid_constant__ PlanWorkspace w,
                       SplitRule rule, int tile_rows) {
  const auto work = [&](int b) {
    const VerifyRequest request(p, b);
    return RequestWork{request.end_key - request.first_key, request.row_tiles(p, tile_rows)};
  };
  make_plan(work, p.batch, rule, w);
}

// The first merge_ctas CTAs merge chunks, a warp per row; the others finish dumps.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    verify_finish_kernel(const __grid_constant__ VegasVerifyParams p, const __grid_constant__ PlanWorkspace w,
                         int tile_rows, int64_t merge_ctas, int dump_parts) {
  if (blockIdx.x >= merge_ctas) {
    const int64_t i = blockIdx.x - merge_ctas;
    const int b = static_cast<int>(i / dump_parts);
    const int part = static_cast<int>(i % dump_parts);
    const VerifyRequest request(p, b);
    if (p.dump == VEGAS_DUMP_KV_HEAD) {
      mask_dump(p, request, b, part, dump_parts, kThreads);
    } else {
      reduce_dump(p, w.dump, p.cache.num_heads_kv, request, b, part, dump_parts, kThreads);
    }
    return;
  }
  const int row_groups = ceil_div(w.tile_rows + w.extra_norms, kWarps);
  int64_t i = blockIdx.x;
  const int row = static_cast<int>(i % row_groups) * kWarps + threadIdx.x / 32;
  i /= row_groups;
  const int kv_head = static_cast<int>(i % w.num_heads_kv);
  i /= w.num_heads_kv;
  const int row_tile = static_cast<int>(i % w.row_tiles);
  const int b = static_cast<int>(i / w.row_tiles);
  const PlannedRequest plan = w.requests[b];
  if (plan.chunks <= 1) return;
  const VerifyRequest request(p, b);
  const int row_tiles = request.row_tiles(p, tile_rows);
  if (row >= w.tile_rows) {
    const int guide = row - w.tile_rows;
    if (row_tile > 0 || guide >= request.num_guides || p.dump == VEGAS_DUMP_TOKEN) return;
    const float2* first = w.extra_norm_of(plan, row_tiles, 0, kv_head, guide);
    const int64_t stride = w.extra_norm_of(plan, row_tiles, 1, kv_head, guide) - first;
    const RowNorm norm = merge_norms(first, stride, plan.chunks, [](int, float) {});
    if (threadIdx.x % 32 == 0) write_guide_lse(p, request, b, kv_head, guide, norm.lse());
    return;
  }
  const int packed_row = row_tile * tile_rows + row;
  if (packed_row >= request.packed_rows(p)) return;
  merge_chunks(w, plan, row_tiles, row_tile, kv_head, row, row_output<Element>(p, request, b, kv_head, packed_row));
}

PlanBounds plan_bounds(RowMapping mapping, int rows, int batch, int64_t max_seqlen_k, int num_heads_kv, int head_dim,
                       bool summed, bool guided) {
  const int tile_rows = mapping.tile_rows();
  const int64_t dump_floats = summed ? batch * part_floats(num_heads_kv, max_seqlen_k) : 0;
  return {batch,
          ceil_div(rows, tile_rows),
          rows < tile_rows ? rows : tile_rows,
          num_heads_kv,
          head_dim,
          max_seqlen_k,
          dump_floats,
          guided ? 2 : 0};
}

constexpr int kMostRows = 1 << 30;  // packed rows of a request

// A call within the bounds may have smaller heads and fewer rows, and so any mapping; none of its head dimension has
// more tiles, nor more rows in one.
size_t workspace_for_rows(const VegasBounds& b) {
  const int64_t all_rows = int64_t{b.max_q_len} * (b.num_heads_q / b.num_heads_kv);
  const int rows = all_rows < kMostRows ? static_cast<int>(all_rows) : kMostRows;
  size_t bytes = 0;
  for (int head_dim : {b.head_dim, std::min(b.head_dim, 128), std::min(b.head_dim, 64)}) {
    const RowMapping most =
        head_dim > 128 ? RowMapping{1, false, kWarps} : RowMapping{1, true, max_row_warps(head_dim)};
    bytes = std::max(bytes, workspace_for_all_rules(plan_bounds(most, rows, b.max_batch, b.max_seqlen_k, b.num_heads_kv,
                                                                head_dim, true, true)));
  }
  return bytes;
}

}  // namespace
}  // namespace portable

int verify_portable(const VegasVerifyParams& params, size_t kept, void* stream_handle) {
  using namespace portable;
  VegasVerifyParams p = params;
  // No request has more rows than there are: a loose bound costs nothing.
  if (p.max_seqlen_q > p.total_q) p.max_seqlen_q = p.total_q;
  if (p.batch == 0 || p.max_seqlen_q == 0) return VEGAS_OK;
  const int unit = p.cache.dtype == VEGAS_FP8_E4M3 ? 16 : 8;
  VEGAS_CHECK(p.cache.head_dim <= 256 && p.cache.head_dim % unit == 0,
              "`head_dim` must be a multiple of %d up to 256 for this cache on CUDA, got %d", unit, p.cache.head_dim);
  const int group = p.num_heads_q / p.cache.num_heads_kv;
  const bool guided = p.dump == VEGAS_DUMP_TOKEN_WEIGHT || p.dump == VEGAS_DUMP_KV_HEAD;
  const bool summed = p.dump == VEGAS_DUMP_TOKEN || p.dump == VEGAS_DUMP_TOKEN_WEIGHT;
  const int64_t all_rows = int64_t{p.max_seqlen_q} * group;
  VEGAS_CHECK(all_rows <= kMostRows, "`max_seqlen_q` must mean at most %d rows of a KV head, got %d", kMostRows,
              p.max_seqlen_q);
  const int rows = static_cast<int>(all_rows);
  const RowMapping mapping =
      p.batch_invariant ? invariant_row_mapping(rows, p.cache.head_dim) : row_mapping_for(rows, p.cache.head_dim);
  const int tile_rows = mapping.tile_rows();
  const PlanBounds bounds =
      plan_bounds(mapping, rows, p.batch, p.max_seqlen_k, p.cache.num_heads_kv, p.cache.head_dim, summed, guided);
  const SplitRule rule = split_rule(p.num_splits, p.batch_invariant);
  PlanWorkspace w;
  char* base = p.workspace ? static_cast<char*>(p.workspace) + kept : nullptr;
  const size_t needed = kept + lay_out(bounds, rule, base, &w);
  VEGAS_CHECK(p.workspace && p.workspace_bytes >= needed, "`workspace` must have at least %zu bytes, got %zu", needed,
              p.workspace ? p.workspace_bytes : size_t{0});

  const bool split = bounds.split_units(rule) > 0;
  const int row_groups = ceil_div(bounds.tile_rows + bounds.extra_norms, kWarps);
  const int64_t merge_ctas =
      split ? int64_t{p.batch} * bounds.row_tiles * p.cache.num_heads_kv * row_groups : int64_t{0};
  const int dump_parts = dump_ctas(p, summed, kDumpCtas, kThreads);
  const int64_t units = bounds.units(rule);
  const int64_t finish_ctas = merge_ctas + int64_t{p.batch} * dump_parts;
  VEGAS_CHECK(units * p.cache.num_heads_kv <= INT_MAX && finish_ctas <= INT_MAX,
              "`batch` and `max_seqlen_q` must need fewer than 2^31 CTAs, got batch %d and max_seqlen_q %d", p.batch,
              p.max_seqlen_q);

  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const int plan_threads = p.batch >= kPlanThreads ? kPlanThreads : ceil_div(p.batch, 32) * 32;
  verify_plan_kernel<<<1, plan_threads, 0, stream>>>(p, w, rule, tile_rows);
  cudaError_t error = cudaGetLastError();
  const bool fp16 = p.q_dtype == VEGAS_FLOAT16;
  if (error == cudaSuccess) {
    error = fp16 ? launch_verify<__half>(p, w, mapping, units, stream)
                 : launch_verify<__nv_bfloat16>(p, w, mapping, units, stream);
  }
  if (error == cudaSuccess && finish_ctas > 0) {
    const auto kernel = fp16 ? verify_finish_kernel<__half> : verify_finish_kernel<__nv_bfloat16>;
    kernel<<<static_cast<unsigned>(finish_ctas), kThreads, 0, stream>>>(p, w, tile_rows, merge_ctas, dump_parts);
    error = cudaGetLastError();
  }
  return launch_status("flash_attn_with_logit_dump", error);
}

size_t verify_portable_workspace(const VegasBounds& b) {
  using namespace portable;
  if (b.max_batch <= 0 || b.max_q_len <= 0 || b.num_heads_kv <= 0 || b.head_dim > 256) return 0;
  return workspace_for_rows(b);
}

}  // namespace vegas_ops
