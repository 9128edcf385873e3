// What the CTAs of a list share, and the interval of scores that a sample says holds its threshold.
#pragma once

#include <cuda_runtime.h>
#include <float.h>

#include "common/warp_scan.cuh"
#include "select/hopper_exchange.cuh"
#include "select/hopper_slice.cuh"

namespace vegas_ops::selection::hopper {

constexpr int kBins = 256;  // of an interval; the last counts what lies above
constexpr int kAbove = kBins - 1;
constexpr int kCountBits = 17;  // of a count, for places of a slice; those above it count listed scores
constexpr uint32_t kCounted = (1u << kCountBits) - 1;
constexpr uint32_t kOverflow = 1u << kCountBits;  // added to the last bin: a CTA had no room for its scores
constexpr int kSamples = 512;                     // no more than threads
constexpr int kSampleBits = 10;
constexpr int kSampleBins = 1 << kSampleBits;
constexpr int kBracketThreads = 256;           // that look at the sample
constexpr int kRanked = 256;                   // keys that are compared one with another, at most a quarter of threads
constexpr int kRecent = kRow / 2;              // listed scores that are found by their places, by warp
constexpr int kManyEqual = 4;                  // keys of the sample: an end of the bracket is probably the threshold
constexpr int kMostMisses = 3;                 // brackets that the sample gives
constexpr uint32_t kLowestKey = 0x00800000u;   // of -FLT_MAX
constexpr uint32_t kHighestKey = 0xff800000u;  // of +inf

// How a launch divides lists: CTAs of a cluster, a power of two by its exponent, and how often the warps of a CTA read
// a row each.
struct Shape {
  int32_t cluster_bits;
  int32_t turns;
  int32_t warps;
};

struct Interval {  // of keys, both ends excluded
  uint32_t low;
  uint32_t high;
};

// The bin of the rank-th place.
struct Found {
  uint32_t bin;
  uint32_t rank;     // within it
  uint32_t count;    // of its places
  uint32_t earlier;  // of these, in earlier slices
  uint32_t listed;   // scores whose places they are
  uint32_t earlier_listed;
};

struct Listed {
  uint32_t score;  // its bits, later its key
  uint32_t bit;    // that stands for it, and 2^20 times the places of whose windows it is the maximum
};
constexpr int kWeightShift = 20;

struct alignas(16) Shared {
  uint32_t sample[kSampleBins];
  uint32_t sample_keys[kSamples];
  uint32_t histogram[kBins];
  uint2 own[kRanked];                    // keys of the threshold's bin, and how many places each has
  uint2 ranked[kRanked];                 // received: those of all CTAs
  uint32_t received_least[kMaxCluster];  // received, where these are too many: the extremes of every CTA's
  uint32_t received_most[kMaxCluster];
  uint32_t warp_least[kWarps];
  uint32_t warp_most[kWarps];
  uint32_t warp_sums[kWarps];
  int32_t num_listed[kWarps];  // scores inside the interval, by warp
  Mailbox count_mail;
  Mailbox key_mail;
  Quota quota;
  Slice slice;
  Found found;
  Interval interval;  // found
  Interval bracket;
  bool close;  // few keys of the sample are between its ends
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
  uint32_t num_chosen;
  uint32_t threshold;
  uint32_t ties;
  uint32_t all_equal;
};

// Scores inside the bracket, by warp: two rows of sorted scores, or as many as there is memory for.
__host__ __device__ constexpr int most_listed(const Shape& shape) {
  const int most = shape.cluster_bits < 4 ? 2 * kRow : 480;
  return kRow * shape.turns < most ? kRow * shape.turns : most;
}

// Room for the words of a slice, that before, and one that is read but does not count after.
__host__ __device__ constexpr int most_words(const Shape& shape) { return kRowWords * shape.warps * shape.turns + 8; }

// Then, by the launch's shape:
struct Arrays {
  uint32_t* histograms;  // (ctas, kBins), received
  uint32_t* inside;      // (words,): scores inside the interval
  uint32_t* above;       // scores above the interval, later the threshold
  uint32_t* selectable;  // scores that are
  uint32_t* ranked;      // places that are, and selectable
  uint32_t* open;        // of these, those with no score above the interval in their window
  uint32_t* equal;       // in the same memory: scores equal to the threshold
  Listed* recent;        // (warps, kRecent): of the listed, the last of those that share a slot
  Listed* listed;        // (warps, most_listed)
  uint16_t* gathered;    // in the memory of these two: places of the chosen

  __device__ __forceinline__ Arrays(void* from, const Shape& shape) {
    histograms = static_cast<uint32_t*>(from);
    inside = histograms + (kBins << shape.cluster_bits);
    above = inside + most_words(shape);
    selectable = above + most_words(shape);
    ranked = selectable + most_words(shape);
    open = equal = ranked + most_words(shape);
    recent = reinterpret_cast<Listed*>(open + most_words(shape));
    listed = recent + kRecent * shape.warps;
    gathered = reinterpret_cast<uint16_t*>(recent);
  }
};

__host__ __device__ constexpr int shared_bytes(const Shape& shape) {
  const int listed = shape.warps * (kRecent + most_listed(shape)) * static_cast<int>(sizeof(Listed));
  const int gathered = shape.warps * shape.turns * kRow * 2;
  return static_cast<int>(sizeof(Shared)) + (kBins * 4 << shape.cluster_bits) + 5 * 4 * most_words(shape) +
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

// ---- the bracket ----------------------------------------------------------------------------------------------------

// Windows of the sample, in two steps, so that others are loaded meanwhile: somewhere in each one's share of the list,
// at the last place of a group of 4 or 8. Two lanes share a window of several scores, for what one load asks of a line
// of memory is asked once.
template <bool kPooled>
struct Sample {
  static constexpr int kLanes = kPooled ? 2 : 1;
  static constexpr int kMost = kLanes;  // windows of a thread, of which there are kSamples or more
  int32_t place[kMost];                 // -1: none
  float4 group[kMost];                  // the last 4 scores of the window, and in the other lane those before

  __device__ __forceinline__ static uint32_t window(int i) { return (threadIdx.x + i * threads()) / kLanes; }
  __device__ __forceinline__ static int part() { return threadIdx.x % kLanes; }

  __device__ __forceinline__ static int32_t draw(const Slice& slice, uint32_t window) {
    if (window >= kSamples) return -1;
    const uint32_t jitter = window * 0x9e3779b1u >> 9, count = slice.end - slice.begin;
    const int32_t drawn = slice.begin + __umulhi(window << 23 | jitter, count);
    constexpr int kLast = kPooled ? 7 : 3;  // most windows are in a sector of memory
    const int32_t place = drawn - ((drawn - slice.first) & kLast) + kLast;
    const bool whole = place >= slice.from + (slice.reach | kLast);
    return place >= slice.begin && place < smaller(slice.end, slice.to) && whole ? place : -1;
  }

  __device__ __forceinline__ float4 load_group(const Slice& slice, int i, int which) const {
    return *reinterpret_cast<const float4*>(slice.at(place[i] - 3 - 4 * which));
  }

  __device__ __forceinline__ void load(const Slice& slice) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      place[i] = draw(slice, window(i));
      if (place[i] >= 0 && 4 * part() <= slice.reach) group[i] = load_group(slice, i, part());
    }
  }

  // 0 where the place is not ranked, and in the other lane.
  __device__ __forceinline__ uint32_t key(const Slice& slice, int i) const {
    float most = negative_infinity();
    const auto add = [&](const float4& x, int which) {
      const float scores[4] = {x.w, x.z, x.y, x.x};
#pragma unroll
      for (int j = 0; j < (kPooled ? 4 : 1); ++j) {
        if (4 * which + j <= slice.reach) most = fmaxf(most, scores[j]);
      }
    };
    if (place[i] >= 0) add(group[i], part());
    if (kPooled) {
#pragma unroll 1
      for (int which = kLanes + part(); place[i] >= 0 && 4 * which <= slice.reach; which += kLanes) {
        add(load_group(slice, i, which), which);
      }
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
    }
    if (place[i] < 0 || part() != 0) return 0;
    const float itself = slice.after == 0 ? group[i].w : *slice.at(place[i] - slice.after);
    return itself > negative_infinity() ? order_key(__float_as_uint(most)) : 0;
  }
};

// Ranks in the sample around that of the threshold: four deviations better, where that is one, and worse.
struct Margins {
  int32_t upper;
  int32_t lower;

  // For a threshold of which `share` of the sample is expected to be better.
  __device__ __forceinline__ explicit Margins(float share, int32_t samples = kSamples) {
    const float expected = share * samples, variance = expected * (1 - share) + 1e-6f;
    const float margin = 4 * variance * rsqrtf(variance) + 2;
    upper = static_cast<int32_t>(expected - margin);
    lower = static_cast<int32_t>(expected + margin) + 1;
  }
};

// Keys of the sample between which the threshold of a list probably lies, by one look at bins of equal width. If many
// lie between them, as of heavy tails, `close` says that others are wanted. One warp works, all meet at the barriers.
__device__ __forceinline__ void bracket_by_value(Shared& shared, const Margins& margins) {
  constexpr int kValueBins = 256, kOwnBins = kValueBins / 32;
  const int lane = lane_of_thread();
  const uint32_t own = threadIdx.x < kSamples ? shared.sample_keys[threadIdx.x] : 0;
  const uint32_t least = __reduce_min_sync(kAllLanes, lane < warps() ? shared.warp_least[lane] : kAllLanes);
  const uint32_t most = __reduce_max_sync(kAllLanes, lane < warps() ? shared.warp_most[lane] : 0);
  const float low = fminf(score_at(least), FLT_MAX), high = fminf(score_at(most), FLT_MAX);
  const float width = fmaxf(high * (1.f / kValueBins) - low * (1.f / kValueBins), FLT_MIN);
  const float scale = fmaxf(fminf(__fdividef(1, width), FLT_MAX), FLT_MIN);
  constexpr float kUnit = 8388608;  // 2^23: a float's last bit counts 1 from here
  const auto bin_of_key = [&](uint32_t key) {
    const float at = fmaf(score_at(key) - low, scale, kUnit - .5f);
    return __float_as_uint(fminf(fmaxf(at, kUnit), kUnit + kValueBins - 1)) - __float_as_uint(kUnit);
  };
  if (own) atomicAdd(&shared.sample[bin_of_key(own)], 1u);
  __syncthreads();
  if (warp_of_thread() == 0) {
    uint32_t counts[kOwnBins];  // the best first
    int32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kOwnBins; i += 4) {
      uint4& four = reinterpret_cast<uint4*>(shared.sample)[(kValueBins - kOwnBins * lane - i) / 4 - 1];
      counts[i] = four.w, counts[i + 1] = four.z, counts[i + 2] = four.y, counts[i + 3] = four.x;
      sum += counts[i] + counts[i + 1] + counts[i + 2] + counts[i + 3];
      four = make_uint4(0, 0, 0, 0);
    }
    const int32_t inclusive = warp_scan(sum), all = __shfl_sync(kAllLanes, inclusive, 31);
    int32_t through = inclusive - sum, high_bin = -1, low_bin = -1, above = 0, last = 0;
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) {
      const int32_t before = through, bin = kValueBins - 1 - kOwnBins * lane - i;
      through += counts[i];
      if (before < margins.upper && margins.upper <= through) high_bin = bin, above = before;
      if (before < margins.lower && margins.lower <= through) low_bin = bin, last = through;
    }
    high_bin = __reduce_max_sync(kAllLanes, high_bin), above = __reduce_max_sync(kAllLanes, above);
    low_bin = __reduce_max_sync(kAllLanes, low_bin), last = __reduce_max_sync(kAllLanes, last);
    uint32_t best = 0, worst = kAllLanes;
#pragma unroll 4
    for (int i = lane; i < kSamples; i += 32) {
      const uint32_t key = shared.sample_keys[i];
      const int32_t bin = bin_of_key(key);
      if (key && bin == high_bin) best = max(best, key);
      if (key && bin == low_bin) worst = min(worst, key);
    }
    best = __reduce_max_sync(kAllLanes, best), worst = __reduce_min_sync(kAllLanes, worst);
    if (lane == 0) {
      const uint32_t from = low_bin >= 0 ? worst : kLowestKey - 1, to = high_bin >= 0 ? best : kHighestKey + 1;
      shared.bracket = {from - (from == to), to + (from == to)};
      const int32_t between = (low_bin >= 0 ? last : all) - above;
      shared.close = most == 0 || least == most || between <= margins.lower - larger(margins.upper, 0) + kSamples / 16;
    }
  }
  __syncthreads();
}

// Keys of the sample between which the threshold of a list probably lies: the first kBracketThreads threads work, and
// the result is theirs. All meet at the barriers, for racecheck loses count after those of a part of a CTA.
__device__ __forceinline__ Interval bracket(Shared& shared, const Margins& margins) {
  const int lane = lane_of_thread(), warp = warp_of_thread();
  const bool works = threadIdx.x < kBracketThreads;
  const int32_t upper = margins.upper, lower = margins.lower;
  constexpr int kOwnKeys = kSamples / kBracketThreads, kOwnBins = kSampleBins / kBracketThreads;
  uint32_t keys[kOwnKeys] = {};
  if (works) {
#pragma unroll
    for (int i = 0; i < kOwnKeys; ++i) keys[i] = shared.sample_keys[threadIdx.x + i * kBracketThreads];
  }
  uint32_t least = __reduce_min_sync(kAllLanes, lane < warps() ? shared.warp_least[lane] : kAllLanes);
  uint32_t most = __reduce_max_sync(kAllLanes, lane < warps() ? shared.warp_most[lane] : 0);
  if (most == 0) return {kLowestKey - 1, kHighestKey + 1};
  int32_t above = 0;  // keys of the sample that a closer look leaves aside
  for (int look = 0;; ++look) {
    uint32_t bins[kOwnKeys];
    if (works) {
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
#pragma unroll
      for (int i = 0; i < kOwnKeys; ++i) {
        const bool counts = keys[i] >= least && keys[i] <= most;
        bins[i] = counts ? position(keys[i]) - origin >> shift : kAllLanes;
        if (counts) atomicAdd(&shared.sample[bins[i]], 1u);
      }
    }
    __syncthreads();
    uint32_t counts[kOwnBins], sum = 0, inclusive = 0;
    if (works) {
      uint4& four = reinterpret_cast<uint4*>(shared.sample)[kBracketThreads - 1 - threadIdx.x];
      counts[0] = four.w, counts[1] = four.z, counts[2] = four.y, counts[3] = four.x;  // the best first
      four = make_uint4(0, 0, 0, 0);
      sum = counts[0] + counts[1] + counts[2] + counts[3], inclusive = warp_scan(sum);
      if (lane == 31) shared.warp_sums[warp] = inclusive;
    }
    __syncthreads();
    int32_t all = 0;
    if (works) {
      const uint32_t warp_sum = lane < kBracketThreads / 32 ? shared.warp_sums[lane] : 0;
      int32_t through = above + inclusive - sum + __reduce_add_sync(kAllLanes, lane < warp ? warp_sum : 0);
      all = above + __reduce_add_sync(kAllLanes, warp_sum);
#pragma unroll
      for (int i = 0; i < kOwnBins; ++i) {
        const int32_t before = through;
        through += counts[i];
        const uint32_t bin = kSampleBins - 1 - kOwnBins * threadIdx.x - i;
        if (before < upper && upper <= through) shared.high_bin = bin, shared.before = before, shared.interval.high = 0;
        if (before < lower && lower <= through)
          shared.low_bin = bin, shared.through = through, shared.interval.low = kAllLanes;
      }
    }
    __syncthreads();
    const bool has_low = lower <= all, has_high = upper > 0 && upper <= all;
    bool close = false;
    if (works) {
#pragma unroll
      for (int i = 0; i < kOwnKeys; ++i) {
        if (has_high && bins[i] == shared.high_bin) atomicMax(&shared.interval.high, keys[i]);
        if (has_low && bins[i] == shared.low_bin) atomicMin(&shared.interval.low, keys[i]);
      }
      const int32_t last = has_low ? shared.through : all;
      above = has_high ? shared.before : above;
      // Where few bins hold nearly all, as with an outlier, these deserve a closer look.
      close = last - above <= lower - larger(upper, 0) + kSamples / 16 || least == most;
    }
    const bool done = __syncthreads_or(close) || look == 2;
    const Interval found = {has_low ? shared.interval.low : kLowestKey - 1,
                            has_high ? shared.interval.high : kHighestKey + 1};
    if (done) return found.low == found.high ? Interval{found.low - 1, found.high + 1} : found;
    most = has_high ? found.high : most;
    least = has_low ? found.low : least;
  }
}

// Where fewer than `rank` places are above the low end of an interval: the next, from there to the key of the sample
// that is probably below the threshold, by what the counts of all places say. All threads of the CTA work.
__device__ __forceinline__ Interval bracket_below(const Shared& shared, uint32_t low, uint32_t rank) {
  const uint32_t own = threadIdx.x < kSamples ? shared.sample_keys[threadIdx.x] : 0, total = shared.total;
  const uint32_t key = own <= low ? own : 0;
  const int32_t left = shared.quota.end - shared.quota.begin - static_cast<int32_t>(total);
  const Margins margins(__fdividef(rank - total, larger(left, 1)), __syncthreads_count(key));
  uint32_t found = 0;  // the largest that `margins.lower` keys reach
#pragma unroll 1
  for (uint32_t bit = 1u << 31; bit; bit /= 2) {
    if (__syncthreads_count(key >= (found | bit)) >= margins.lower) found |= bit;
  }
  return {max(found - (found == low), kLowestKey - 1), low + 1};
}

}  // namespace vegas_ops::selection::hopper
