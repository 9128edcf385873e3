// How the keys of ragged requests are cut into chunks, and what the chunks leave in the workspace.
//
// A plan kernel of one CTA reads the lengths and lists the units of work (request, row tile, chunk of keys);
// the attention kernel runs one CTA per unit and KV head. Its grid depends on host bounds only, and not on
// the bound of the context length once that is large, so a captured graph costs what the actual lengths cost.
#pragma once

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#include "common/warp_scan.cuh"

namespace vegas_ops::portable {

// CTAs that the default rule aims at: enough to fill a large GPU about once, then up to four times, with
// chunks of at least kPreferredChunk keys in between.
constexpr int kWave = 256;
constexpr int kMaxWaves = 4;
constexpr int kPreferredChunk = 1024;
constexpr int kMinChunk = 256;
// Rules that look at one request alone.
constexpr int kMaxFixedChunks = 16;
constexpr int kInvariantChunk = 1024;
constexpr int kChunkUnit = 64;  // keys of one step of a CTA
constexpr int kPlanThreads = 1024;

enum class SplitMode { kBalanced, kInvariant, kForced };

struct SplitRule {
  SplitMode mode;
  int num_splits;  // of kForced
};

__host__ __device__ inline int ceil_div(int a, int b) { return a / b + (a % b != 0); }
__host__ __device__ inline int64_t ceil_div64(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline SplitRule split_rule(int num_splits, int batch_invariant) {
  if (num_splits > 0) return {SplitMode::kForced, num_splits < kMaxFixedChunks ? num_splits : kMaxFixedChunks};
  return {batch_invariant ? SplitMode::kInvariant : SplitMode::kBalanced, 0};
}

// Keys per chunk where all requests together have `total` (keys x row tiles x KV heads).
__host__ __device__ inline int64_t balanced_chunk(int64_t total) {
  int64_t waves = ceil_div64(total, int64_t{kWave} * kPreferredChunk);
  waves = waves < 1 ? 1 : waves > kMaxWaves ? kMaxWaves : waves;
  const int64_t chunk = ceil_div64(total, kWave * waves);
  return chunk < kMinChunk ? kMinChunk : chunk;
}

// Keys per chunk of one request, a multiple of kChunkUnit.
__host__ __device__ inline int chunk_keys(SplitRule rule, int keys, int64_t balanced) {
  int64_t chunk = balanced;
  if (rule.mode == SplitMode::kForced) chunk = ceil_div(keys, rule.num_splits);
  if (rule.mode == SplitMode::kInvariant) {
    chunk = ceil_div(keys, kMaxFixedChunks);
    if (chunk < kInvariantChunk) chunk = kInvariantChunk;
  }
  chunk = ceil_div64(chunk < 1 ? 1 : chunk, kChunkUnit) * kChunkUnit;
  return chunk < INT_MAX ? static_cast<int>(chunk) : INT_MAX / kChunkUnit * kChunkUnit;
}

struct PlannedRequest {
  int chunks;  // 0: no rows
  int chunk_keys;
  int unit_begin;  // units are numbered unit_begin + chunk * row_tiles + row_tile
  int slot_begin;  // likewise the partial results, which only requests of several chunks have
};

struct PlannedUnit {
  int request;
  int row_tile;
  int chunk;
  int unused;
};

// What sizes the workspace of a call, or of all calls within bounds.
struct PlanBounds {
  int batch;
  int row_tiles;  // of one request
  int tile_rows;  // rows of a tile that can be in use
  int num_heads_kv;
  int head_dim;
  int64_t keys;  // of one request
  int64_t dump_floats;
  int extra_norms = 0;  // per slot and KV head

  int64_t chunks(SplitRule rule) const {
    const int64_t smallest = rule.mode == SplitMode::kForced      ? kChunkUnit
                             : rule.mode == SplitMode::kInvariant ? kInvariantChunk
                                                                  : kMinChunk;
    const int64_t most = ceil_div64(keys, smallest);
    const int64_t limit = rule.mode == SplitMode::kForced      ? rule.num_splits
                          : rule.mode == SplitMode::kInvariant ? kMaxFixedChunks
                                                               : most;
    return most < 1 ? 1 : most < limit ? most : limit;
  }

  // Requests with several chunks have fewer than twice as many as the balanced rule aims at: each is longer
  // than a chunk, so rounding up at most doubles its number.
  int64_t split_units(SplitRule rule) const {
    const int64_t most = chunks(rule);
    if (most == 1) return 0;
    const int64_t all = most * batch * row_tiles;
    if (rule.mode != SplitMode::kBalanced) return all;
    const int64_t aim = ceil_div64(2 * kWave * kMaxWaves, num_heads_kv);
    return all < aim ? all : aim;
  }

  int64_t units(SplitRule rule) const { return int64_t{batch} * row_tiles + split_units(rule); }
};

// Pointers into the workspace. Nothing in it outlives a call.
struct PlanWorkspace {
  PlannedRequest* requests;  // (batch,)
  PlannedUnit* units;        // the first num_units are this call's
  int* num_units;
  float2* partial_norm;   // (slot, num_heads_kv, tile_rows): maximum in log2 units, sum
  float2* extra_norm;     // (slot, num_heads_kv, extra_norms), of rows without an output
  float* partial_output;  // (slot, num_heads_kv, tile_rows, head_dim), not yet divided by the sum
  float* dump;            // (dump_floats,)
  int row_tiles;
  int tile_rows;
  int num_heads_kv;
  int head_dim;
  int extra_norms;

  __device__ int64_t partial_row(const PlannedRequest& request, int row_tiles_of_request, int chunk, int row_tile,
                                 int head, int row) const {
    const int64_t slot = request.slot_begin + int64_t{chunk} * row_tiles_of_request + row_tile;
    return (slot * num_heads_kv + head) * tile_rows + row;
  }
  // Of the chunk's first row tile.
  __device__ float2* extra_norm_of(const PlannedRequest& request, int row_tiles_of_request, int chunk, int head,
                                   int i) const {
    const int64_t slot = request.slot_begin + int64_t{chunk} * row_tiles_of_request;
    return extra_norm + (slot * num_heads_kv + head) * extra_norms + i;
  }
};

// Lays the workspace out from `base` (which may be null) and returns its size in bytes.
inline size_t lay_out(const PlanBounds& b, SplitRule rule, char* base, PlanWorkspace* w) {
  size_t size = 0;
  auto take = [&](int64_t bytes) {
    char* at = base ? base + size : nullptr;
    size += (static_cast<size_t>(bytes) + 255) / 256 * 256;
    return at;
  };
  const int64_t tiles = b.split_units(rule) * b.num_heads_kv;
  const int64_t rows = tiles * b.tile_rows;
  w->num_units = reinterpret_cast<int*>(take(sizeof(int)));
  w->requests = reinterpret_cast<PlannedRequest*>(take(int64_t{b.batch} * sizeof(PlannedRequest)));
  w->units = reinterpret_cast<PlannedUnit*>(take(b.units(rule) * sizeof(PlannedUnit)));
  w->partial_norm = reinterpret_cast<float2*>(take(rows * sizeof(float2)));
  w->extra_norm = reinterpret_cast<float2*>(take(tiles * b.extra_norms * sizeof(float2)));
  w->partial_output = reinterpret_cast<float*>(take(rows * b.head_dim * sizeof(float)));
  w->dump = reinterpret_cast<float*>(take(b.dump_floats * sizeof(float)));
  w->row_tiles = b.row_tiles;
  w->tile_rows = b.tile_rows;
  w->num_heads_kv = b.num_heads_kv;
  w->head_dim = b.head_dim;
  w->extra_norms = b.extra_norms;
  return size;
}

// Bytes that suffice for every rule.
inline size_t workspace_for_all_rules(const PlanBounds& b) {
  PlanWorkspace w;
  size_t most = 0;
  for (SplitRule rule : {SplitRule{SplitMode::kBalanced, 0}, SplitRule{SplitMode::kInvariant, 0},
                         SplitRule{SplitMode::kForced, kMaxFixedChunks}}) {
    const size_t size = lay_out(b, rule, nullptr, &w);
    most = size > most ? size : most;
  }
  return most;
}

struct RequestWork {
  int keys;
  int row_tiles;
};

struct SyncCta {
  __device__ void operator()() const { __syncthreads(); }
};

// Exclusive scan over the first `threads` threads of a CTA, which `sync` makes wait for each other; `total` receives
// the sum. Two counts may share 64 bits. `warp_sums` is shared memory, one value per warp.
template <class Value, class Sync = SyncCta>
__device__ inline Value block_scan(Value value, Value* total, Value* warp_sums, int threads, const Sync& sync = {}) {
  const int warp = threadIdx.x >> 5;
  const Value inclusive = warp_scan(value);
  if ((threadIdx.x & 31) == 31) warp_sums[warp] = inclusive;
  sync();
  Value before = 0;
  Value sum = 0;
  for (int w = 0; w < threads / 32; ++w) {
    if (w == warp) before = sum;
    sum += warp_sums[w];
  }
  sync();
  *total = sum;
  return before + inclusive - value;
}

// Body of the plan kernel; work(b) is the RequestWork of request b.
template <class Work>
__device__ inline void make_plan(const Work& work, int batch, SplitRule rule, const PlanWorkspace& w) {
  __shared__ uint64_t warp_sums[kPlanThreads / 32];
  int64_t balanced = 0;
  if (rule.mode == SplitMode::kBalanced) {
    uint64_t mine = 0;
    uint64_t total;
    for (int b = threadIdx.x; b < batch; b += blockDim.x) {
      const RequestWork r = work(b);
      mine += static_cast<uint64_t>(r.keys) * r.row_tiles * w.num_heads_kv;
    }
    block_scan(mine, &total, warp_sums, blockDim.x);
    balanced = balanced_chunk(static_cast<int64_t>(total));
  }
  uint64_t before = 0;  // units << 32 | slots
  for (int first = 0; first < batch; first += blockDim.x) {
    const int b = first + threadIdx.x;
    PlannedRequest planned = {0, kChunkUnit, 0, 0};
    int row_tiles = 0;
    if (b < batch) {
      const RequestWork r = work(b);
      row_tiles = r.row_tiles;
      if (row_tiles > 0) {
        planned.chunk_keys = chunk_keys(rule, r.keys, balanced);
        planned.chunks = r.keys > 0 ? ceil_div(r.keys, planned.chunk_keys) : 1;
      }
    }
    const uint64_t units = static_cast<uint64_t>(planned.chunks) * row_tiles;
    uint64_t total;
    const uint64_t at =
        before + block_scan(units << 32 | (planned.chunks > 1 ? units : 0), &total, warp_sums, blockDim.x);
    before += total;
    if (b >= batch) continue;
    planned.unit_begin = static_cast<int>(at >> 32);
    planned.slot_begin = static_cast<int>(at & 0xffffffffu);
    w.requests[b] = planned;
    int unit = planned.unit_begin;
    for (int chunk = 0; chunk < planned.chunks; ++chunk) {
      for (int tile = 0; tile < row_tiles; ++tile) w.units[unit++] = {b, tile, chunk, 0};
    }
  }
  if (threadIdx.x == 0) *w.num_units = static_cast<int>(before >> 32);
}

}  // namespace vegas_ops::portable
