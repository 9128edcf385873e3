// sparse_paged_decode on any GPU from sm_80: how a call is cut, its workspace and its launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "common/backends.h"
#include "common/portable_launch.cuh"
#include "common/status.h"
#include "sparse/portable_launch.h"
#include "sparse/segments.cuh"

namespace vegas_ops {
namespace portable {

namespace {

constexpr int kLeastShare = 8;     // tiles of a CTA where there is little work
constexpr int kClusterTiles = 20;  // tiles of a CTA of a cluster, beyond which more CTAs are faster
constexpr int kLeastClusterShare = 7;
constexpr int kFewCollectors = 7;  // so many parts to each of them that one less costs little
constexpr int kLongestPage = 256;  // tokens

struct GroupTiles {
  int row_tiles;
  int rows;

  GroupTiles(int group, int head_dim) {
    const int most = 8 * head_tiles_for(group, head_dim);
    row_tiles = ceil_div(group, most);
    rows = group < most ? group : most;
  }
};

// CTAs of a cluster, where those that attend one of `rows` (requests times KV heads) are one; else 1. Two launches fit
// at once, so that the next one looks its keys up while this one runs, unless pairs of CTAs fill the device. Long lists
// need all of it.
template <class AtOnce>
int cluster_size(int64_t rows, int max_k, int multiprocessors, const AtOnce& clusters_at_once) {
  const int tiles = ceil_div(max_k, kSparseTile);
  if (multiprocessors / rows == 2 && tiles > 2 * kLeastShare) return 2;
  for (int ctas = kMaxCluster; ctas > 1; --ctas) {
    if (tiles > ctas * kClusterTiles) return 1;
    if (2 * rows * ctas > multiprocessors || clusters_at_once(ctas) < 2 * rows) continue;
    return std::min(ctas, std::max(1, ceil_div(tiles, kLeastClusterShare)));
  }
  return 1;
}

// Partial results of a call.
struct PartialResults {
  int64_t slots;
  int rows;
  int head_dim;

  // `keys` is the most that a request can have.
  PartialResults(SplitMode mode, int64_t batch, int64_t keys, int num_heads_q, int num_heads_kv, int dim,
                 int multiprocessors)
      : slots(2 * multiprocessors), head_dim(dim) {
    const GroupTiles group(num_heads_q / num_heads_kv, dim);
    rows = group.rows;
    if (mode == SplitMode::kBalanced) return;
    const int64_t chunks = ceil_div64(keys, kForcedKeys);
    slots = batch * num_heads_kv * group.row_tiles *
            (chunks < 1                 ? 1
             : chunks < kMaxFixedChunks ? chunks
                                        : kMaxFixedChunks);
  }
  size_t norm_bytes() const { return (slots * rows * 2 * sizeof(float) + 255) / 256 * 256; }
  size_t bytes() const { return norm_bytes() + slots * rows * head_dim * sizeof(float); }
};

cudaError_t describe_device(SparseDevice* d) {
  int device, major, shared, reserved;
  cudaError_t error = cudaGetDevice(&device);
  const auto read = [&](int* value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  };
  read(&d->multiprocessors, cudaDevAttrMultiProcessorCount);
  read(&d->shared_per_cta, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  read(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  read(&reserved, cudaDevAttrReservedSharedMemoryPerBlock);
  read(&major, cudaDevAttrComputeCapabilityMajor);
  if (error != cudaSuccess) return error;
  d->shared_per_half = shared / 2 - reserved;
  d->dependent_launch = major >= 9;
  return cudaSuccess;
}

// The kernel that serves a call, of those with one tile of heads and rows of 16-bit values; others have but one.
Calls calls_of(const VegasSparseParams& p, const SparsePlan& plan) {
  const VegasPagedCache& cache = p.cache;
  const bool is_few = p.batch <= kLookedUp && plan.rule.mode == SplitMode::kBalanced && plan.pairs == 1 &&
                      cache.head_dim == padded_head_dim(cache.head_dim) && p.softcap <= 0.0f &&
                      p.softmax_scale > 1e-30f && !cache.k.descale &&
                      ((reinterpret_cast<uintptr_t>(p.q) | p.q_stride_row * 2 | p.q_stride_head * 2) & 3) == 0;
  if (!is_few) return Calls::kAny;
  const bool slots =
      p.max_k > 0 && p.indices_are_slots && p.topk_length_stride_head == 0 && !p.seqused_k && !p.tail_start;
  return slots ? Calls::kSlots : Calls::kFew;
}

// False where they exceed 31 bits, which takes 32 GiB of rows of 16 bytes.
bool set_row_units(const VegasPagedCache& cache, const VegasCacheView& view, RowUnits* rows) {
  const int64_t bytes = cache.dtype == VEGAS_FP8_E4M3 ? 1 : 2;
  const int64_t sizes[3] = {cache.num_pages, cache.page_size, cache.num_heads_kv};
  int64_t strides[3] = {view.stride_page * bytes, view.stride_token * bytes, view.stride_head * bytes};
  int64_t unit = 0;
  int64_t reach = 0;
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] <= 1) strides[i] = 0;
    unit = std::gcd(unit, strides[i]);
    reach += std::abs(strides[i]) * (sizes[i] - 1);
  }
  unit = std::max<int64_t>(unit, 1);
  if (unit > INT_MAX || reach / unit > INT_MAX) return false;
  *rows = {static_cast<int>(strides[0] / unit), static_cast<int>(strides[1] / unit),
           static_cast<int>(strides[2] / unit), static_cast<int>(unit)};
  return true;
}

}  // namespace
}  // namespace portable

int sparse_portable(const VegasSparseParams& p, void* stream_handle) {
  using namespace portable;
  if (p.batch == 0) return VEGAS_OK;
  const int unit = p.cache.dtype == VEGAS_FP8_E4M3 ? 16 : 8;
  VEGAS_CHECK(p.cache.head_dim <= 256 && p.cache.head_dim % unit == 0,
              "`head_dim` must be a multiple of %d up to 256 for this cache on CUDA, got %d", unit, p.cache.head_dim);
  const bool fp16 = p.q_dtype == VEGAS_FLOAT16;
  SparseDevice device = {};
  cudaError_t error = describe_device(&device);
  if (error == cudaSuccess) {
    SparseCta cta = fp16 ? sparse_cta<__half>(p, device) : sparse_cta<__nv_bfloat16>(p, device);
    const SplitRule rule = split_rule(p.num_splits, p.batch_invariant);
    const int heads_kv = p.cache.num_heads_kv;
    const GroupTiles group(p.num_heads_q / heads_kv, p.cache.head_dim);
    // All KV heads together, unless there are so many that few teams would be left.
    const int team = heads_kv <= device.multiprocessors / 4 ? heads_kv : 1;
    const int pairs = heads_kv / team * group.row_tiles;
    // CTAs that have requests of their own all wait for memory at once: what is asked for beyond that comes no sooner,
    // and makes those that are late wait longer.
    if (cta.stages == 3 && cta.per_multiprocessor == 1 && p.cache.head_dim > 64 && p.cache.dtype != VEGAS_FP8_E4M3 &&
        int64_t{p.batch} * team * pairs * 2 > device.multiprocessors) {
      cta.stages = 2;
    }
    const int64_t capacity = int64_t{p.cache.max_pages} * p.cache.page_size;
    const int64_t max_keys = p.max_k + (p.tail_start ? capacity : 0);
    const PartialResults partial(rule.mode, p.batch, max_keys, p.num_heads_q, heads_kv, p.cache.head_dim,
                                 device.multiprocessors);
    VEGAS_CHECK(p.workspace && p.workspace_bytes >= partial.bytes(),
                "`workspace` must have at least %zu bytes, got %zu", partial.bytes(),
                p.workspace ? p.workspace_bytes : size_t{0});
    // Places in the list of all tiles are counted in 32 bits, and multiplied by a number of warps.
    const int64_t tiles = ceil_div64(max_keys, kSparseTile) + 1;
    VEGAS_CHECK(tiles * p.batch * pairs <= INT_MAX / 8,
                "`batch` must need fewer than 2^28 tiles of 16 keys, got batch %d with up to %lld keys", p.batch,
                static_cast<long long>(max_keys));
    // No more teams than shares that the longest requests could make.
    const int64_t shares = ceil_div64(tiles * p.batch * pairs, kLeastShare);
    int most_teams = device.multiprocessors * cta.per_multiprocessor / team;
    const bool may_cluster = device.dependent_launch && rule.mode == SplitMode::kBalanced && pairs == 1;
    const auto at_once = [&](int ctas) {
      return (fp16 ? clusters_at_once<__half> : clusters_at_once<__nv_bfloat16>)(p, device, cta, group.rows, ctas);
    };
    const int cluster =
        may_cluster ? cluster_size(int64_t{p.batch} * team, p.max_k, device.multiprocessors, at_once) : 1;
    // CTAs that collect end last. As many multiprocessors are left to the next launch, where that costs little.
    const int collectors = p.batch * pairs;
    if (cta.per_multiprocessor == 1 && int64_t{collectors} * kFewCollectors <= most_teams) most_teams -= collectors;
    const int teams = cluster > 1 ? p.batch * cluster : shares < most_teams ? static_cast<int>(shares) : most_teams;

    SparsePlan plan;
    plan.partial_norm = static_cast<float*>(p.workspace);
    plan.partial_output = reinterpret_cast<float*>(static_cast<char*>(p.workspace) + partial.norm_bytes());
    plan.rule = rule;
    plan.group = p.num_heads_q / heads_kv;
    plan.row_tiles = group.row_tiles;
    plan.rows = group.rows;
    plan.pairs = pairs;
    plan.least_tiles = cluster > 1 ? kLeastClusterShare : kLeastShare;
    plan.cluster = cluster;
    plan.rounds = ceil_div(p.batch * pairs, teams);
    plan.most_chunks = plan.rounds * teams / (p.batch * pairs);
    plan.chunks.set(plan.most_chunks);
    const bool uses_table = p.tail_start || !p.indices_are_slots;
    plan.bound = uses_table && capacity < INT_MAX ? static_cast<int>(capacity) : INT_MAX;
    plan.teams.set(teams);
    plan.page_size.set(p.cache.page_size);
    plan.heads_kv.set(heads_kv);
    plan.calls = calls_of(p, plan);
    const VegasCacheView* views[2] = {&p.cache.k, &p.cache.v};
    for (int i = 0; i < 2; ++i) {
      VEGAS_CHECK(set_row_units(p.cache, *views[i], &plan.rows_of[i]),
                  "`%s` must reach less than 2^31 times the common divisor of its strides",
                  i == 0 ? "k_cache" : "v_cache");
    }
    const bool forced = rule.mode == SplitMode::kForced;
    plan.fixed_chunks = forced ? rule.num_splits : kMaxFixedChunks;
    plan.least_fixed_tiles = (forced ? kForcedKeys : kInvariantKeys) / kSparseTile;
    plan.by_fixed_chunks.set(plan.fixed_chunks);
    const auto launch = fp16 ? launch_sparse<__half> : launch_sparse<__nv_bfloat16>;
    error = cta.warps == 0 ? cudaErrorInvalidConfiguration
                           : launch(p, plan, device, cta, team, teams, static_cast<cudaStream_t>(stream_handle));
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // returned here, so the next call must not find it
    return fail(VEGAS_CUDA_ERROR, "sparse_paged_decode: launch failed: %s", cudaGetErrorString(error));
  }
  return VEGAS_OK;
}

size_t sparse_portable_workspace(const VegasBounds& b) {
  using namespace portable;
  SparseDevice device;
  if (b.max_batch <= 0 || b.num_heads_kv <= 0 || b.head_dim > 256) return 0;
  if (describe_device(&device) != cudaSuccess) return 0;
  // A table may reach beyond the longest sequence, by less than a page.
  const int64_t max_keys = int64_t{b.max_k} + b.max_seqlen_k + kLongestPage;
  size_t most = 0;
  // Smaller heads have more of a group's rows in a tile.
  for (int head_dim : {b.head_dim, std::min(b.head_dim, 128)}) {
    for (SplitMode mode : {SplitMode::kBalanced, SplitMode::kForced}) {
      const PartialResults partial(mode, b.max_batch, max_keys, b.num_heads_q, b.num_heads_kv, head_dim,
                                   device.multiprocessors);
      most = std::max(most, partial.bytes());
    }
  }
  return most;
}

}  // namespace vegas_ops
