// Choosing the instantiation and the pipeline depth of an attention kernel, on the host.
#pragma once

#include <cuda_runtime.h>

#include "common/paged_attention.cuh"

namespace vegas_ops::portable {

__host__ __device__ constexpr int padded_head_dim(int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

// The deepest pipeline of at least two stages that leaves room for two CTAs per SM; else the deepest that fits.
template <class T>
cudaError_t choose_stages(int* stages) {
  int device, per_block, per_sm, reserved;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
  if (error != cudaSuccess) return error;
  for (*stages = kMaxStages; *stages >= 2; --*stages) {
    const int bytes = SharedTile<T>::bytes(*stages);
    if (bytes <= per_block && 2 * (bytes + reserved) <= per_sm) return cudaSuccess;
  }
  for (*stages = kMaxStages; *stages > 1; --*stages) {
    if (SharedTile<T>::bytes(*stages) <= per_block) break;
  }
  return cudaSuccess;
}

// Launches kernel(args..., stages) with as much shared memory as its pipeline takes.
template <class T, class Kernel, class... Args>
cudaError_t launch_attention(Kernel kernel, int64_t ctas, cudaStream_t stream, const Args&... args) {
  int stages;
  cudaError_t error = choose_stages<T>(&stages);
  if (error != cudaSuccess) return error;
  const int bytes = SharedTile<T>::bytes(stages);
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  // Left alone, the driver may give an SM's memory to the L1 cache and leave room for one CTA.
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(ctas), kThreads, bytes, stream>>>(args..., stages);
  return cudaGetLastError();
}

}  // namespace vegas_ops::portable
