// Whether the current device runs the Hopper kernels.
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>

#include "common/backends.h"

namespace vegas_ops {

bool on_hopper() {
  static const bool portable_only = [] {
    const char* wanted = std::getenv("VEGAS_OPS_KERNELS");
    return wanted && !std::strcmp(wanted, "portable");
  }();
  int device, major, minor;
  return !portable_only && cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}

}  // namespace vegas_ops
