// Choosing the instantiation and the pipeline depth of an attention kernel, on the host.
#pragma once

#include <cuda_runtime.h>

#include "common/paged_attention.cuh"

namespace vegas_ops::portable {

__host__ __device__ constexpr int padded_head_dim(int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

// At most, of a kernel beside its tiles.
template <class T>
constexpr int static_shared_bytes() {
  return 8 * T::kHeadDim + 1280;
}

// The deepest pipeline of at least two stages that leaves room for `resident` CTAs per SM, or for as many fewer as
// it takes; else the deepest that fits. `most_bytes` is what any call of this device may take.
template <class T>
cudaError_t choose_stages(int resident, int* stages, int* most_bytes) {
  int device, per_block, per_sm, reserved;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
  if (error != cudaSuccess) return error;
  reserved += static_shared_bytes<T>();
  per_block -= static_shared_bytes<T>();
  *most_bytes = per_block;
  for (int ctas = resident; ctas >= 2; --ctas) {
    for (*stages = kMaxStages; *stages >= 2; --*stages) {
      const int bytes = SharedTile<T>::bytes(*stages);
      if (bytes <= per_block && ctas * (bytes + reserved) <= per_sm) return cudaSuccess;
    }
  }
  for (*stages = kMaxStages; *stages > SharedTile<T>::kMinStages; --*stages) {
    if (SharedTile<T>::bytes(*stages) <= per_block) break;
  }
  return cudaSuccess;
}

// Launches kernel(args..., stages), `warps` to a CTA, with as much shared memory as its pipeline takes.
template <class T, class Kernel, class... Args>
cudaError_t launch_attention(Kernel kernel, int64_t ctas, int warps, cudaStream_t stream, const Args&... args) {
  const int resident = 2 * T::kMaxWarps / warps;
  int stages, most_bytes;
  cudaError_t error = choose_stages<T>(resident, &stages, &most_bytes);
  if (error != cudaSuccess) return error;
  const int bytes = SharedTile<T>::bytes(stages);
  // The same for every call, since threads of the host share it.
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes);
  if (error != cudaSuccess) return error;
  // Left alone, the driver may give an SM's memory to the L1 cache and leave room for one CTA.
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(ctas), 32 * warps, bytes, stream>>>(args..., stages);
  return cudaGetLastError();
}

}  // namespace vegas_ops::portable
