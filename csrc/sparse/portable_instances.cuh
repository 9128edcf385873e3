// Body of portable_bf16.cu and portable_fp16.cu: the kernels of one query type.
#pragma once

#include "common/portable_launch.cuh"
#include "sparse/portable.cuh"
#include "sparse/portable_launch.h"

namespace vegas_ops::portable {

template <class Element, bool kFp8, int kHeadDim>
cudaError_t launch_sparse_instance(const VegasSparseParams& p, const PlanWorkspace& w, int64_t units,
                                   cudaStream_t stream) {
  using T = Traits<Element, kFp8, kHeadDim, kSparseRowTiles>;
  return launch_attention<T>(sparse_kernel<T>, units * p.cache.num_heads_kv, kWarps, stream, p, w);
}

template <class Element>
cudaError_t launch_sparse(const VegasSparseParams& p, const PlanWorkspace& w, int64_t units, cudaStream_t stream) {
  const bool fp8 = p.cache.dtype == VEGAS_FP8_E4M3;
  switch (padded_head_dim(p.cache.head_dim)) {
    case 64:
      return fp8 ? launch_sparse_instance<Element, true, 64>(p, w, units, stream)
                 : launch_sparse_instance<Element, false, 64>(p, w, units, stream);
    case 128:
      return fp8 ? launch_sparse_instance<Element, true, 128>(p, w, units, stream)
                 : launch_sparse_instance<Element, false, 128>(p, w, units, stream);
    default:
      return fp8 ? launch_sparse_instance<Element, true, 256>(p, w, units, stream)
                 : launch_sparse_instance<Element, false, 256>(p, w, units, stream);
  }
}

}  // namespace vegas_ops::portable
