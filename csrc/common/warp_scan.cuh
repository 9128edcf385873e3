// The sum over the lanes of a warp that a block's scans start from; how they join warps depends on the kernel.
#pragma once

namespace vegas_ops {

// Inclusive: of this lane's value and those of the lanes below.
template <class Value>
__device__ __forceinline__ Value warp_scan(Value value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Value below = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

}  // namespace vegas_ops
