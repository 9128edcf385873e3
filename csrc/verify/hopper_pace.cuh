// How CTAs of a large call keep step with each other.
//
// Memory serves CTAs unequally, and it serves all of them best where none runs ahead: whoever has asked for more tiles
// than the average waits a little. Nothing but time depends on it, and a wait ends by itself, whatever the others do.
// Shares must have the same shape: CTAs that keep step wait for every request that one of them begins.
#pragma once

#include "verify/hopper_plan.cuh"

namespace vegas_ops::hopper {

// The K warp's side of it.
class Pace {
 public:
  // Before each tile, once lengths are known to stay. `share` is the CTA's.
  __device__ __forceinline__ void next(const VegasVerifyParams& p, const Workspace& w, const Share& share) {
    if (w.pace_slack < 0 || ++tiles_ % kTiles != 0) return;
    if (shares_ < 0) shares_ = suits(p, w, share) ? portable::ceil_div(share.total, share.size) : 0;
    if (shares_ == 0) return;
    if (threadIdx.x % 32 == 0) {
      // Steps of all if each were as far; the last share is shorter, and its steps may be two fewer.
      const int tiles = tiles_ - w.pace_slack;
      const int last = share.total - (shares_ - 1) * share.size;
      const int64_t average = (int64_t{shares_ - 1} * tiles + min(tiles, last) - 2 * kTiles) * w.team / kTiles;
      int steps = atomicAdd(w.pace, 1);
      for (int nap = 0; nap < kMostNaps && steps < average; ++nap) {
        __nanosleep(kNap);
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(steps) : "l"(w.pace) : "memory");
      }
    }
    __syncwarp();
  }

 private:
  static constexpr int kTiles = 4;  // of a step
  static constexpr int kMostNaps = 16;
  static constexpr int kNap = 200;        // ns
  static constexpr int kLeastShare = 48;  // tiles

  __device__ __forceinline__ static bool suits(const VegasVerifyParams& p, const Workspace& w, const Share& share) {
    if (share.size < kLeastShare) return false;
    int least = INT_MAX;
    int most = 0;
    for (int b = threadIdx.x % 32; b < p.batch; b += 32) {
      const int units = RequestUnits(w, request_of(p, w, b)).all;
      least = min(least, units);
      most = max(most, units);
    }
    least = __reduce_min_sync(0xffffffffu, least);
    most = __reduce_max_sync(0xffffffffu, most);
    return least == most;
  }

  int tiles_ = 0;    // that this CTA has asked for
  int shares_ = -1;  // whose CTAs keep step; 0: none do; -1: not yet known
};

}  // namespace vegas_ops::hopper
