// What the CTAs of a list share, and the interval of scores that a sample says holds its threshold.
#pragma once

#include <cuda_runtime.h>

#include "common/warp_scan.cuh"
#include "select/hopper_exchange.cuh"
#include "select/hopper_slice.cuh"

namespace vegas_ops::selection::hopper {

constexpr int kBins = 256;  // of an interval; the last counts what lies above
constexpr int kAbove = kBins - 1;
constexpr uint32_t kOverflow = 1u << 23;  // in that count: a warp had no room; more than a list has scores
constexpr int kSampleBits = 10;
constexpr int kSampleBins = 1 << kSampleBits;
constexpr int kBracketThreads = 128;   // that look at the sample
constexpr int kRanked = kThreads / 4;  // keys that are compared one with another
constexpr int kMostTurns = 36;
constexpr int kFewTurns = 18;                  // two CTAs fit into a multiprocessor, in clusters of up to 8
constexpr int kMostListed = 640;               // scores inside the bracket, by warp; twice as many with more turns
constexpr uint32_t kLowestKey = 0x00800000u;   // of -FLT_MAX
constexpr uint32_t kHighestKey = 0xff800000u;  // of +inf

// How a launch divides lists: CTAs of a cluster, a power of two by its exponent, and how often the warps of a CTA read
// a row each.
struct Shape {
  int32_t cluster_bits;
  int32_t turns;
};

struct Interval {  // of keys, both ends excluded
  uint32_t low;
  uint32_t high;
};

// The bin of the rank-th key.
struct Found {
  uint32_t bin;
  uint32_t rank;     // within it
  uint32_t count;    // of its keys
  uint32_t earlier;  // of these, in earlier slices
};

struct Listed {
  uint32_t score;  // its bits, later its key
  uint32_t mask;   // the word and the bit that stand for it
};

struct alignas(16) Shared {
  uint32_t sample[kSampleBins];
  uint32_t sample_keys[kThreads];
  uint32_t histogram[kBins];
  uint32_t ranked[kRanked];              // received: keys of the threshold's bin
  uint32_t received_least[kMaxCluster];  // received, where these are too many: the extremes of every CTA's
  uint32_t received_most[kMaxCluster];
  uint8_t row_totals[kMostTurns * kWarps];
  uint32_t warp_least[kBracketThreads / 32];
  uint32_t warp_most[kBracketThreads / 32];
  uint32_t warp_sums[kBracketThreads / 32];
  Mailbox count_mail;
  Mailbox key_mail;
  Quota quota;
  Slice slice;
  Found found;
  Interval interval;
  uint32_t low_bin;
  uint32_t high_bin;
  int32_t before;  // keys of the sample above the one, and through the other
  int32_t through;
  uint32_t total;
  uint32_t overflows;
  uint32_t better;  // tokens above the threshold in earlier slices, and equal to it
  uint32_t equal;
  uint32_t least;
  uint32_t most;
  uint32_t num_own;
  uint32_t threshold;
  uint32_t ties;
  uint32_t all_equal;
};

// Then, by the launch's shape:
struct Arrays {
  uint32_t* histograms;  // (ctas, kBins), received
  uint4* above;          // (rows,): bit l of word i for place 4 l + i of a row; later of the chosen
  uint4* equal;          // (rows,): of scores inside an interval of one key, later of those equal to the threshold
  Listed* listed;        // (kWarps, most_listed)
  uint16_t* gathered;    // in the same memory: places of the chosen

  __device__ __forceinline__ Arrays(void* from, const Shape& shape) {
    histograms = static_cast<uint32_t*>(from);
    above = reinterpret_cast<uint4*>(histograms + (kBins << shape.cluster_bits));
    equal = above + kWarps * shape.turns;
    listed = reinterpret_cast<Listed*>(equal + kWarps * shape.turns);
    gathered = reinterpret_cast<uint16_t*>(listed);
  }
};

__host__ __device__ constexpr int most_listed(int turns) {
  const int most = turns > kFewTurns ? 2 * kMostListed : kMostListed;
  return 128 * turns < most ? 128 * turns : most;
}

__host__ __device__ constexpr int shared_bytes(const Shape& shape) {
  const int listed = kWarps * most_listed(shape.turns) * static_cast<int>(sizeof(Listed));
  const int gathered = kWarps * 128 * shape.turns * 2;
  return static_cast<int>(sizeof(Shared)) + (kBins * 4 << shape.cluster_bits) + shape.turns * kWarps * 32 +
         (listed > gathered ? listed : gathered);
}

// ---- keys and bins --------------------------------------------------------------------------------------------------

// The score above which keys > `key` begin: that of the key, where there is one.
__device__ __forceinline__ float score_below(uint32_t key) {
  return __uint_as_float(key_bits(key - (key == 0x7fffffffu)));
}
__device__ __forceinline__ float score_at(uint32_t key) { return __uint_as_float(key_bits(key)); }

__device__ __forceinline__ uint32_t key_of_selectable(uint32_t bits) {
  return bits << 1 == 0 ? 0x80000000u : bits ^ (static_cast<int32_t>(bits) >> 31 | 0x80000000u);
}

// The least shift that maps 0 ... width to bins 0 ... most, for most = 2^bits - 1 or less.
__device__ __forceinline__ int bin_shift(uint32_t width, uint32_t most, int bits) {
  const int shift = larger(32 - bits - __clz(width), 0);
  return width >> shift > most ? shift + 1 : shift;
}

__device__ __forceinline__ int bin_shift(const Interval& interval) {
  return bin_shift(interval.high - interval.low - 2, kAbove - 1, 8);
}

__device__ __forceinline__ Interval bin_of(const Interval& interval, uint32_t bin) {
  const int shift = bin_shift(interval);
  const uint32_t low = interval.low + (bin << shift);
  return {low, interval.high - low > 1u << shift ? low + (1u << shift) + 1 : interval.high};
}

__device__ __forceinline__ bool is_one_key(const Interval& interval) { return interval.high - interval.low == 2; }

__device__ __forceinline__ uint32_t popc(const uint4& words) {
  return __popc(words.x) + __popc(words.y) + __popc(words.z) + __popc(words.w);
}

// ---- the bracket ----------------------------------------------------------------------------------------------------

// The key of a thread's sample, the last of a group somewhere in the thread's share of the list; 0 where that is not
// ranked.
template <int kReach>
__device__ __forceinline__ uint32_t sample_key(const Slice& slice, const float* scores) {
  const uint32_t jitter = threadIdx.x * 0x9e3779b1u >> kThreadBits;
  const uint32_t count = slice.end - slice.begin;
  const int32_t drawn = slice.begin + __umulhi(threadIdx.x << (32 - kThreadBits) | jitter, count);
  const int32_t group = drawn - ((drawn - slice.first) & 3), place = group + 3;
  constexpr int kEarlier = kReach > 7 ? 8 : kReach > 3 ? 4 : 0;
  if (place < slice.begin || place >= smaller(slice.end, slice.length) || group < kEarlier) return 0;
  const float4* const at = reinterpret_cast<const float4*>(scores + group);
  const float itself = scores[place - slice.after];
  float most = Tails(at[0]).of[kReach < 3 ? kReach : 3];
  if (kReach > 3) most = fmaxf(most, Tails(at[-1]).of[kReach < 7 ? kReach - 4 : 3]);
  if (kReach > 7) most = fmaxf(most, at[-2].w);
  return itself > negative_infinity() ? order_key(__float_as_uint(most)) : 0;
}

__device__ __forceinline__ void synchronize_bracket() {
  asm volatile("bar.sync 1, %0;" ::"n"(kBracketThreads) : "memory");
}

// Keys of the sample between which the threshold of a list probably lies: ranks three deviations around the expected
// one, which is `share` of the sample. By kBracketThreads threads, into shared.interval.
__device__ __forceinline__ void bracket(Shared& shared, float share) {
  const int lane = lane_of_thread(), warp = warp_of_thread();
  const float expected = share * kThreads, variance = expected * (1 - share) + 1e-6f;
  const float margin = 3 * variance * rsqrtf(variance) + 2;
  const int32_t upper = static_cast<int32_t>(expected - margin);
  const int32_t lower = static_cast<int32_t>(expected + margin) + 1;
  const uint4 own = reinterpret_cast<const uint4*>(shared.sample_keys)[threadIdx.x];
  const uint32_t keys[4] = {own.x, own.y, own.z, own.w};
  uint32_t least = kAllLanes, most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) least = min(least, keys[i] ? keys[i] : kAllLanes), most = max(most, keys[i]);
  least = __reduce_min_sync(kAllLanes, least);
  most = __reduce_max_sync(kAllLanes, most);
  if (lane == 0) shared.warp_least[warp] = least, shared.warp_most[warp] = most;
  if (threadIdx.x == 0) shared.interval = {kLowestKey - 1, kHighestKey + 1};
  synchronize_bracket();
  least = __reduce_min_sync(kAllLanes, shared.warp_least[lane & 3]);
  most = __reduce_max_sync(kAllLanes, shared.warp_most[lane & 3]);
  if (most == 0) return;
  const bool has_high = upper > 0;
  int32_t above = 0;  // keys of the sample that a closer look leaves aside
  for (int look = 0;; ++look) {
    // At first the scores nearest to zero, 12 octaves below the largest, pass for zero: half of all keys are smaller.
    constexpr int32_t kOctaves = 12 << 23;
    const int32_t from = static_cast<int32_t>(least ^ 0x80000000u), to = static_cast<int32_t>(most ^ 0x80000000u);
    const int32_t zero = look == 0 ? larger(larger(to, -from) - kOctaves, 0) : 0;
    const auto position = [&](uint32_t key) {
      const int32_t value = static_cast<int32_t>(key ^ 0x80000000u);
      return value > 0 ? larger(value - zero, 0) : smaller(value + zero, 0);
    };
    const uint32_t origin = position(least);
    const int shift = bin_shift(position(most) - origin, kSampleBins - 1, kSampleBits);
    uint32_t bins[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool counts = keys[i] >= least && keys[i] <= most;
      bins[i] = counts ? position(keys[i]) - origin >> shift : kAllLanes;
      if (counts) atomicAdd(&shared.sample[bins[i]], 1u);
    }
    synchronize_bracket();
    constexpr int kOwn = kSampleBins / kBracketThreads;
    uint32_t counts[kOwn], sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      uint4& four = reinterpret_cast<uint4*>(shared.sample)[(kSampleBins - kOwn * threadIdx.x - i) / 4 - 1];
      counts[i] = four.w, counts[i + 1] = four.z, counts[i + 2] = four.y, counts[i + 3] = four.x;
      four = make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum += counts[i];
    const uint32_t inclusive = warp_scan(sum);
    if (lane == 31) shared.warp_sums[warp] = inclusive;
    synchronize_bracket();
    const uint32_t warp_sum = shared.warp_sums[lane & 3];
    int32_t through = above + inclusive - sum + __reduce_add_sync(kAllLanes, lane < warp ? warp_sum : 0);
    const int32_t all = above + __reduce_add_sync(kAllLanes, lane < 4 ? warp_sum : 0);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int32_t before = through;
      through += counts[i];
      const uint32_t bin = kSampleBins - 1 - kOwn * threadIdx.x - i;
      if (before < upper && upper <= through) shared.high_bin = bin, shared.before = before, shared.interval.high = 0;
      if (before < lower && lower <= through)
        shared.low_bin = bin, shared.through = through, shared.interval.low = kAllLanes;
    }
    synchronize_bracket();
    const bool has_low = lower <= all;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (has_high && bins[i] == shared.high_bin) atomicMax(&shared.interval.high, keys[i]);
      if (has_low && bins[i] == shared.low_bin) atomicMin(&shared.interval.low, keys[i]);
    }
    const int32_t last = has_low ? shared.through : all;
    above = has_high ? shared.before : above;
    // Where few bins hold nearly all, as with an outlier, these deserve a closer look.
    if (last - above <= lower - larger(upper, 0) + kThreads / 16 || look == 2) break;
    synchronize_bracket();
    if (has_high) most = shared.interval.high;
    if (has_low) least = shared.interval.low;
    if (most == least) break;
    synchronize_bracket();
  }
}

}  // namespace vegas_ops::selection::hopper
