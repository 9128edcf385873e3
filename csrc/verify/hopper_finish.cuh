// The launch after the Hopper attention kernel: merges what was split among CTAs and finishes dumps.
#pragma once

#include "verify/guides.cuh"
#include "verify/hopper_plan.cuh"

namespace vegas_ops::hopper {

using portable::RowNorm;
using portable::RowOutput;

constexpr int kFinishThreads = 128;
constexpr int kFinishWarps = kFinishThreads / 32;

// Part `part` of a row's chunks: every kFinishWarps-th, in the order of the keys.
template <int kHeadDim>
class RowPart {
 public:
  static constexpr int kColumns = kHeadDim / 32;  // of a lane
  float sum = 0.0f;
  float output[kColumns] = {};

  // Reads the next kBatch chunks.
  __device__ __forceinline__ void read(const Workspace& w, const Chunks& chunks, int row, int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int chunk = first + kFinishWarps * i;
      norms_[i] = make_float2(-INFINITY, 0.0f);
      values_[i] = {};
      if (chunk >= chunks.count) continue;
      const int64_t slot = chunks.slot(chunk);
      norms_[i] = w.partial_norm[slot * w.norm_rows + row];
      if (row >= w.tile_rows) continue;
      const int64_t at = (slot * w.tile_rows + row) * kHeadDim + lane * kColumns;
      values_[i] = *reinterpret_cast<const Values*>(w.partial_output + at);
    }
  }
  // Adds what was read, with weights relative to `maximum`.
  __device__ __forceinline__ void add(float maximum) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float weight = RowNorm{norms_[i].x, norms_[i].y}.weight_in({maximum, 0.0f});
      sum += norms_[i].y * weight;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) output[j] += values_[i].of_column[j] * weight;
    }
  }
  __device__ __forceinline__ void add(const RowPart& other) {
    sum += other.sum;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) output[j] += other.output[j];
  }

  static constexpr int kBatch = 8;

 private:
  struct alignas(kColumns * 4 < 16 ? kColumns * 4 : 16) Values {
    float of_column[kColumns];
  };
  Values values_[kBatch];
  float2 norms_[kBatch];
};

// Merges a row's chunks, called by a warp or, where `shared`, by the CTA; the result is the same.
template <class Element, int kHeadDim>
__device__ inline void merge_row(const VegasVerifyParams& p, const Workspace& w, const VerifyRequest& request, int b,
                                 int kv_head, int row_tile, int row, const Chunks& chunks, bool shared) {
  using Part = RowPart<kHeadDim>;
  __shared__ float sums[kFinishWarps][Part::kColumns + 1][32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  RowNorm whole = {-INFINITY, 0.0f};
  Part total;
#pragma unroll 1
  for (int turn = 0; turn < (shared ? 1 : kFinishWarps); ++turn) {
    const int part = shared ? warp : turn;
    Part mine;
    mine.read(w, chunks, row, part);
    if (turn == 0) {
      for (int c = lane; c < chunks.count; c += 32) {
        whole.maximum = fmaxf(whole.maximum, w.partial_norm[int64_t{chunks.slot(c)} * w.norm_rows + row].x);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        whole.maximum = fmaxf(whole.maximum, __shfl_xor_sync(0xffffffffu, whole.maximum, step));
      }
    }
    mine.add(whole.maximum);
    for (int first = part + kFinishWarps * Part::kBatch; first < chunks.count; first += kFinishWarps * Part::kBatch) {
      mine.read(w, chunks, row, first);
      mine.add(whole.maximum);
    }
    if (!shared) {
      total.add(mine);
      continue;
    }
    sums[warp][Part::kColumns][lane] = mine.sum;
#pragma unroll
    for (int j = 0; j < Part::kColumns; ++j) sums[warp][j][lane] = mine.output[j];
  }
  if (shared) {
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int other = 0; other < kFinishWarps; ++other) {
      total.sum += sums[other][Part::kColumns][lane];
#pragma unroll
      for (int j = 0; j < Part::kColumns; ++j) total.output[j] += sums[other][j][lane];
    }
  }
  whole.sum = total.sum;
  if (row >= w.tile_rows) {
    if (lane == 0) portable::write_guide_lse(p, request, b, kv_head, row - w.tile_rows, whole.lse());
    return;
  }
  const RowOutput<Element> target =
      portable::row_output<Element>(p, request, b, kv_head, row_tile * w.group_rows.divisor + row);
  if (lane == 0) *target.lse = whole.lse();
  const float factor = output_factor(target, whole);
#pragma unroll
  for (int j = 0; j < Part::kColumns; ++j) {
    const int d = lane * Part::kColumns + j;
    if (d >= p.cache.head_dim) continue;
    target.out[d] = portable::from_float<Element>(whole.sum == 0.0f ? 0.0f : total.output[j] * factor);
  }
}

// The grid is (rows of a row tile, pairs of a row tile and KV head, requests), with more in y that finish dumps. A CTA
// merges rows_per_cta rows.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kFinishThreads, kHeadDim > 128 ? 4 : 5)
    verify_finish_kernel(const __grid_constant__ VegasVerifyParams p, const __grid_constant__ Workspace w,
                         int rows_per_cta, int merges) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const int b = blockIdx.z;
  const RequestPlan& plan = w.requests[b];
  const int of_row_tile = blockIdx.y;
  if (of_row_tile >= merges) {
    const int cta = (of_row_tile - merges) * gridDim.x + blockIdx.x;
    const int ctas = (gridDim.y - merges) * gridDim.x;
    if (w.dump) {
      portable::reduce_dump(p, w.dump, p.cache.num_heads_kv, plan.request, b, cta, ctas, kFinishThreads);
    } else {
      portable::mask_dump(p, plan.request, b, cta, ctas, kFinishThreads);
    }
    return;
  }
  int row_tile = 0;
  int kv_head = of_row_tile;
  if (of_row_tile >= p.cache.num_heads_kv) {
    row_tile = of_row_tile / p.cache.num_heads_kv;
    kv_head -= row_tile * p.cache.num_heads_kv;
  }
  const int row = blockIdx.x * rows_per_cta + threadIdx.x / 32 % rows_per_cta;
  if (plan.units == 1 || row_tile >= plan.row_tiles) return;
  if (row < w.tile_rows) {
    if (row_tile * w.group_rows.divisor + row >= plan.request.q_len * w.group) return;
  } else if (row - w.tile_rows >= plan.request.num_guides || row_tile > 0 || p.dump == VEGAS_DUMP_TOKEN) {
    return;
  }
  const Chunks chunks(w, plan, kv_head, row_tile);
  if (chunks.count == 1) return;
  merge_row<Element, kHeadDim>(p, w, plan.request, b, kv_head, row_tile, row, chunks, rows_per_cta == 1);
}

}  // namespace vegas_ops::hopper
