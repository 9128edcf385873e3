#include "common/dispatch.h"

int vegas_sparse_paged_decode(const VegasSparseParams* params, VegasDevice device, void* stream) {
  const VegasSparseParams& p = *params;
  return vegas_ops::dispatch(p, device, stream, vegas_ops::cpu_kernels().sparse, VEGAS_CUDA_KERNEL(sparse_portable));
}
