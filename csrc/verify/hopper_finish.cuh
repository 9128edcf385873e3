// The launch after the Hopper attention kernel: merges what was split among CTAs and finishes dumps.
#pragma once

#include "verify/guides.cuh"
#include "verify/hopper_plan.cuh"

namespace vegas_ops::hopper {

using portable::RowNorm;
using portable::RowOutput;

constexpr int kFinishThreads = 128;
constexpr int kFinishWarps = kFinishThreads / 32;

// Part `part` of a row's chunks: every kFinishWarps-th, in the order of the keys. Where they lie is known before they
// are there, and small calls wait for every instruction that comes after.
template <int kHeadDim>
class RowPart {
 public:
  static constexpr int kColumns = kHeadDim / 32;  // of a lane
  static constexpr int kBatch = 8;
  float sum = 0.0f;
  float output[kColumns] = {};

  __device__ __forceinline__ RowPart(const Workspace& w, const Chunks& chunks, int row, int part)
      : count_((chunks.count - part + kFinishWarps - 1) / kFinishWarps), has_output_(row < w.tile_rows) {
    const int64_t slot = chunks.slot(part);
    norms_at_ = w.partial_norm + slot * w.norm_rows + row;
    values_at_ = w.partial_output + (slot * w.tile_rows + row) * kHeadDim + threadIdx.x % 32 * kColumns;
    // A CTA's later run lies one slot before its first, which a row's first chunk is.
    const int step = kFinishWarps * chunks.slot_step();
    const int back = static_cast<int>(slot) + step - chunks.slot(part + kFinishWarps);
    norms_step_ = step * w.norm_rows;
    norms_back_ = back * w.norm_rows;
    values_step_ = step * w.tile_rows * kHeadDim;
    values_back_ = back * w.tile_rows * kHeadDim;
  }

  __device__ __forceinline__ int count() const { return count_; }

  // Reads kBatch of its chunks.
  __device__ __forceinline__ void read(int first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      norms_[i] = make_float2(-INFINITY, 0.0f);
      values_[i] = {};
      const int chunk = first + i;
      if (chunk >= count_) continue;
      norms_[i] = norms_at_[int64_t{chunk} * norms_step_ - (chunk == 0 ? 0 : norms_back_)];
      if (!has_output_) continue;
      values_[i] = *reinterpret_cast<const Values*>(values_at_ + int64_t{chunk} * values_step_ -
                                                    (chunk == 0 ? 0 : values_back_));
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

 private:
  struct alignas(kColumns * 4 < 16 ? kColumns * 4 : 16) Values {
    float of_column[kColumns];
  };
  int count_;
  bool has_output_;
  const float2* norms_at_;  // of its first chunk
  const float* values_at_;
  int norms_step_;
  int norms_back_;
  int values_step_;
  int values_back_;
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
  RowOutput<Element> target = {};
  if (row < w.tile_rows) {
    target = portable::row_output<Element>(p, request, b, kv_head, row_tile * w.group_rows.divisor + row);
  }
  Part mine(w, chunks, row, shared ? warp : 0);
  const float2* norm = w.partial_norm + int64_t{chunks.slot(lane)} * w.norm_rows + row;  // of chunk `lane`
  cudaGridDependencySynchronize();

  mine.read(0);
  RowNorm whole = {lane < chunks.count ? norm->x : -INFINITY, 0.0f};
  for (int c = lane + 32; c < chunks.count; c += 32) {
    whole.maximum = fmaxf(whole.maximum, w.partial_norm[int64_t{chunks.slot(c)} * w.norm_rows + row].x);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    whole.maximum = fmaxf(whole.maximum, __shfl_xor_sync(0xffffffffu, whole.maximum, step));
  }
  float total[Part::kColumns] = {};
#pragma unroll 1
  for (int part = 1;; ++part) {
    mine.add(whole.maximum);
    for (int first = Part::kBatch; first < mine.count(); first += Part::kBatch) {
      mine.read(first);
      mine.add(whole.maximum);
    }
    if (shared) break;
    whole.sum += mine.sum;
#pragma unroll
    for (int j = 0; j < Part::kColumns; ++j) total[j] += mine.output[j];
    if (part == kFinishWarps) break;
    mine = Part(w, chunks, row, part);
    mine.read(0);
  }
  if (shared) {
    sums[warp][Part::kColumns][lane] = mine.sum;
#pragma unroll
    for (int j = 0; j < Part::kColumns; ++j) sums[warp][j][lane] = mine.output[j];
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int part = 0; part < kFinishWarps; ++part) {
      whole.sum += sums[part][Part::kColumns][lane];
#pragma unroll
      for (int j = 0; j < Part::kColumns; ++j) total[j] += sums[part][j][lane];
    }
  }
  if (row >= w.tile_rows) {
    if (lane == 0) portable::write_guide_lse(p, request, b, kv_head, row - w.tile_rows, whole.lse());
    return;
  }
  const float factor = output_factor(target, whole);
#pragma unroll
  for (int j = 0; j < Part::kColumns; ++j) {
    const int d = lane * Part::kColumns + j;
    if (d >= p.cache.head_dim) continue;
    target.out[d] = portable::from_float<Element>(whole.sum == 0.0f ? 0.0f : total[j] * factor);
  }
  if (lane == 0) *target.lse = whole.lse();
}

// The grid is (rows of a row tile, pairs of a row tile and KV head, requests), with more in y that finish dumps. A CTA
// merges rows_per_cta rows.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kFinishThreads, kHeadDim > 128  ? 3
                                                  : kHeadDim > 64 ? 4
                                                                  : 5)
    verify_finish_kernel(const __grid_constant__ VegasVerifyParams p, const __grid_constant__ Workspace w,
                         int rows_per_cta, int merges) {
  // What comes next may start: it waits for this launch, which waits for the attention.
  cudaTriggerProgrammaticLaunchCompletion();
  const int b = blockIdx.z;
  // The attention kernel has waited for all before it when this one starts, so lengths stay as they are. A few are
  // looked at while that kernel ends.
  const bool few = p.batch <= kFewRequests;
  if (!few) cudaGridDependencySynchronize();
  const RequestPlan plan = few ? plan_of(p, w, b) : w.requests[b];
  const int of_row_tile = blockIdx.y;
  if (of_row_tile >= merges) {
    cudaGridDependencySynchronize();
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
  const int request_row = row_tile * w.group_rows.divisor + row;
  const bool exists = row < w.tile_rows
                          ? request_row < plan.request.q_len * w.group
                          : row - w.tile_rows < plan.request.num_guides && row_tile == 0 && p.dump != VEGAS_DUMP_TOKEN;
  const Chunks chunks(w, plan, kv_head, row_tile);
  if (!exists || row_tile >= plan.row_tiles || chunks.count == 1) {
    cudaGridDependencySynchronize();
    return;
  }
  merge_row<Element, kHeadDim>(p, w, plan.request, b, kv_head, row_tile, row, chunks, rows_per_cta == 1);
}

}  // namespace vegas_ops::hopper
