// What the warps of a CTA, and CTAs, have found out about a few columns of a row: sums that are added up, then written.
#pragma once

#include "common/finish_rows.cuh"

namespace vegas_ops::portable {

constexpr int kSparseMaxWarps = 8;

__device__ __forceinline__ float2 multiply_add(float2 a, float b, float2 c) {
  return make_float2(fmaf(a.x, b, c.x), fmaf(a.y, b, c.y));
}
__device__ __forceinline__ float4 multiply_add(const float4& a, float b, const float4& c) {
  return make_float4(fmaf(a.x, b, c.x), fmaf(a.y, b, c.y), fmaf(a.z, b, c.z), fmaf(a.w, b, c.w));
}

// Two or four neighbouring columns of a row, and the row's norm.
template <class Columns>
struct RowPart {
  RowNorm norm = {-INFINITY, 0.0f};
  Columns value = {};

  __device__ __forceinline__ void add(float2 part_norm, const Columns& of_part) {
    const RowNorm part = {part_norm.x, part_norm.y};
    const float weight = part.weight_in(norm);
    norm.sum += part.sum * weight;
    value = multiply_add(of_part, weight, value);
  }
  // Makes room for parts with maxima up to `maximum`.
  __device__ __forceinline__ void raise(float maximum) {
    const RowNorm now = {fmaxf(norm.maximum, maximum), 0.0f};
    const float weight = norm.weight_in(now);
    norm = {now.maximum, norm.sum * weight};
    value = multiply_add(value, weight, Columns());
  }
  // Adds parts that are there together.
  template <int kParts>
  __device__ __forceinline__ void add(const float2 (&norms)[kParts], const Columns (&values)[kParts]) {
    float maximum = norms[0].x;
#pragma unroll
    for (int i = 1; i < kParts; ++i) maximum = fmaxf(maximum, norms[i].x);
    raise(maximum);
#pragma unroll
    for (int i = 0; i < kParts; ++i) add(norms[i], values[i]);
  }
};

// Writes columns of a head, and its log-sum-exp.
template <class T, class Columns>
__device__ __forceinline__ void write_columns(const VegasSparseParams& p, int request, int head, int d,
                                              const RowPart<Columns>& sum, float sink_logit, float v_descale) {
  using Element = typename T::Element;
  constexpr int kColumns = sizeof(Columns) / sizeof(float);
  const bool keyless = sum.norm.sum == 0.0f;
  const float sink = p.sinks ? exp2f(sink_logit * kLog2e - sum.norm.base()) : 0.0f;
  const float factor = keyless ? 0.0f : v_descale / (sum.norm.sum + sink);
  if (d < T::head_dim(p.cache)) {
    Element* out = static_cast<Element*>(p.out) + request * p.out_stride_row + head * p.out_stride_head + d;
    const float* value = reinterpret_cast<const float*>(&sum.value);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = from_float<Element>(keyless ? 0.0f : value[i] * factor);
  }
  if (d == 0) p.lse[int64_t{head} * p.batch + request] = sum.norm.lse();
}

}  // namespace vegas_ops::portable
