#include "sparse/portable_instances.cuh"

namespace vegas_ops::portable {
template cudaError_t launch_sparse<__half>(const VegasSparseParams&, const PlanWorkspace&, int64_t, cudaStream_t);
}
