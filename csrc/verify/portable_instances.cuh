// Body of portable_bf16.cu and portable_fp16.cu: the kernels of one query type.
#pragma once

#include "common/portable_launch.cuh"
#include "verify/portable.cuh"
#include "verify/portable_launch.h"

namespace vegas_ops::portable {

template <class Element, int kHeadDim, int kRowTiles, bool kSplitRows>
cudaError_t launch_verify_instance(const VegasVerifyParams& p, const PlanWorkspace& w, int warps, int64_t units,
                                   cudaStream_t stream) {
  using Plain = Traits<Element, false, kHeadDim, kRowTiles, kSplitRows>;
  using Fp8 = Traits<Element, true, kHeadDim, kRowTiles, kSplitRows>;
  const int64_t ctas = units * p.cache.num_heads_kv;
  return p.cache.dtype == VEGAS_FP8_E4M3 ? launch_attention<Fp8>(verify_kernel<Fp8>, ctas, warps, stream, p, w)
                                         : launch_attention<Plain>(verify_kernel<Plain>, ctas, warps, stream, p, w);
}

template <class Element, int kHeadDim>
cudaError_t launch_verify_mapping(const VegasVerifyParams& p, const PlanWorkspace& w, RowMapping mapping, int64_t units,
                                  cudaStream_t stream) {
  const int warps = mapping.warps;
  if (mapping.split_rows) {
    return launch_verify_instance<Element, kHeadDim, 1, true>(p, w, warps, units, stream);
  }
  return mapping.row_tiles == 1 ? launch_verify_instance<Element, kHeadDim, 1, false>(p, w, warps, units, stream)
                                : launch_verify_instance<Element, kHeadDim, 2, false>(p, w, warps, units, stream);
}

template <class Element>
cudaError_t launch_verify(const VegasVerifyParams& p, const PlanWorkspace& w, RowMapping mapping, int64_t units,
                          cudaStream_t stream) {
  switch (padded_head_dim(p.cache.head_dim)) {
    case 64:
      return launch_verify_mapping<Element, 64>(p, w, mapping, units, stream);
    case 128:
      return launch_verify_mapping<Element, 128>(p, w, mapping, units, stream);
    default:
      return launch_verify_instance<Element, 256, 1, false>(p, w, mapping.warps, units, stream);
  }
}

}  // namespace vegas_ops::portable
