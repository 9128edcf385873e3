// The Hopper attention kernel's launch, instantiated per query type and cache type (hopper_bf16.cu and the like).
#pragma once

#include <cuda_runtime.h>

#include "vegas_ops/params.h"

namespace vegas_ops::hopper {

struct Workspace;
struct CacheBoxes;

// Warpgroups that share the packed rows of a tile, 64 each; more rows take several tiles, for which two do better.
constexpr int kMaxRowGroups = 3;
inline int row_groups_for(int64_t rows, int head_dim) {
  if (head_dim > 128) return 1;
  return rows <= 64 ? 1 : rows <= 128 || rows > 64 * kMaxRowGroups ? 2 : kMaxRowGroups;
}

// Larger tiles keep the tensor cores busier. Three row groups have no registers for them, and two CTAs per SM no need.
// Where results must not depend on the number of rows, all tiles are small.
constexpr int tile_keys(int row_groups, bool balanced) { return row_groups == 2 && balanced ? 128 : 64; }

// Of an fp8 cache, few rows of small heads leave registers for them: what a tile takes there is mostly waiting, for the
// guide warps as well. Without a dump they take as long or longer.
constexpr int kFewFp8Rows = 32;
constexpr int fp8_tile_keys(int rows, int head_dim, bool dumps, bool balanced) {
  return rows <= kFewFp8Rows && head_dim <= 64 && dumps && balanced ? 128 : 64;
}

constexpr int kMostDumpedHeads = 8;  // of a KV head, where rows of logits are dumped: columns of a product

constexpr int ctas_per_sm(int row_groups, int head_dim) { return row_groups == 1 && head_dim <= 128 ? 2 : 1; }

// Whether registers allow guide rows among the packed ones.
constexpr bool guides_fit(int row_groups, int head_dim, int tile_keys) {
  return row_groups == 2 ? head_dim == 128 && tile_keys == 128 : head_dim <= 128;
}

struct LaunchShape {
  int row_groups;
  int tile_keys;
  bool guesses;      // CTAs look for work while the previous launch ends
  dim3 grid;         // of the attention kernel
  dim3 finish_grid;  // of the last kernel; without rows: no such kernel
  int rows_per_cta;  // that merge
  int merges;        // pairs of a row tile and KV head
};

// Both kernels of a call: with a cache of the query's type, and with an fp8 cache.
template <class Element>
cudaError_t launch_verify(const VegasVerifyParams& p, const Workspace& w, const CacheBoxes& boxes,
                          const LaunchShape& shape, cudaStream_t stream);
template <class Element>
cudaError_t launch_verify_fp8(const VegasVerifyParams& p, const Workspace& w, const CacheBoxes& boxes,
                              const LaunchShape& shape, cudaStream_t stream);

}  // namespace vegas_ops::hopper
