// The kernel's launch, instantiated per query type (portable_bf16.cu, portable_fp16.cu).
#pragma once

#include <cuda_runtime.h>

#include "vegas_ops/params.h"

namespace vegas_ops::portable {

// Tiles of 8 query heads that a warp attends at a time: as many as its registers hold.
__host__ __device__ constexpr int head_tiles_for(int group, int head_dim) {
  return group > 8 && head_dim <= 128 ? 2 : 1;
}

struct SparsePlan;

// What a kernel needs of the current device.
struct SparseDevice {
  int multiprocessors;
  int shared_per_cta;     // bytes
  int shared_per_half;    // bytes of each of two CTAs of a multiprocessor
  bool dependent_launch;  // can be launched before its predecessor has ended, and in clusters
};

// A CTA's warps, a power of two, and the stages of each.
struct SparseCta {
  int warps;
  int stages;
  int per_multiprocessor;
};

// Zero warps where no CTA fits.
template <class Element>
SparseCta sparse_cta(const VegasSparseParams& p, const SparseDevice& device);

// Clusters of `ctas` CTAs that the device runs at once; 0 where that is unknown. `rows` are those of a row tile.
template <class Element>
int clusters_at_once(const VegasSparseParams& p, const SparseDevice& device, const SparseCta& cta, int rows, int ctas);

template <class Element>
cudaError_t launch_sparse(const VegasSparseParams& p, const SparsePlan& plan, const SparseDevice& device,
                          const SparseCta& cta, int team, int teams, cudaStream_t stream);

}  // namespace vegas_ops::portable
