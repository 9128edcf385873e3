#include "sparse/portable_instances.cuh"

namespace vegas_ops::portable {
template cudaError_t launch_sparse<__nv_bfloat16>(const VegasSparseParams&, const PlanWorkspace&, int64_t,
                                                  cudaStream_t);
}
