// The launch after the Hopper attention kernel: merges what was split among CTAs and finishes dumps.
#pragma once

#include "verify/guides.cuh"
#include "verify/hopper_plan.cuh"

namespace vegas_ops::hopper {

using portable::RowNorm;
using portable::RowOutput;

constexpr int kFinishThreads = 128;
constexpr int kFinishWarps = kFinishThreads / 32;

// Chunks first, first + every and so on of a row, in the order of the keys; they are added up in kParts sums that take
// turns. Where they lie is known before they are there, and small calls wait for every instruction that comes after.
template <int kHeadDim, int kParts>
class RowPart {
 public:
  static constexpr int kColumns = kHeadDim / 32;  // of a lane
  static constexpr int kBatch = 8;
  static_assert(kBatch % kParts == 0, "every batch starts with the first sum");
  float sum[kParts] = {};
  float output[kParts][kColumns] = {};

  __device__ __forceinline__ RowPart(const Workspace& w, const Chunks& chunks, int row, int first, int every)
      : left_((chunks.count - first + every - 1) / every), has_output_(row < w.tile_rows) {
    const int64_t slot = chunks.slot(first);
    norms_at_ = w.partial_norm + slot * w.norm_rows + row;
    values_at_ = w.partial_output + (slot * w.tile_rows + row) * kHeadDim + threadIdx.x % 32 * kColumns;
    // A CTA's later run lies one slot before its first, which a row's first chunk is.
    const int step = every * chunks.slot_step();
    const int first_step = chunks.slot(first + every) - static_cast<int>(slot);
    norms_step_ = step * w.norm_rows;
    norms_first_step_ = first_step * w.norm_rows;
    values_step_ = step * w.tile_rows * kHeadDim;
    values_first_step_ = first_step * w.tile_rows * kHeadDim;
  }

  __device__ __forceinline__ int left() const { return left_; }  // chunks

  // Reads the next kBatch of its chunks, or what is left.
  __device__ __forceinline__ void read() {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool exists = i < left_;
      norms_[i] = exists ? *norms_at_ : make_float2(-INFINITY, 0.0f);
      values_[i] = exists && has_output_ ? *reinterpret_cast<const Values*>(values_at_) : Values{};
      norms_at_ += i == 0 ? norms_first_step_ : norms_step_;
      values_at_ += i == 0 ? values_first_step_ : values_step_;
    }
    norms_first_step_ = norms_step_;
    values_first_step_ = values_step_;
    left_ -= kBatch;
  }
  // Adds what was read, with weights relative to `maximum`.
  __device__ __forceinline__ void add(float maximum) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float weight = RowNorm{norms_[i].x, norms_[i].y}.weight_in({maximum, 0.0f});
      sum[i % kParts] += norms_[i].y * weight;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) output[i % kParts][j] += values_[i].of_column[j] * weight;
    }
  }

 private:
  struct alignas(kColumns * 4 < 16 ? kColumns * 4 : 16) Values {
    float of_column[kColumns];
  };
  int left_;
  bool has_output_;
  const float2* norms_at_;  // of its next chunk
  const float* values_at_;
  int norms_step_;  // from a chunk to the next; from the first it may be another
  int values_step_;
  int norms_first_step_;
  int values_first_step_;
  Values values_[kBatch];
  float2 norms_[kBatch];
};

// Merges a row's chunks, called by a warp or, where `kShared`, by the CTA, whose warps take a part each; the result is
// the same.
template <class Element, int kHeadDim, bool kShared>
__device__ __forceinline__ void merge_row(const VegasVerifyParams& p, const Workspace& w, const VerifyRequest& request,
                                          int b, int kv_head, int row_tile, int row, const Chunks& chunks) {
  using Part = RowPart<kHeadDim, kShared ? 1 : kFinishWarps>;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  RowOutput<Element> target = {};
  if (row < w.tile_rows) {
    target = portable::row_output<Element>(p, request, b, kv_head, row_tile * w.group_rows.divisor + row);
  }
  Part mine(w, chunks, row, kShared ? warp : 0, kShared ? kFinishWarps : 1);
  const float2* norm = w.partial_norm + int64_t{chunks.slot(lane)} * w.norm_rows + row;  // of chunk `lane`
  cudaGridDependencySynchronize();

  mine.read();
  RowNorm whole = {lane < chunks.count ? norm->x : -INFINITY, 0.0f};
#pragma unroll 1
  for (int c = lane + 32; c < chunks.count; c += 32) {
    whole.maximum = fmaxf(whole.maximum, w.partial_norm[int64_t{chunks.slot(c)} * w.norm_rows + row].x);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    whole.maximum = fmaxf(whole.maximum, __shfl_xor_sync(0xffffffffu, whole.maximum, step));
  }
  mine.add(whole.maximum);
  while (mine.left() > 0) {
    mine.read();
    mine.add(whole.maximum);
  }
  float total[Part::kColumns] = {};
  if constexpr (kShared) {
    __shared__ float sums[kFinishWarps][Part::kColumns + 1][32];
    sums[warp][Part::kColumns][lane] = mine.sum[0];
#pragma unroll
    for (int j = 0; j < Part::kColumns; ++j) sums[warp][j][lane] = mine.output[0][j];
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int part = 0; part < kFinishWarps; ++part) {
      whole.sum += sums[part][Part::kColumns][lane];
#pragma unroll
      for (int j = 0; j < Part::kColumns; ++j) total[j] += sums[part][j][lane];
    }
  } else {
#pragma unroll
    for (int part = 0; part < kFinishWarps; ++part) {
      whole.sum += mine.sum[part];
#pragma unroll
      for (int j = 0; j < Part::kColumns; ++j) total[j] += mine.output[part][j];
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

// What a CTA merges of a row tile and KV head: one row, or rows_per_cta by warps.
template <class Element, int kHeadDim>
__device__ __forceinline__ void merge_rows(const VegasVerifyParams& p, const Workspace& w, const RequestPlan& plan,
                                           int b, int of_row_tile, int rows_per_cta) {
  int row_tile = 0;
  int kv_head = of_row_tile;
  if (of_row_tile >= p.cache.num_heads_kv) {
    row_tile = of_row_tile / p.cache.num_heads_kv;
    kv_head -= row_tile * p.cache.num_heads_kv;
  }
  const Chunks chunks(w, plan, kv_head, row_tile);
  if (row_tile >= plan.row_tiles || chunks.count == 1) return;
  const auto exists = [&](int row) {
    return row < w.tile_rows
               ? row_tile * w.group_rows.divisor + row < plan.request.q_len * w.group
               : row - w.tile_rows < plan.request.num_guides && row_tile == 0 && p.dump != VEGAS_DUMP_TOKEN;
  };
  if (rows_per_cta == 1) {
    const int row = blockIdx.x;
    if (exists(row)) merge_row<Element, kHeadDim, true>(p, w, plan.request, b, kv_head, row_tile, row, chunks);
    return;
  }
  const int first = blockIdx.x * rows_per_cta;
#pragma unroll 1
  for (int row = first + threadIdx.x / 32; row < min(first + rows_per_cta, w.norm_rows); row += kFinishWarps) {
    if (exists(row)) merge_row<Element, kHeadDim, false>(p, w, plan.request, b, kv_head, row_tile, row, chunks);
  }
}

// The grid is (rows of a row tile, pairs of a row tile and KV head, requests), with more in y that finish dumps.
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
  if (of_row_tile < merges) {
    merge_rows<Element, kHeadDim>(p, w, plan, b, of_row_tile, rows_per_cta);
    cudaGridDependencySynchronize();
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0 && threadIdx.x == 0) *w.pace = 0;
    return;
  }
  cudaGridDependencySynchronize();
  const int cta = (of_row_tile - merges) * gridDim.x + blockIdx.x;
  const int ctas = (gridDim.y - merges) * gridDim.x;
  if (w.dump) {
    portable::reduce_dump(p, w.dump, p.cache.num_heads_kv, plan.request, b, cta, ctas, kFinishThreads);
  } else {
    portable::mask_dump(p, plan.request, b, cta, ctas, kFinishThreads);
  }
}

}  // namespace vegas_ops::hopper
