// Body of hopper_bf16.cu, hopper_fp16.cu and those for fp8 caches: the kernels of one query type.
#pragma once

#include <stddef.h>

#include "common/cuda_launch.h"
#include "common/portable_launch.cuh"
#include "verify/hopper.cuh"
#include "verify/hopper_finish.cuh"
#include "verify/hopper_launch.h"

namespace vegas_ops::hopper {

// All kernels of a call ask for one division of an SM's memory: changing it would drain the SM between them.
template <class Kernel>
cudaError_t prepare(Kernel kernel, int shared_bytes) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

template <class T>
cudaError_t launch_instance(const VegasVerifyParams& p, const Workspace& w, const CacheBoxes& boxes,
                            const LaunchShape& shape, cudaStream_t stream) {
  // Without the padding at its end.
  constexpr int kBytes = offsetof(SharedMemory<T>, guide_norm) + sizeof(SharedMemory<T>::guide_norm);
  static_assert(kBytes <= T::kSharedPerSm / T::kCtasPerSm - T::kReservedPerCta);
  const auto finish = verify_finish_kernel<typename T::Element, T::kHeadDim>;
  cudaError_t error = prepare(verify_kernel<T>, kBytes);
  if (error == cudaSuccess) error = prepare(finish, 0);
  if (error == cudaSuccess) {
    error = launch_dependent(verify_kernel<T>, {shape.grid, T::kThreads, kBytes}, stream, p, w, boxes);
  }
  if (error == cudaSuccess && shape.finish_grid.y > 0) {
    error =
        launch_dependent(finish, {shape.finish_grid, kFinishThreads}, stream, p, w, shape.rows_per_cta, shape.merges);
  }
  return error;
}

// Kernels whose CTAs may look for their work early.
template <class Element, int kHeadDim, int kRowGroups, int kTileKeys>
cudaError_t launch_early(const VegasVerifyParams& p, const Workspace& w, const CacheBoxes& boxes,
                         const LaunchShape& shape, cudaStream_t stream) {
  if (!shape.guesses) {
    return launch_instance<Traits<Element, kHeadDim, kRowGroups, kTileKeys>>(p, w, boxes, shape, stream);
  }
  if constexpr (guides_fit(kRowGroups, kHeadDim, kTileKeys)) {
    if (w.guides_in_rows) {
      return launch_instance<Traits<Element, kHeadDim, kRowGroups, kTileKeys, true, true>>(p, w, boxes, shape, stream);
    }
  }
  return launch_instance<Traits<Element, kHeadDim, kRowGroups, kTileKeys, true, false>>(p, w, boxes, shape, stream);
}

template <class Element>
cudaError_t launch_verify(const VegasVerifyParams& p, const Workspace& w, const CacheBoxes& boxes,
                          const LaunchShape& shape, cudaStream_t stream) {
  const bool large = shape.tile_keys == 128;
  switch (portable::padded_head_dim(p.cache.head_dim) + shape.row_groups) {
    case 64 + 1:
      return launch_early<Element, 64, 1, 64>(p, w, boxes, shape, stream);
    case 64 + 2:
      return large ? launch_early<Element, 64, 2, 128>(p, w, boxes, shape, stream)
                   : launch_instance<Traits<Element, 64, 2, 64>>(p, w, boxes, shape, stream);
    case 64 + 3:
      return launch_instance<Traits<Element, 64, 3, 64>>(p, w, boxes, shape, stream);
    case 128 + 1:
      return launch_early<Element, 128, 1, 64>(p, w, boxes, shape, stream);
    case 128 + 2:
      return large ? launch_early<Element, 128, 2, 128>(p, w, boxes, shape, stream)
                   : launch_instance<Traits<Element, 128, 2, 64>>(p, w, boxes, shape, stream);
    case 128 + 3:
      return launch_instance<Traits<Element, 128, 3, 64>>(p, w, boxes, shape, stream);
    default:
      return launch_instance<Traits<Element, 256, 1, 64>>(p, w, boxes, shape, stream);
  }
}

template <class Element>
cudaError_t launch_verify_fp8(const VegasVerifyParams& p, const Workspace& w, const CacheBoxes& boxes,
                              const LaunchShape& shape, cudaStream_t stream) {
  const bool few = w.tile_rows <= kFewFp8Rows;
  if (shape.tile_keys == 128) return launch_instance<Fp8Traits<Element, 64, 32, 128>>(p, w, boxes, shape, stream);
  if (p.cache.head_dim <= 64) {
    return few ? launch_instance<Fp8Traits<Element, 64, 32, 64>>(p, w, boxes, shape, stream)
               : launch_instance<Fp8Traits<Element, 64, 64, 64>>(p, w, boxes, shape, stream);
  }
  return few ? launch_instance<Fp8Traits<Element, 128, 32, 64>>(p, w, boxes, shape, stream)
             : launch_instance<Fp8Traits<Element, 128, 64, 64>>(p, w, boxes, shape, stream);
}

}  // namespace vegas_ops::hopper
