// What launches have in common on the host.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"

namespace vegas_ops {

inline cudaError_t num_multiprocessors(int* count) {
  int device;
  const cudaError_t error = cudaGetDevice(&device);
  return error == cudaSuccess ? cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device) : error;
}

struct LaunchGrid {
  dim3 ctas;
  int threads;  // of a CTA
  int shared_bytes = 0;
  int cluster = 1;  // CTAs of a cluster, along x
};

// Launches with programmatic stream serialization (from sm_90): the kernel waits for its predecessor by itself.
template <class... Args>
cudaError_t launch_dependent(void (*kernel)(Args...), const LaunchGrid& grid, cudaStream_t stream,
                             const Args&... args) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.ctas;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = grid.cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// The status of an op whose launches gave `error`.
inline int launch_status(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return VEGAS_OK;
  cudaGetLastError();  // returned here, so the next call must not find it
  return fail(VEGAS_CUDA_ERROR, "%s: launch failed: %s", op, cudaGetErrorString(error));
}

}  // namespace vegas_ops
