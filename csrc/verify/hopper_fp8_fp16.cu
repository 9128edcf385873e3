// The product of keys with rows has 40 or 72 columns.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include "verify/hopper_instances.cuh"

namespace vegas_ops::hopper {
template cudaError_t launch_verify_fp8<__half>(const VegasVerifyParams&, const Workspace&, const CacheBoxes&,
                                               const LaunchShape&, cudaStream_t);
}
