// How the CTAs of a team add up their KV heads' parts of a summed dump while they attend: through a ring of tiles in
// the workspace, small enough to stay in the L2 cache.
//
// Among all the reads, writing a part to memory costs several times what its bytes do; to the L2 cache it costs next to
// nothing. Nothing that is written to the ring has zero bits, so a word announces itself: there are no counters and no
// fences. Each CTA adds up every team-th tile, some tiles later, when the others have most likely been there, and
// clears what it has read; writers wait for zeros.
//
// So a CTA waits for all others of its team. They have neighbouring indices, CTAs start in the order of their indices,
// and a grid has many teams: whatever else runs, a team that has begun is soon whole.
#pragma once

#include "verify/hopper_traits.cuh"

namespace vegas_ops::hopper {

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* from) {
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}
__device__ __forceinline__ void store_relaxed(uint32_t* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

// A guide warp's side of it. A lane looks after kOwnKeys keys of every tile, 8 apart.
template <int kTileKeys, int kOwnKeys>
class TeamDump {
 public:
  // `column` is that of the lane's first key in a tile.
  __device__ __forceinline__ TeamDump(const Workspace& w, PendingSum (&pending)[kMostPending], int column)
      : pending_(pending),
        ring_(w.ring + int64_t{blockIdx.y} * w.ring_tiles * w.team * kTileKeys + column),
        column_(column),
        team_(w.team),
        tiles_(w.ring_tiles),
        oldest_(blockIdx.x),
        oldest_slot_(blockIdx.x) {
    look();
  }

  // Hands over this lane's parts of the next tile, whose sums belong to row[first_key] and further. Keys at or beyond
  // `length` have none.
  __device__ __forceinline__ void put(const VegasVerifyParams& p, const float (&parts)[kOwnKeys], float* row,
                                      int first_key, int length) {
    bool free;
    do {
      free = __all_sync(0xffffffffu, taken_ == 0);
      if (free) {
#pragma unroll
        for (int i = 0; i < kOwnKeys; ++i) {
          const uint32_t word = __float_as_uint(parts[i]);
          store_relaxed(own() + 8 * i, word == 0 ? 0x80000000u : word);
        }
        if (turn_ == blockIdx.x) {
          if (threadIdx.x % 32 == 0) pending_[tile_ / team_ % kMostPending] = {row, first_key, length};
          __syncwarp();
        }
        ++tile_;
        if (++turn_ == team_) turn_ = 0;
        if (++slot_ == tiles_) slot_ = 0;
      }
      if (oldest_ + (free ? kPatience : 0) < tile_) collect(p);
      if (!free) __nanosleep(kNap);
      look();
    } while (!free);
  }

  // Adds up what is left.
  __device__ __forceinline__ void finish(const VegasVerifyParams& p) {
    while (oldest_ < tile_) collect(p);
  }

 private:
  static constexpr int kPatience = 4;  // tiles
  static constexpr int kNap = 200;     // ns
  static constexpr int kBatch = 8;     // heads

  __device__ __forceinline__ uint32_t* own() const { return ring_ + (slot_ * team_ + blockIdx.x) * kTileKeys; }

  // Whether this lane's words of the next tile are still to be read by another CTA.
  __device__ __forceinline__ void look() {
    taken_ = 0;
#pragma unroll
    for (int i = 0; i < kOwnKeys; ++i) taken_ |= load_relaxed(own() + 8 * i);
  }

  // Adds up the oldest tile that is this CTA's, if all its parts are there, in the order of the heads.
  __device__ __forceinline__ void collect(const VegasVerifyParams& p) {
    uint32_t* from = ring_ + oldest_slot_ * team_ * kTileKeys;
    float total[kOwnKeys] = {};
    bool masked[kOwnKeys] = {};
    bool here = true;
#pragma unroll 1
    for (int first = 0; first < team_; first += kBatch) {
      uint32_t words[kBatch][kOwnKeys];
#pragma unroll
      for (int h = 0; h < kBatch; ++h) {
#pragma unroll
        for (int i = 0; i < kOwnKeys; ++i) {
          words[h][i] = first + h < team_ ? load_relaxed(from + (first + h) * kTileKeys + 8 * i) : 0x80000000u;
        }
      }
#pragma unroll
      for (int h = 0; h < kBatch; ++h) {
#pragma unroll
        for (int i = 0; i < kOwnKeys; ++i) {
          const float part = __uint_as_float(words[h][i]);
          here = here && words[h][i] != 0;
          masked[i] = masked[i] || part == -INFINITY;
          total[i] += part;
        }
      }
    }
    if (!__all_sync(0xffffffffu, here)) return;
    const PendingSum sum = pending_[oldest_ / team_ % kMostPending];
#pragma unroll
    for (int i = 0; i < kOwnKeys; ++i) {
      const int key = sum.first_key + column_ + 8 * i;
      if (key < sum.length) sum.row[key] = portable::summed_logit(p, total[i], masked[i]);
#pragma unroll 4
      for (int h = 0; h < team_; ++h) store_relaxed(from + h * kTileKeys + 8 * i, 0);
    }
    oldest_ += team_;
    oldest_slot_ += team_;
    if (oldest_slot_ >= tiles_) oldest_slot_ -= tiles_;
  }

  PendingSum (&pending_)[kMostPending];
  uint32_t* const ring_;  // this lane's column of the team's
  const int column_;
  const int team_;
  const int tiles_;
  int tile_ = 0;  // the next, counted from the CTA's first; its slot, and whose it is
  int slot_ = 0;
  int turn_ = 0;
  uint32_t taken_;
  int oldest_;  // of the tiles that this CTA adds up and has not yet
  int oldest_slot_;
};

}  // namespace vegas_ops::hopper
