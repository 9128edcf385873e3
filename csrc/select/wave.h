// What the kernels that choose from scores have in common on the host: the waves of a call.
#pragma once

#include <cuda_runtime.h>

#include "vegas_ops/params.h"

namespace vegas_ops::selection {

// The lists that one sequence of launches handles, and rows of fp32 scores for them.
struct Wave {
  int64_t first;
  int32_t lists;
  int32_t ctas;         // per list
  const float* source;  // (lists, stride): what is pooled or selected from; NULL: the dump itself
  int64_t stride;
};

// Launches the selection of a wave's lists. Errors that it does not return are those of cudaGetLastError.
using LaunchSelection = cudaError_t (*)(const VegasSelectParams& p, const Wave& wave, cudaStream_t stream);

// All lists, as many at a time as the workspace has room for. Planes are summed before, and windows pooled unless
// `on_hopper`, where `launch` does that itself, and launches are programmatically dependent.
int select_in_waves(const VegasSelectParams& p, LaunchSelection launch, bool on_hopper, void* stream);

}  // namespace vegas_ops::selection
