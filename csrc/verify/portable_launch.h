// How packed rows map to CTAs, and the attention kernel's launch, instantiated per query type (portable_bf16.cu,
// portable_fp16.cu).
#pragma once

#include <cuda_runtime.h>

#include "common/split_plan.cuh"
#include "common/tile_mma.cuh"
#include "vegas_ops/params.h"

namespace vegas_ops::portable {

// A warp holds 16 * row_tiles packed rows; the warps of a CTA split rows, or share them and split keys.
struct RowMapping {
  int row_tiles;
  bool split_rows;

  int warp_rows() const { return 16 * row_tiles; }
  int tile_rows() const { return split_rows ? kWarps * warp_rows() : warp_rows(); }
};

// From few rows to many: sharing rows keeps every warp busy, splitting them reads keys once for up to 128.
constexpr RowMapping kRowMappings[] = {{1, false}, {2, false}, {1, true}, {2, true}};

// Accumulators of 256 columns leave room for 16 rows, which then take the first mapping only.
inline int num_row_mappings(int head_dim) { return head_dim <= 128 ? 4 : 1; }

// The first mapping that holds `rows` packed rows in one tile, else the last.
inline int row_mapping_for(int rows, int head_dim) {
  int i = 0;
  while (i + 1 < num_row_mappings(head_dim) && kRowMappings[i].tile_rows() < rows) ++i;
  return i;
}

// For calls whose results must not depend on the rows of other requests, at any number of them.
inline int invariant_row_mapping(int head_dim) { return head_dim <= 128 ? 1 : 0; }

template <class Element>
cudaError_t launch_verify(const VegasVerifyParams& p, const PlanWorkspace& w, RowMapping mapping, int64_t units,
                          int token_tiles, cudaStream_t stream);

}  // namespace vegas_ops::portable
