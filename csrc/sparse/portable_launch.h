// The attention kernel's launch, instantiated per query type (portable_bf16.cu, portable_fp16.cu).
#pragma once

#include <cuda_runtime.h>

#include "common/split_plan.cuh"
#include "vegas_ops/params.h"

namespace vegas_ops::portable {

template <class Element>
cudaError_t launch_sparse(const VegasSparseParams& p, const PlanWorkspace& w, int64_t units, cudaStream_t stream);

}  // namespace vegas_ops::portable
