// Last step of a row: from accumulated output and norm to the op's outputs, for rows of one chunk (written
// by the attention kernel) and rows of several (merged here from the workspace, in chunk order).
#pragma once

#include "common/paged_attention.cuh"
#include "common/split_plan.cuh"

namespace vegas_ops::portable {

constexpr int kMaxColumns = 256 / 32;  // of a row, per lane

// Destinations of one packed row.
template <class Element>
struct RowOutput {
  Element* out;
  float* lse;
  const float* sink;  // null without sinks
  float v_descale;
};

// Called by all lanes of a warp; value(i) is the accumulated output at column lane + 32 * i.
template <class Element, class Value>
__device__ __forceinline__ void finish_row(const RowOutput<Element>& row, const RowNorm& norm, int head_dim,
                                           const Value& value) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) *row.lse = norm.lse();
  const bool keyless = norm.sum == 0.0f;
  const float sink = row.sink ? exp2f(*row.sink * kLog2e - norm.base()) : 0.0f;
  const float factor = row.v_descale / (norm.sum + sink);
#pragma unroll
  for (int i = 0; i < kMaxColumns; ++i) {
    const int d = lane + 32 * i;
    if (d < head_dim) row.out[d] = from_float<Element>(keyless ? 0.0f : value(i) * factor);
  }
}

// Keeps what a chunk contributes to a row until merge_chunks.
template <class Value>
__device__ __forceinline__ void store_partial(const PlanWorkspace& w, int64_t partial_row, const RowNorm& norm,
                                              const Value& value) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) w.partial_norm[partial_row] = make_float2(norm.maximum, norm.sum);
  float* output = w.partial_output + partial_row * w.head_dim;
#pragma unroll
  for (int i = 0; i < kMaxColumns; ++i) {
    const int d = lane + 32 * i;
    if (d < w.head_dim) output[d] = value(i);
  }
}

// Adds up the norms of `chunks` parts, `stride` apart, called by all lanes of a warp; add(chunk, weight) is called for
// each part in its order, so that the result depends on the request's own chunks only.
template <class Add>
__device__ __forceinline__ RowNorm merge_norms(const float2* norms, int64_t stride, int chunks, const Add& add) {
  RowNorm whole = {-INFINITY, 0.0f};
  for (int c = threadIdx.x % 32; c < chunks; c += 32) whole.maximum = fmaxf(whole.maximum, norms[c * stride].x);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    whole.maximum = fmaxf(whole.maximum, __shfl_xor_sync(0xffffffffu, whole.maximum, step));
  }
#pragma unroll 4
  for (int c = 0; c < chunks; ++c) {
    const float2 norm = norms[c * stride];
    const RowNorm part = {norm.x, norm.y};
    const float weight = part.weight_in(whole);
    whole.sum += part.sum * weight;
    add(c, weight);
  }
  return whole;
}

// Merges the chunks of one row and finishes it, called by all lanes of a warp.
template <class Element>
__device__ inline void merge_chunks(const PlanWorkspace& w, const PlannedRequest& request, int row_tiles, int row_tile,
                                    int head, int row, const RowOutput<Element>& target) {
  const int lane = threadIdx.x % 32;
  const int64_t first = w.partial_row(request, row_tiles, 0, row_tile, head, row);
  const int64_t stride = w.partial_row(request, row_tiles, 1, row_tile, head, row) - first;
  float output[kMaxColumns];
#pragma unroll
  for (int i = 0; i < kMaxColumns; ++i) output[i] = 0.0f;
  const float* own = w.partial_output + first * w.head_dim + lane;
  const int64_t step = stride * w.head_dim;
  const auto add = [&](int chunk, float weight) {
    const float* values = own + chunk * step;
#pragma unroll
    for (int i = 0; i < kMaxColumns; ++i) {
      const int d = lane + 32 * i;
      if (d < w.head_dim) output[i] += values[32 * i] * weight;
    }
  };
  const RowNorm whole = merge_norms(w.partial_norm + first, stride, request.chunks, add);
  finish_row(target, whole, w.head_dim, [&](int i) { return output[i]; });
}

}  // namespace vegas_ops::portable
