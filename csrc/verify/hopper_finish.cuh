// The launch after the Hopper attention kernel: merges what was split among CTAs and adds up the KV heads' parts of a
// summed dump.
#pragma once

#include <float.h>

#include "verify/guides.cuh"
#include "verify/hopper_plan.cuh"

namespace vegas_ops::hopper {

using portable::RowNorm;
using portable::RowOutput;

constexpr int kFinishThreads = 128;
constexpr int kFinishWarps = kFinishThreads / 32;

// Merges a row's chunks in the order of their keys, called by all lanes of a warp; each keeps kColumns columns.
template <class Element, int kHeadDim>
__device__ inline void merge_row(const VegasVerifyParams& p, const Workspace& w, const VerifyRequest& request, int b,
                                 int kv_head, int row_tile, int row, const Chunks& chunks) {
  constexpr int kColumns = kHeadDim / 32;
  constexpr int kBatch = 8;  // chunks whose values are read at once
  struct alignas(kColumns * 4 < 16 ? kColumns * 4 : 16) Values {
    float of_column[kColumns];
  };
  const int lane = threadIdx.x % 32;
  const bool guide = row >= w.tile_rows;
  RowNorm norm = {-INFINITY, 0.0f};  // of chunk `lane`, and in longer rows the last of its chunks
  RowNorm whole = {-INFINITY, 0.0f};
  for (int c = lane; c < chunks.count; c += 32) {
    const float2 loaded = w.partial_norm[int64_t{chunks.slot(c)} * w.norm_rows + row];
    norm = {loaded.x, loaded.y};
    whole.maximum = fmaxf(whole.maximum, norm.maximum);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    whole.maximum = fmaxf(whole.maximum, __shfl_xor_sync(0xffffffffu, whole.maximum, step));
  }
  float output[kColumns] = {};
  for (int first = 0; first < chunks.count; first += kBatch) {
    Values values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (guide || first + i >= chunks.count) continue;
      const int64_t at = (int64_t{chunks.slot(first + i)} * w.tile_rows + row) * kHeadDim + lane * kColumns;
      values[i] = *reinterpret_cast<const Values*>(w.partial_output + at);
    }
    if (chunks.count > 32 && first % 32 == 0 && first + lane < chunks.count) {
      const float2 loaded = w.partial_norm[int64_t{chunks.slot(first + lane)} * w.norm_rows + row];
      norm = {loaded.x, loaded.y};
    }
    const float weight = norm.weight_in(whole);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float chunk_weight = __shfl_sync(0xffffffffu, weight, (first + i) % 32);
      const float chunk_sum = __shfl_sync(0xffffffffu, norm.sum, (first + i) % 32);
      if (first + i >= chunks.count) continue;
      whole.sum += chunk_sum * chunk_weight;
      if (guide) continue;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) output[j] += values[i].of_column[j] * chunk_weight;
    }
  }
  if (guide) {
    if (lane == 0) portable::write_guide_lse(p, request, b, kv_head, row - w.tile_rows, whole.lse());
    return;
  }
  const RowOutput<Element> target =
      portable::row_output<Element>(p, request, b, kv_head, row_tile * w.group_rows + row);
  if (lane == 0) *target.lse = whole.lse();
  const float factor = output_factor(target, whole);
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const int d = lane * kColumns + j;
    if (d < p.cache.head_dim)
      target.out[d] = portable::from_float<Element>(whole.sum == 0.0f ? 0.0f : output[j] * factor);
  }
}

// logits[b, key] = sum of the KV heads' parts, in their order.
__device__ inline void reduce_dump(const VegasVerifyParams& p, const Workspace& w, int b, int part, int parts) {
  const VerifyRequest request = request_of(p, b);
  float* logits = static_cast<float*>(p.logits) + b * p.logits_stride[0];
  const float* sums = w.dump + int64_t{b} * p.cache.num_heads_kv * w.dump_stride;
  for (int64_t key = (int64_t{part} * kFinishThreads + threadIdx.x) * 4; key < request.dump_len;
       key += int64_t{parts} * kFinishThreads * 4) {
    float total[4] = {};
    bool masked[4] = {};
#pragma unroll 8
    for (int head = 0; head < p.cache.num_heads_kv; ++head) {
      const float4 values = *reinterpret_cast<const float4*>(sums + head * w.dump_stride + key);
      const float x[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        masked[i] = masked[i] || x[i] == -INFINITY;
        total[i] += x[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (key + i >= request.dump_len) break;
      // Weights may overflow where the hint is far from the row's own normaliser; NaN stays.
      if (p.dump == VEGAS_DUMP_TOKEN_WEIGHT && total[i] > FLT_MAX) total[i] = FLT_MAX;
      logits[key + i] = masked[i] ? -INFINITY : total[i];
    }
  }
}

// The first merge_ctas CTAs merge chunks, a warp per row; the others add up dumps.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kFinishThreads)
    verify_finish_kernel(const __grid_constant__ VegasVerifyParams p, const __grid_constant__ Workspace w,
                         int row_tiles, int merge_ctas, int reduce_parts) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  if (blockIdx.x >= static_cast<unsigned>(merge_ctas)) {
    const int i = blockIdx.x - merge_ctas;
    reduce_dump(p, w, i / reduce_parts, i % reduce_parts, reduce_parts);
    return;
  }
  const int row_groups = ceil_div(w.norm_rows, kFinishWarps);
  int i = blockIdx.x;
  const int row = i % row_groups * kFinishWarps + threadIdx.x / 32;
  i /= row_groups;
  const int kv_head = i % p.cache.num_heads_kv;
  i /= p.cache.num_heads_kv;
  const int row_tile = i % row_tiles;
  const int b = i / row_tiles;
  const VerifyRequest request = request_of(p, b);
  const RequestUnits units(p, w, request);
  if (units.units == 1 || row_tile >= units.row_tiles) return;
  if (row < w.tile_rows) {
    if (row_tile * w.group_rows + row >= request.packed_rows(p)) return;
  } else if (row - w.tile_rows >= request.num_guides || row_tile > 0 || p.dump == VEGAS_DUMP_TOKEN) {
    return;
  }
  const Chunks chunks(w, units, w.unit_begin[b], kv_head, row_tile);
  if (chunks.count == 1) return;
  merge_row<Element, kHeadDim>(p, w, request, b, kv_head, row_tile, row, chunks);
}

}  // namespace vegas_ops::hopper
