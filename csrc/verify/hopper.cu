// flash_attn_with_logit_dump on Hopper: attention by a persistent grid, then a dependent launch that merges what was
// split among CTAs and adds up the KV heads' parts of a summed dump.
#include <cuda.h>

#include <algorithm>
#include <numeric>

#include "common/backends.h"
#include "common/cuda_launch.h"
#include "common/portable_launch.cuh"
#include "common/status.h"
#include "verify/hopper_boxes.h"
#include "verify/hopper_finish.cuh"
#include "verify/hopper_launch.h"

namespace vegas_ops {
namespace hopper {

namespace {

constexpr int kDumpCtas = 1024;   // about as many as finish dumps, over all requests
constexpr int kFinishCtas = 4;    // that merge, of an SM: all of them start at once
constexpr int kMaxBatch = 4096;   // every CTA looks at all requests
constexpr int kMaxPairs = 60000;  // of a row tile and KV head, of a request: a dimension of the last launch
constexpr int kMaxForcedSplits = 16;
constexpr int64_t kRingFrom = 8 << 20;  // bytes of a dump's parts: fewer stay in the L2 cache
constexpr int kRingTeam = 5;            // KV heads, at least: CTAs of smaller teams would wait for the ring too often
constexpr int kRingTeams = 16;          // fewer might all wait for CTAs that other kernels leave no room for
constexpr size_t kPaceBytes = 256;
constexpr int kMostPacedRows = 16;     // packed, of d = 64
constexpr int64_t kFewKeys = 1 << 17;  // of a call: two row groups of d = 64 look for more no earlier than others

// What sizes a workspace.
struct Sizes {
  int64_t batch;
  int64_t rows;  // packed rows of a request
  int64_t keys;
  int num_heads_kv;
  int group;  // query heads of a KV head
  int head_dim;
  bool summed;

  int64_t row_tiles(int row_groups) const { return ceil_div64(rows, 64 * row_groups); }
};

// All KV heads together, unless there are so many that few teams would be left.
int team_size(int num_heads_kv, int grid) { return num_heads_kv <= grid / 4 ? num_heads_kv : 1; }

// Where pairs of a request and row tile have about the same keys, so many teams that no share crosses from one to the
// next: memory is as busy with one team in 20 fewer.
int even_teams(int most, int64_t pairs) {
  const int64_t even = pairs <= most ? most / pairs * pairs : pairs / ceil_div64(pairs, most);
  return static_cast<int>(even) >= most - most / 20 ? static_cast<int>(even) : most;
}

// Of all teams of a grid of two CTAs per SM: each CTA has its keys of kMostRingTiles tiles. Then the count of steps.
size_t ring_bytes(int num_sms) {
  return size_t{2} * num_sms * kMostRingTiles * kMostTileKeys * sizeof(uint32_t) + kPaceBytes;
}

size_t lay_out(const Sizes& b, SplitRule rule, int row_groups, int num_sms, bool guides_in_rows, char* base,
               Workspace* w) {
  const int grid = ctas_per_sm(row_groups, portable::padded_head_dim(b.head_dim)) * num_sms;
  size_t size = 0;
  auto take = [&](int64_t bytes) {
    char* at = base ? base + size : nullptr;
    size += (static_cast<size_t>(bytes) + 255) / 256 * 256;
    return at;
  };
  const int64_t pairs = b.batch * b.num_heads_kv * b.row_tiles(row_groups);
  const int padded = portable::padded_head_dim(b.head_dim);
  const int64_t tiles = b.keys < 1 ? 1 : ceil_div64(b.keys, kMinTileKeys);
  int64_t slots = 2 * int64_t{grid};
  if (rule.mode == SplitMode::kInvariant) slots = pairs * ceil_div64(tiles * kMinTileKeys, kInvariantKeys);
  if (rule.mode == SplitMode::kForced) slots = pairs * (tiles < rule.num_splits ? tiles : rule.num_splits);
  w->rule = rule;
  w->tile_shift = tile_keys(row_groups, rule.mode == SplitMode::kBalanced) == 128 ? 7 : 6;
  w->team = team_size(b.num_heads_kv, grid);
  w->rounds = b.num_heads_kv / w->team;
  w->teams = cutlass::FastDivmod(even_teams(grid / w->team, b.batch * b.row_tiles(row_groups) * w->rounds));
  w->group = b.group;
  w->group_rows = cutlass::FastDivmod(64 * row_groups);
  w->tile_rows = static_cast<int>(b.rows < 64 * row_groups ? b.rows : 64 * row_groups);
  w->norm_rows = w->tile_rows + 2;
  w->guides_in_rows = guides_in_rows;
  const int64_t part_bytes = b.summed ? b.batch * portable::part_floats(b.num_heads_kv, b.keys) * sizeof(float) : 0;
  // Guide warps that multiply for two row groups have no time for it.
  const bool has_time = grid == 2 * num_sms || (row_groups == 2 && guides_in_rows);
  const bool ring = part_bytes >= kRingFrom && has_time && grid >= kRingTeams * w->team && w->team >= kRingTeam &&
                    w->team <= kMostRingTiles;
  w->ring_tiles = ring ? std::min(kMostRingTiles / w->team, kMostPending) * w->team : 0;
  w->ring = reinterpret_cast<uint32_t*>(take(ring_bytes(num_sms)));  // first, for it must lie where no call has others
  w->pace = reinterpret_cast<int*>(w->ring) + (ring_bytes(num_sms) - kPaceBytes) / sizeof(int);
  w->requests = reinterpret_cast<RequestPlan*>(take(b.batch * sizeof(RequestPlan)));
  w->partial_norm = reinterpret_cast<float2*>(take(slots * w->norm_rows * sizeof(float2)));
  w->partial_output = reinterpret_cast<float*>(take(slots * w->tile_rows * padded * sizeof(float)));
  // Calls within the same bounds may be too small for the ring.
  float* parts = reinterpret_cast<float*>(take(ring ? kRingFrom : part_bytes));
  w->dump = ring || !b.summed ? nullptr : parts;
  return size;
}

SplitRule rule_of(int num_splits, int batch_invariant) {
  if (num_splits > 0) return {SplitMode::kForced, num_splits < kMaxForcedSplits ? num_splits : kMaxForcedSplits};
  return {batch_invariant ? SplitMode::kInvariant : SplitMode::kBalanced, 0};
}

// The copy engine's view of K or V in boxes of `box` tokens; false where it cannot have one.
bool describe(const VegasCacheView& view, const VegasPagedCache& cache, VegasDtype dtype, int box,
              cute::TmaDescriptor* descriptor) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)
               : nullptr;
  }();
  const bool fp8 = dtype == VEGAS_FP8_E4M3;
  const int element_bytes = fp8 ? 1 : 2;
  // A row of a box is 128 bytes, unless all that there is takes 64.
  const bool narrow = fp8 && cache.head_dim <= 64;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(cache.head_dim), static_cast<cuuint64_t>(cache.num_heads_kv),
                               static_cast<cuuint64_t>(cache.page_size), static_cast<cuuint64_t>(cache.num_pages)};
  const int64_t steps[3] = {view.stride_head, view.stride_token, view.stride_page};
  cuuint64_t strides[3];
  for (int i = 0; i < 3; ++i) {
    if (steps[i] < 0) return false;
    strides[i] = static_cast<cuuint64_t>(steps[i]) * element_bytes;
  }
  const cuuint32_t box_sizes[4] = {fp8 && !narrow ? 128u : 64u, 1, static_cast<cuuint32_t>(box), 1};
  const cuuint32_t dense[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type = fp8                      ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : dtype == VEGAS_FLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode &&
         encode(descriptor, type, 4, const_cast<void*>(view.data), sizes, strides, box_sizes, dense,
                CU_TENSOR_MAP_INTERLEAVE_NONE, narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

CacheBoxes boxes_of(const VegasPagedCache& cache) {
  CacheBoxes boxes = {};
  boxes.page_size = cutlass::FastDivmod(cache.page_size);
  const int box = std::gcd(cache.page_size, kMinTileKeys);
  // The swizzle repeats every 8 rows.
  const bool described = box >= 8 && cache.num_pages > 0 && describe(cache.k, cache, cache.dtype, box, &boxes.k) &&
                         describe(cache.v, cache, cache.dtype, box, &boxes.v);
  boxes.box = described ? box : 0;
  for (boxes.box_log2 = 0; 1 << boxes.box_log2 < box; ++boxes.box_log2) {
  }
  return boxes;
}

}  // namespace
}  // namespace hopper

bool verify_hopper_takes(const VegasVerifyParams& p) {
  using namespace hopper;
  const bool fp8 = p.cache.dtype == VEGAS_FP8_E4M3;
  if (p.cache.head_dim > (fp8 ? 128 : 256) || p.cache.head_dim % (fp8 ? 16 : 8) != 0) return false;
  if (!portable::query_aligned(p)) return false;
  if (p.dump == VEGAS_DUMP_ALL) return false;
  if (p.dump == VEGAS_DUMP_ROWS && (fp8 || p.softcap > 0.0f || p.logits_dtype != VEGAS_BFLOAT16 ||
                                    p.num_heads_q > kMostDumpedHeads * p.cache.num_heads_kv)) {
    return false;
  }
  // Heads are summed after the cap, but multiplied as one.
  if (p.dump == VEGAS_DUMP_TOKEN && p.softcap > 0.0f) return false;
  // Every CTA looks at all requests, and counts units of work in 32 bits.
  const int64_t tiles = ceil_div64(p.max_seqlen_k, kMinTileKeys) + 1;
  const int64_t row_tiles = ceil_div64(int64_t{p.max_seqlen_q} * p.num_heads_q / p.cache.num_heads_kv, 64);
  const int64_t pairs = p.cache.num_heads_kv * row_tiles;
  return p.batch <= kMaxBatch && pairs <= kMaxPairs && p.batch * pairs <= INT_MAX / 2 / tiles;
}

int verify_hopper(const VegasVerifyParams& params, void* stream_handle) {
  using namespace hopper;
  VegasVerifyParams p = params;
  // No request has more rows than there are: a loose bound costs nothing.
  if (p.max_seqlen_q > p.total_q) p.max_seqlen_q = p.total_q;
  if (p.batch == 0 || p.max_seqlen_q == 0) return VEGAS_OK;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  int num_sms;
  const cudaError_t error = num_multiprocessors(&num_sms);
  if (error != cudaSuccess) return launch_status("flash_attn_with_logit_dump", error);
  const bool summed = p.dump == VEGAS_DUMP_TOKEN || p.dump == VEGAS_DUMP_TOKEN_WEIGHT;
  const int64_t rows = int64_t{p.max_seqlen_q} * (p.num_heads_q / p.cache.num_heads_kv);
  const Sizes sizes = {
      p.batch,          rows,  p.max_seqlen_k, p.cache.num_heads_kv, p.num_heads_q / p.cache.num_heads_kv,
      p.cache.head_dim, summed};
  const SplitRule rule = rule_of(p.num_splits, p.batch_invariant);
  const bool fp8 = p.cache.dtype == VEGAS_FP8_E4M3;
  const int row_groups = fp8 ? 1 : row_groups_for(rows, p.cache.head_dim);
  const bool balanced = rule.mode == SplitMode::kBalanced;
  const bool guides_in_rows =
      !fp8 && guides_fit(row_groups, portable::padded_head_dim(p.cache.head_dim), tile_keys(row_groups, balanced)) &&
      rows <= 64 * (row_groups - 1) + kFirstGuideRow && balanced &&
      (p.dump == VEGAS_DUMP_TOKEN || p.dump == VEGAS_DUMP_TOKEN_WEIGHT || p.dump == VEGAS_DUMP_KV_HEAD);
  Workspace w;
  const size_t needed = lay_out(sizes, rule, row_groups, num_sms, guides_in_rows, static_cast<char*>(p.workspace), &w);
  VEGAS_CHECK(p.workspace && p.workspace_bytes >= needed, "`workspace` must have at least %zu bytes, got %zu", needed,
              p.workspace ? p.workspace_bytes : size_t{0});
  const bool dumps = p.dump != VEGAS_DUMP_NONE;
  if (fp8 && fp8_tile_keys(w.tile_rows, p.cache.head_dim, dumps, balanced) == 128) w.tile_shift = 7;
  // Large calls of two row groups of d = 64 leave no time, and gain nothing.
  const bool waits = row_groups == 1 || p.cache.head_dim > 64 || p.batch * int64_t{p.max_seqlen_k} <= kFewKeys;
  // More rows of d = 64 take as long as their keys do to arrive, and lose by it.
  const bool paced = balanced && (p.cache.head_dim > 64 || w.tile_rows <= kMostPacedRows);
  w.pace_slack = !paced ? -1 : p.cache.head_dim > 64 ? 0 : 2;
  const bool guesses = p.batch <= kFewRequests && p.dump != VEGAS_DUMP_ROWS && waits;
  LaunchShape shape = {row_groups, 1 << w.tile_shift, guesses, dim3(w.team, w.teams.divisor)};
  shape.merges =
      p.max_seqlen_k > kMinTileKeys ? static_cast<int>(sizes.row_tiles(row_groups)) * p.cache.num_heads_kv : 0;
  // A CTA merges one row where there are few, which then have many chunks.
  const int64_t rows_to_merge = int64_t{p.batch} * shape.merges * w.norm_rows;
  const int64_t row_ctas_at_once = kFinishCtas * num_sms;
  shape.rows_per_cta =
      rows_to_merge <= row_ctas_at_once
          ? 1
          : static_cast<int>(std::min<int64_t>(ceil_div64(rows_to_merge, row_ctas_at_once * kFinishWarps),
                                               ceil_div(w.norm_rows, kFinishWarps))) *
                kFinishWarps;
  const int row_ctas = ceil_div(w.norm_rows, shape.rows_per_cta);
  const int dump_ctas = portable::dump_ctas(p, w.dump != nullptr, kDumpCtas, kFinishThreads);
  shape.finish_grid = dim3(row_ctas, shape.merges + ceil_div(dump_ctas, row_ctas), p.batch);
  const CacheBoxes boxes = boxes_of(p.cache);
  const auto launch = p.q_dtype == VEGAS_FLOAT16
                          ? (fp8 ? launch_verify_fp8<__half> : launch_verify<__half>)
                          : (fp8 ? launch_verify_fp8<__nv_bfloat16> : launch_verify<__nv_bfloat16>);
  return launch_status("flash_attn_with_logit_dump", launch(p, w, boxes, shape, stream));
}

size_t verify_hopper_ring_bytes() {
  int num_sms;
  return num_multiprocessors(&num_sms) == cudaSuccess ? hopper::ring_bytes(num_sms) : 0;
}

size_t verify_hopper_workspace(const VegasBounds& b) {
  using namespace hopper;
  int num_sms;
  if (b.max_batch <= 0 || b.max_q_len <= 0 || b.num_heads_kv <= 0 || b.head_dim > 256) return 0;
  if (num_multiprocessors(&num_sms) != cudaSuccess) return 0;
  const int64_t rows = int64_t{b.max_q_len} * (b.num_heads_q / b.num_heads_kv);
  size_t most = 0;
  // A call within the bounds may have smaller heads and fewer rows, and any number of row groups.
  for (int head_dim : {b.head_dim, std::min(b.head_dim, 128), std::min(b.head_dim, 64)}) {
    const Sizes sizes = {b.max_batch, rows, b.max_seqlen_k, b.num_heads_kv, b.num_heads_q / b.num_heads_kv,
                         head_dim,    true};
    for (int row_groups = 1; row_groups <= row_groups_for(64 * kMaxRowGroups, head_dim); ++row_groups) {
      if (rows <= 64 * (row_groups - 1)) break;
      for (SplitRule rule : {SplitRule{SplitMode::kBalanced, 0}, SplitRule{SplitMode::kInvariant, 0},
                             SplitRule{SplitMode::kForced, kMaxForcedSplits}}) {
        Workspace w;
        most = std::max(most, lay_out(sizes, rule, row_groups, num_sms, false, nullptr, &w));
      }
    }
  }
  return most;
}

}  // namespace vegas_ops
