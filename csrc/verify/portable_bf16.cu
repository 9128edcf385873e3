#include "verify/portable_instances.cuh"

namespace vegas_ops::portable {
template cudaError_t launch_verify<__nv_bfloat16>(const VegasVerifyParams&, const PlanWorkspace&, RowMapping, int64_t,
                                                  cudaStream_t);
}
