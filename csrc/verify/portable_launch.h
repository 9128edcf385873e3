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
  int warps;  // of a CTA

  int warp_rows() const { return 16 * row_tiles; }
  int tile_rows() const { return split_rows ? warps * warp_rows() : warp_rows(); }
};

// Warps that split rows: as many as hold them in one CTA, else equally many in each of several. A row's result does
// not depend on their number.
inline RowMapping split_row_mapping(int rows, int head_dim) {
  const int tiles = ceil_div(rows, 16);
  const int warps = ceil_div(tiles, ceil_div(tiles, max_row_warps(head_dim)));
  return {1, true, warps < kWarps ? kWarps : warps};
}

// From few rows to many: sharing rows keeps every warp busy, splitting them reads keys once for many rows. Accumulators
// of 256 columns leave room for 16 rows.
inline RowMapping row_mapping_for(int rows, int head_dim) {
  if (head_dim > 128 || rows <= 16) return {1, false, kWarps};
  return rows <= 32 ? RowMapping{2, false, kWarps} : split_row_mapping(rows, head_dim);
}

// For calls whose results must not depend on the rows of other requests: one order of adding keys for all numbers.
inline RowMapping invariant_row_mapping(int rows, int head_dim) {
  return head_dim > 128 ? RowMapping{1, false, kWarps} : split_row_mapping(rows, head_dim);
}

template <class Element>
cudaError_t launch_verify(const VegasVerifyParams& p, const PlanWorkspace& w, RowMapping mapping, int64_t units,
                          cudaStream_t stream);

}  // namespace vegas_ops::portable
