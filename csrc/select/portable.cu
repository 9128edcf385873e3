// topk_aggregate_logits and aggregate_logits on any GPU from sm_80.
//
// A list's threshold is found exactly by three radix digits of its scores' order-preserving keys, by
// counting alone: no candidate is ever stored, so ties and narrow rows cannot overflow anything. Many
// lists get one CTA each; of few, each is split over several CTAs, with one launch per digit in place
// of a barrier across CTAs. Integer counts are free of order, so results are identical on every run.
#include <cuda_runtime.h>

#include "common/backends.h"
#include "common/cuda_launch.h"
#include "common/status.h"
#include "common/warp_scan.cuh"
#include "select/scores.cuh"
#include "select/wave.h"

namespace vegas_ops {
namespace selection {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBinsPerThread = kBins / kThreads;
constexpr int kLastBins = 1024;  // of the third digit
constexpr int kReplicas = 4;     // of a histogram, by lane: equal digits in a warp collide less
constexpr int kReplicaStride = kBins + 8;
constexpr int kLoads = 4;    // groups of 4 scores that a thread loads before it looks at any
constexpr int kEmitted = 8;  // neighbouring scores of a thread when positions are written
static_assert(kBinsPerThread == 4, "a thread's bins are loaded as one uint4");
static_assert(kEmitted * kThreads < 1 << 16, "two counts of a tile share one integer");

// Split lists: CTAs for all of them together, and bounds on the parts of one.
constexpr int kSplitCtas = 512;
constexpr int kMaxParts = 32;
constexpr int kMinPart = 4096;                    // scores
constexpr int64_t kRowBytes = int64_t{64} << 20;  // of workspace for rows of scores, where that holds one

__host__ __device__ constexpr int parts_of(int64_t lists) {
  return kSplitCtas / lists < kMaxParts ? static_cast<int>(kSplitCtas / lists) : kMaxParts;
}

// What the launches of a split list leave for each other. Histograms are zero between calls.
struct SplitState {
  uint32_t histogram[2][kBins];
  uint32_t taken;
  uint32_t prefix[2];  // after the first and the second digit
  uint32_t rank[2];
  uint32_t unused[3];
};

struct Part {
  uint32_t histogram[kLastBins];
  uint32_t above;  // scores of the part that beat every key with the prefix
  uint32_t unused[3];
};

struct Shared {
  uint32_t histogram[kReplicas * kReplicaStride];
  uint32_t warp_sums[kWarps];
  uint32_t bin;
  uint32_t rank;
};

struct Row {
  const float* scores;
  int64_t list;
  int32_t request;
  bool scored;  // anything to be chosen by score
  bool vector;  // 16-byte loads
  Quota quota;
};

__device__ __forceinline__ Row row_of(const VegasSelectParams& p, const Wave& wave, int32_t index) {
  Row row;
  row.list = wave.first + index;
  const List list = list_at(p, row.list);
  const Planes planes = planes_of(p, list);
  row.request = list.request;
  row.quota = quota_of(p, list.request);
  row.scored = planes.rows > 0 && row.quota.free > 0;
  row.scores = wave.source ? wave.source + index * wave.stride : static_cast<const float*>(p.logits) + planes.offset;
  row.vector = aligned_to(row.scores, 0, 0, 16);
  return row;
}

// Exclusive sum over the CTA's threads; `total` is the sum of all.
__device__ __forceinline__ uint32_t block_scan(uint32_t value, Shared& shared, uint32_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t inclusive = warp_scan(value);
  if (lane == 31) shared.warp_sums[warp] = inclusive;
  __syncthreads();
  uint32_t before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const uint32_t sum = shared.warp_sums[w];
    before += w < warp ? sum : 0;
    total += sum;
  }
  __syncthreads();
  return before + inclusive - value;
}

// Keys of the 4 scores from `position` on, a multiple of 4; 0 outside [begin, end).
__device__ __forceinline__ void load_keys(const Row& row, int32_t position, int32_t begin, int32_t end,
                                          uint32_t (&keys)[4]) {
  if (row.vector && position + 4 <= end) {
    const uint4 bits = *reinterpret_cast<const uint4*>(row.scores + position);
    keys[0] = bits.x, keys[1] = bits.y, keys[2] = bits.z, keys[3] = bits.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool inside = position + i >= begin && position + i < end;
      keys[i] = inside ? __float_as_uint(row.scores[position + i]) : 0xffffffffu;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) keys[i] = position + i >= begin ? order_key(keys[i]) : 0;
}

__device__ __forceinline__ void clear_histogram(Shared& shared) {
  for (int i = threadIdx.x; i < kReplicas * kReplicaStride; i += kThreads) shared.histogram[i] = 0;
}

// Counts the `digit`s of the keys in [from, end) that begin with `prefix`; returns how many keys of this
// thread beat all of those. `from` is a multiple of 4, and scores before `begin` do not count.
__device__ __forceinline__ uint32_t add_to_histogram(const Row& row, int32_t from, int32_t begin, int32_t end,
                                                     int digit, uint32_t prefix, Shared& shared) {
  uint32_t* histogram = shared.histogram + threadIdx.x % kReplicas * kReplicaStride;
  uint32_t above = 0;
  // Bits of the digits before this one; none for the first.
  const uint32_t mask = digit == 0 ? 0 : digit == 1 ? 0xffe00000u : 0xfffffc00u;
  for (int32_t at = from + 4 * threadIdx.x; at < end; at += kLoads * 4 * kThreads) {
    uint32_t keys[kLoads][4];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) load_keys(row, at + load * 4 * kThreads, begin, end, keys[load]);
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t key = keys[load][i];
        if (key != 0 && (key & mask) == prefix) atomicAdd(histogram + digit_of(key, digit), 1u);
        above += (key & mask) > prefix;
      }
    }
  }
  return above;
}

__device__ __forceinline__ uint32_t bin_count(const Shared& shared, int bin) {
  uint32_t count = 0;
#pragma unroll
  for (int replica = 0; replica < kReplicas; ++replica) count += shared.histogram[replica * kReplicaStride + bin];
  return count;
}

// A thread's bins, best first; threads beyond the histogram have none.
__device__ __forceinline__ int top_bin(int bins) { return bins - 1 - kBinsPerThread * static_cast<int>(threadIdx.x); }

__device__ __forceinline__ void shared_counts(const Shared& shared, int bins, uint32_t (&counts)[kBinsPerThread]) {
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) counts[i] = top_bin(bins) >= 0 ? bin_count(shared, top_bin(bins) - i) : 0;
}

__device__ __forceinline__ void global_counts(const uint32_t* histogram, int bins, uint32_t (&counts)[kBinsPerThread]) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (top_bin(bins) >= 0) v = *reinterpret_cast<const uint4*>(histogram + top_bin(bins) - 3);
  counts[0] = v.w, counts[1] = v.z, counts[2] = v.y, counts[3] = v.x;
}

struct Found {
  uint32_t bin;
  uint32_t rank;   // among the keys of that bin
  uint32_t total;  // of all bins
};

// The bin that holds the rank-th largest key, or the smallest key where there are fewer. Without any
// key, `total` is 0 and the rest means nothing.
__device__ __forceinline__ Found locate(const uint32_t (&counts)[kBinsPerThread], int bins, uint32_t rank,
                                        Shared& shared) {
  Found found;
  const uint32_t sum = counts[0] + counts[1] + counts[2] + counts[3];
  const uint32_t before = block_scan(sum, shared, found.total);
  rank = min(rank, found.total);
  if (before < rank && rank <= before + sum) {
    uint32_t left = rank - before;
    bool done = false;
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) {
      if (!done && left <= counts[i]) {
        shared.bin = top_bin(bins) - i;
        shared.rank = left;
        done = true;
      }
      if (!done) left -= counts[i];
    }
  }
  __syncthreads();
  found.bin = shared.bin;
  found.rank = shared.rank;
  return found;
}

// Writes the positions in [from, end) whose keys beat `threshold`, and those equal to it as long as fewer
// than `ties` came before: in ascending order, after `better` and `equal` of them in earlier parts.
__device__ __forceinline__ void emit(const VegasSelectParams& p, const Row& row, int32_t from, int32_t end,
                                     uint32_t threshold, uint32_t ties, uint32_t better, uint32_t equal, int32_t* out,
                                     Shared& shared) {
  for (int32_t tile = from; tile < end; tile += kEmitted * kThreads) {
    const int32_t position = tile + kEmitted * threadIdx.x;
    uint32_t above_mask = 0, equal_mask = 0;
#pragma unroll
    for (int group = 0; group < kEmitted; group += 4) {
      uint32_t keys[4];
      load_keys(row, position + group, row.quota.begin, end, keys);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        above_mask |= static_cast<uint32_t>(keys[i] > threshold) << (group + i);
        equal_mask |= static_cast<uint32_t>(keys[i] == threshold) << (group + i);
      }
    }
    uint32_t total;
    const uint32_t before = block_scan(__popc(above_mask) | __popc(equal_mask) << 16, shared, total);
    uint32_t better_before = better + (before & 0xffff), equal_before = equal + (before >> 16);
    for (uint32_t chosen = above_mask | equal_mask; chosen; chosen &= chosen - 1) {
      const int bit = __ffs(chosen) - 1;
      const bool is_equal = equal_mask >> bit & 1;
      if (!is_equal || equal_before < ties) {
        out[better_before + min(equal_before, ties)] = output_of(p, row.request, position + bit);
      }
      better_before += !is_equal;
      equal_before += is_equal;
    }
    better += total & 0xffff;
    equal += total >> 16;
  }
}

// Forced tokens, padding and the length.
__device__ __forceinline__ void finish(const VegasSelectParams& p, const Row& row, uint32_t taken) {
  int32_t* out = p.indices + row.list * p.max_k;
  const Quota& quota = row.quota;
  const int32_t chosen = quota.head + static_cast<int32_t>(taken), count = chosen + quota.tail;
  for (int32_t i = threadIdx.x; i < quota.head; i += kThreads) out[i] = output_of(p, row.request, i);
  for (int32_t i = threadIdx.x; i < quota.tail; i += kThreads) {
    out[chosen + i] = output_of(p, row.request, quota.end + i);
  }
  for (int32_t i = count + threadIdx.x; i < p.max_k; i += kThreads) out[i] = -1;
  if (threadIdx.x == 0) p.topk_length[row.list] = count;
}

// ---- many lists: one CTA each -------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 2)
    select_kernel(const __grid_constant__ VegasSelectParams p, const Wave wave) {
  __shared__ Shared shared;
  const Row row = row_of(p, wave, blockIdx.x);
  uint32_t taken = 0;
  if (row.scored) {
    const int32_t from = row.quota.begin & ~7;
    uint32_t prefix = 0, rank = row.quota.free;
    for (int digit = 0; digit < kDigits; ++digit) {
      const int bins = digit == 2 ? kLastBins : kBins;
      clear_histogram(shared);
      __syncthreads();
      add_to_histogram(row, from, row.quota.begin, row.quota.end, digit, prefix, shared);
      __syncthreads();
      uint32_t counts[kBinsPerThread];
      shared_counts(shared, bins, counts);
      const Found found = locate(counts, bins, rank, shared);
      if (digit == 0) taken = min(rank, found.total);
      if (taken == 0) break;
      prefix |= found.bin << digit_shift(digit);
      rank = found.rank;
    }
    if (taken) {
      int32_t* out = p.indices + row.list * p.max_k + row.quota.head;
      emit(p, row, from, row.quota.end, prefix, rank, 0, 0, out, shared);
    }
  }
  finish(p, row, taken);
}

// ---- few lists: several CTAs each ---------------------------------------------------------------

struct Split {
  SplitState* states;  // (lists,)
  Part* parts;         // (lists, wave.ctas)
};

struct Range {
  int32_t from;
  int32_t end;
  int32_t used;  // parts that are not empty
};

__device__ __forceinline__ Range range_of(const Quota& quota, int32_t parts, int32_t part) {
  const int32_t origin = quota.begin & ~7, count = quota.end - origin;
  const int32_t size = larger((count + parts - 1) / parts + 7 & ~7, kMinPart);
  const int64_t from = origin + static_cast<int64_t>(part) * size;
  Range range;
  range.used = (count + size - 1) / size;
  range.from = from < quota.end ? static_cast<int32_t>(from) : quota.end;
  range.end = from + size < quota.end ? static_cast<int32_t>(from + size) : quota.end;
  return range;
}

// Launched once per digit: settles the digit before, then counts this one.
__global__ void __launch_bounds__(kThreads, 2)
    split_count_kernel(const __grid_constant__ VegasSelectParams p, const Wave wave, const Split split, int digit) {
  __shared__ Shared shared;
  const int32_t index = blockIdx.x / wave.ctas, part = blockIdx.x % wave.ctas;
  const Row row = row_of(p, wave, index);
  if (!row.scored) return;
  const Range range = range_of(row.quota, wave.ctas, part);
  if (part >= range.used) return;
  SplitState& state = split.states[index];

  uint32_t prefix = 0;
  if (digit > 0) {
    if (digit == 2 && state.taken == 0) return;
    const uint32_t rank = digit == 1 ? row.quota.free : state.rank[0];
    if (digit == 2) prefix = state.prefix[0];
    uint32_t counts[kBinsPerThread];
    global_counts(state.histogram[digit - 1], kBins, counts);
    const Found found = locate(counts, kBins, rank, shared);
    prefix |= found.bin << digit_shift(digit - 1);
    if (part == 0 && threadIdx.x == 0) {
      if (digit == 1) state.taken = min(rank, found.total);
      state.prefix[digit - 1] = prefix;
      state.rank[digit - 1] = found.rank;
    }
    if (found.total == 0) return;
  }

  clear_histogram(shared);
  __syncthreads();
  const uint32_t mine = add_to_histogram(row, range.from, row.quota.begin, range.end, digit, prefix, shared);
  __syncthreads();
  if (digit < 2) {
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
      const uint32_t count = bin_count(shared, bin);
      if (count) atomicAdd(&state.histogram[digit][bin], count);
    }
  } else {
    Part& result = split.parts[index * wave.ctas + part];
    for (int bin = threadIdx.x; bin < kLastBins; bin += kThreads) result.histogram[bin] = bin_count(shared, bin);
    uint32_t above;
    block_scan(mine, shared, above);
    if (threadIdx.x == 0) result.above = above;
    if (part == 0) {
      for (int bin = threadIdx.x; bin < kBins; bin += kThreads) state.histogram[0][bin] = 0;
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    split_emit_kernel(const __grid_constant__ VegasSelectParams p, const Wave wave, const Split split) {
  __shared__ Shared shared;
  const int32_t index = blockIdx.x / wave.ctas, part = blockIdx.x % wave.ctas;
  const Row row = row_of(p, wave, index);
  uint32_t taken = 0;
  if (row.scored) {
    const Range range = range_of(row.quota, wave.ctas, part);
    if (part >= range.used) return;
    SplitState& state = split.states[index];
    taken = state.taken;
    if (taken) {
      // Counts of all parts, and of those before this one.
      uint32_t counts[kBinsPerThread] = {}, earlier[kBinsPerThread] = {};
      const Part* parts = split.parts + index * wave.ctas;
#pragma unroll 8
      for (int32_t other = 0; other < range.used; ++other) {
        uint32_t theirs[kBinsPerThread];
        global_counts(parts[other].histogram, kLastBins, theirs);
#pragma unroll
        for (int i = 0; i < kBinsPerThread; ++i) {
          counts[i] += theirs[i];
          earlier[i] += other < part ? theirs[i] : 0;
        }
      }
      const Found found = locate(counts, kLastBins, state.rank[1], shared);
      uint32_t better = threadIdx.x < part ? parts[threadIdx.x].above : 0, equal = 0;
#pragma unroll
      for (int i = 0; i < kBinsPerThread; ++i) {
        const int bin = top_bin(kLastBins) - i;
        if (bin > static_cast<int>(found.bin)) better += earlier[i];
        if (bin == static_cast<int>(found.bin)) equal += earlier[i];
      }
      uint32_t all_better, all_equal;
      block_scan(better, shared, all_better);
      block_scan(equal, shared, all_equal);
      int32_t* out = p.indices + row.list * p.max_k + row.quota.head;
      emit(p, row, range.from, range.end, state.prefix[1] | found.bin, found.rank, all_better, all_equal, out, shared);
    }
    if (part == 0) {
      for (int bin = threadIdx.x; bin < kBins; bin += kThreads) state.histogram[1][bin] = 0;
    }
  }
  if (part == 0) finish(p, row, taken);
}

// ---- launches -----------------------------------------------------------------------------------

// A list is split in two at least, so that half as many states as CTAs suffice.
constexpr size_t kStateBytes = kSplitCtas / 2 * sizeof(SplitState) + kSplitCtas * sizeof(Part);
static_assert(kStateBytes % 256 == 0, "rows of scores follow, read 16 bytes at a time");

int64_t row_stride(int32_t max_seqlen_k) { return (int64_t{max_seqlen_k} + 7) / 8 * 8; }

// CTAs per list of a kernel that walks over tiles: enough for a GPU, whatever the bound on lengths.
int ctas_per_list(int64_t lists, int32_t max_seqlen_k) {
  constexpr int64_t kEnough = 1024;
  const int64_t tiles = (int64_t{max_seqlen_k} + kTile - 1) / kTile, share = (kEnough + lists - 1) / lists;
  return static_cast<int>(tiles < share ? tiles : share);
}

// `dependent`: as a programmatic dependent launch. Of bf16 dumps a multiprocessor takes four CTAs, with fewer registers
// each, where all run at once then; where they take turns, three are faster.
cudaError_t launch_sums(const VegasSelectParams& p, Wave wave, float* rows, bool dependent, cudaStream_t stream) {
  int num_sms;
  if (const cudaError_t error = num_multiprocessors(&num_sms)) return error;
  wave.ctas = ctas_per_list(wave.lists, p.max_seqlen_k);
  const unsigned grid = static_cast<unsigned>(wave.lists) * wave.ctas;
  const bool four = grid > 3u * num_sms && grid <= 4u * num_sms;
  void (*const kernel)(VegasSelectParams, Wave, float*) = p.logits_dtype == VEGAS_FLOAT32 ? sum_kernel<float, 3>
                                                          : four                          ? sum_kernel<uint16_t, 4>
                                                                                          : sum_kernel<uint16_t, 3>;
  if (dependent) return launch_dependent(kernel, {grid, kScoreThreads}, stream, p, wave, rows);
  kernel<<<grid, kScoreThreads, 0, stream>>>(p, wave, rows);
  return cudaSuccess;
}

void launch_pool(const VegasSelectParams& p, Wave wave, float* rows, cudaStream_t stream) {
  wave.ctas = ctas_per_list(wave.lists, p.max_seqlen_k);
  pool_kernel<<<static_cast<unsigned>(wave.lists) * wave.ctas, kScoreThreads, 0, stream>>>(p, wave, rows);
}

cudaError_t launch_select(const VegasSelectParams& p, const Wave& given, cudaStream_t stream) {
  Wave wave = given;
  wave.ctas = parts_of(wave.lists);
  if (wave.ctas < 2 || p.max_seqlen_k <= kMinPart) {
    select_kernel<<<wave.lists, kThreads, 0, stream>>>(p, wave);
    return cudaSuccess;
  }
  Split split;
  split.states = static_cast<SplitState*>(p.workspace);
  split.parts = reinterpret_cast<Part*>(split.states + kSplitCtas / 2);
  const unsigned grid = static_cast<unsigned>(wave.lists) * wave.ctas;
  for (int digit = 0; digit < kDigits; ++digit) {
    split_count_kernel<<<grid, kThreads, 0, stream>>>(p, wave, split, digit);
  }
  split_emit_kernel<<<grid, kThreads, 0, stream>>>(p, wave, split);
  return cudaSuccess;
}

constexpr int64_t kMaxLists = 1 << 26;  // of one launch

}  // namespace

int select_in_waves(const VegasSelectParams& p, LaunchSelection launch, bool on_hopper, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const int64_t lists = num_lists(p), stride = row_stride(p.max_seqlen_k);
  const bool sums = p.dump > VEGAS_DUMP_TOKEN_WEIGHT && p.max_seqlen_k > 0;
  const bool pools = !on_hopper && (p.pool_before || p.pool_after) && p.max_seqlen_k > 0;
  const size_t list_bytes = stride * sizeof(float) * (sums + pools);
  const size_t needed = kStateBytes + list_bytes;
  if (lists == 0) return VEGAS_OK;
  VEGAS_CHECK(p.workspace && p.workspace_bytes >= needed, "`workspace` must hold at least %zu bytes, got %zu", needed,
              p.workspace ? p.workspace_bytes : size_t{0});

  // Where rows of scores are needed, as many lists at a time as the workspace has room for.
  int64_t wave_lists = list_bytes ? (p.workspace_bytes - kStateBytes) / list_bytes : kMaxLists;
  wave_lists = wave_lists < lists ? wave_lists : lists;
  wave_lists = wave_lists < kMaxLists ? wave_lists : kMaxLists;
  float* rows = reinterpret_cast<float*>(static_cast<char*>(p.workspace) + kStateBytes);
  Wave wave = {};
  wave.stride = stride;
  cudaError_t error = cudaSuccess;
  for (wave.first = 0; wave.first < lists && error == cudaSuccess; wave.first += wave.lists) {
    wave.lists = static_cast<int32_t>(lists - wave.first < wave_lists ? lists - wave.first : wave_lists);
    wave.source = nullptr;
    if (sums) {
      error = launch_sums(p, wave, rows, on_hopper, stream);
      wave.source = rows;
    }
    if (pools) {
      float* pooled = sums ? rows + wave_lists * stride : rows;
      launch_pool(p, wave, pooled, stream);
      wave.source = pooled;
    }
    if (error == cudaSuccess) error = launch(p, wave, stream);
  }
  const cudaError_t last = cudaGetLastError();  // what other launches left; the next call must not find it
  // A stream may have fewer multiprocessors than the device, too few for a cluster.
  if (on_hopper && error == cudaErrorInvalidClusterSize) return select_in_waves(p, launch_select, false, stream);
  return launch_status("topk_aggregate_logits", error == cudaSuccess ? last : error);
}

}  // namespace selection

int select_portable(const VegasSelectParams& p, void* stream) {
  return selection::select_in_waves(p, selection::launch_select, false, stream);
}

int aggregate_portable(const VegasSelectParams& params, void* stream_pointer) {
  using namespace selection;
  VegasSelectParams p = params;
  p.per_kv_head = 0;
  const int64_t lists = num_lists(p);
  if (p.max_seqlen_k == 0) return VEGAS_OK;
  Wave wave = {};
  cudaError_t error = cudaSuccess;
  for (wave.first = 0; wave.first < lists && error == cudaSuccess; wave.first += wave.lists) {
    wave.lists = static_cast<int32_t>(lists - wave.first < kMaxLists ? lists - wave.first : kMaxLists);
    error = launch_sums(p, wave, nullptr, false, static_cast<cudaStream_t>(stream_pointer));
  }
  const cudaError_t last = cudaGetLastError();
  return launch_status("aggregate_logits", error == cudaSuccess ? last : error);
}

size_t select_portable_workspace(const VegasBounds& bounds) {
  using namespace selection;
  const int64_t heads = larger(bounds.num_heads_kv, 1);
  const int64_t lists = int64_t{larger(bounds.layers, 1)} * larger(bounds.max_batch, 1) * heads;
  const int64_t list_bytes = 2 * row_stride(larger(bounds.max_seqlen_k, 1)) * sizeof(float);
  // As many lists as fit; longer ones may fill the room better.
  const int64_t room = list_bytes > kRowBytes ? list_bytes : int64_t{kRowBytes};
  return kStateBytes + (list_bytes * lists < room ? list_bytes * lists : room);
}

}  // namespace vegas_ops
