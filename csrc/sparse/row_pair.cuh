// What the warps of a CTA, and CTAs, have found out about two columns of a row: sums that are added up, then written.
#pragma once

#include "common/finish_rows.cuh"

namespace vegas_ops::portable {

constexpr int kSparseMaxWarps = 8;

// Two neighbouring columns of a row, and the row's norm.
struct RowPair {
  RowNorm norm;
  float2 value;

  __device__ __forceinline__ void add(const RowNorm& part, float2 of_part) {
    const float weight = part.weight_in(norm);
    norm.sum += part.sum * weight;
    value.x += of_part.x * weight;
    value.y += of_part.y * weight;
  }
  // Makes room for parts with maxima up to `maximum`.
  __device__ __forceinline__ void raise(float maximum) {
    const RowNorm now = {fmaxf(norm.maximum, maximum), 0.0f};
    const float weight = norm.weight_in(now);
    norm = {now.maximum, norm.sum * weight};
    value = {value.x * weight, value.y * weight};
  }
};

// Writes two columns of a head, and its log-sum-exp.
template <class T>
__device__ __forceinline__ void write_pair(const VegasSparseParams& p, int request, int head, int d, const RowPair& sum,
                                           float sink_logit, float v_descale) {
  using Element = typename T::Element;
  const bool keyless = sum.norm.sum == 0.0f;
  const float sink = p.sinks ? exp2f(sink_logit * kLog2e - sum.norm.base()) : 0.0f;
  const float factor = keyless ? 0.0f : v_descale / (sum.norm.sum + sink);
  if (d < p.cache.head_dim) {
    Element* out = static_cast<Element*>(p.out) + request * p.out_stride_row + head * p.out_stride_head + d;
    out[0] = from_float<Element>(keyless ? 0.0f : sum.value.x * factor);
    out[1] = from_float<Element>(keyless ? 0.0f : sum.value.y * factor);
  }
  if (d == 0) p.lse[int64_t{head} * p.batch + request] = sum.norm.lse();
}

}  // namespace vegas_ops::portable
