// topk_aggregate_logits and aggregate_logits on the CPU.
//
// A list is scored (planes summed, windows pooled), then its k-th best score is found from a bracket:
// quantiles of a small sample enclose it, one pass counts what lies above and keeps what lies inside,
// and radix digits settle the rest exactly. A second pass writes what beats the threshold, in
// ascending order. Rows are cut into chunks of fixed size, so that results depend on no thread count.
#include <omp.h>

#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/cpu_isa.h"
#include "common/status.h"
#include "select/plan.h"

namespace vegas_ops::VEGAS_ISA {
namespace {

using selection::List;
using selection::Planes;
using selection::Quota;

constexpr int32_t kChunk = 4096;                // positions; its sums stay in the first-level cache
constexpr int32_t kSample = 1024;               // scores that the bracket is drawn from
constexpr int32_t kSampledLength = 8192;        // shorter rows are cheaper to rank whole
constexpr int64_t kParallelElements = 1 << 17;  // below, waking threads costs more than it saves
constexpr int64_t kSharedElements = 1 << 20;    // of one list; below, barriers inside it cost more

constexpr float kNegInf = -__builtin_inff();

// ---- scores -------------------------------------------------------------------------------------

inline __attribute__((always_inline)) float widen(float x) { return x; }
inline __attribute__((always_inline)) float widen(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline __attribute__((always_inline)) uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// e^x to 2 ulp, denormal results included; branch-free, so that loops over it vectorise. Range reduction
// and scaling are in double, where nothing depends on the order that the compiler picks.
inline __attribute__((always_inline)) float exponential(float x) {
  float clamped = x < 89.0f ? x : 89.0f;
  clamped = clamped > -105.0f ? clamped : -105.0f;
  const float octaves = clamped * 1.44269504f;
  const int32_t n = static_cast<int32_t>(octaves + (octaves < 0 ? -0.5f : 0.5f));
  const float r = static_cast<float>(clamped - n * 0.69314718055994531);
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const int64_t scale_bits = static_cast<int64_t>(n + 1023) << 52;
  double scale;
  std::memcpy(&scale, &scale_bits, 8);
  y = static_cast<float>(y * scale);
  return x != x ? x : y;
}

template <class T>
inline __attribute__((always_inline)) void add_logits(float* sum, const T* logits, int32_t count) {
  for (int32_t i = 0; i < count; ++i) sum[i] += widen(logits[i]);
}

// A masked logit stays -inf, though its weight would be 0: it makes the candidate unselectable.
template <class T>
inline __attribute__((always_inline)) void add_weights(float* sum, const T* logits, float norm, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    const float logit = widen(logits[i]);
    const float weight = exponential(logit - norm);
    sum[i] += logit == kNegInf ? kNegInf : weight;
  }
}

double log_add_exp(double a, double b) {
  const double most = a > b ? a : b, least = a > b ? b : a;
  if (a != a || b != b) return a + b;
  return __builtin_isinf(most) ? most : most + std::log1p(std::exp(least - most));
}

// Natural log of what a plane's weights are divided by.
float normaliser(const VegasSelectParams& p, const Planes& planes, int32_t row, int32_t head) {
  const int64_t at = planes.norm_offset + row * planes.norm_row_stride + head * planes.norm_head_stride;
  if (p.dump == VEGAS_DUMP_KV_HEAD) return p.guide_lse[at];
  if (!p.sinks) return p.lse[at];
  return static_cast<float>(log_add_exp(p.lse[at], p.sinks[planes.sink_offset + head]));
}

template <class T>
void sum_planes(const VegasSelectParams& p, const Planes& planes, int32_t begin, int32_t end, float* sum) {
  const int32_t count = end - begin;
  if (planes.rows == 0) {
    for (int32_t i = 0; i < count; ++i) sum[i] = kNegInf;
    return;
  }
  std::memset(sum, 0, count * sizeof(float));
  const bool weights = selection::uses_weights(p);
  const T* base = static_cast<const T*>(p.logits) + planes.offset + begin;
  for (int32_t row = 0; row < planes.rows; ++row) {
    for (int32_t head = 0; head < planes.heads; ++head) {
      const T* logits = base + row * planes.row_stride + head * planes.head_stride;
      if (weights) {
        add_weights(sum, logits, normaliser(p, planes, row, head), count);
      } else {
        add_logits(sum, logits, count);
      }
    }
  }
}

void sum_chunk(const VegasSelectParams& p, const Planes& planes, int32_t begin, int32_t end, float* sum) {
  if (p.logits_dtype == VEGAS_FLOAT32) {
    sum_planes<float>(p, planes, begin, end, sum);
  } else {
    sum_planes<uint16_t>(p, planes, begin, end, sum);
  }
}

// A plane's -inf outweighs the +inf or NaN of another.
template <class T>
bool any_masked(const VegasSelectParams& p, const Planes& planes, int32_t position) {
  const T* base = static_cast<const T*>(p.logits) + planes.offset + position;
  for (int32_t row = 0; row < planes.rows; ++row) {
    for (int32_t head = 0; head < planes.heads; ++head) {
      if (widen(base[row * planes.row_stride + head * planes.head_stride]) == kNegInf) return true;
    }
  }
  return false;
}

// scores[i], i in [begin, end), becomes the maximum over [i - before, i + after] of `sums`. Windows of
// 1, 2, 4, ... are built by doubling: log2(width) vectorised passes, which cost less than the two
// scalar scans of the linear-time method up to any width that occurs. `window` holds end - begin +
// before + after floats.
void pool_chunk(const float* sums, int32_t length, int32_t before, int32_t after, int32_t begin, int32_t end,
                float* window, float* scores) {
  const int32_t width = before + after + 1, count = end - begin + width - 1;
  for (int32_t i = 0; i < count; ++i) window[i] = kNegInf;
  const int32_t first = selection::larger(begin - before, 0);
  const int32_t last = selection::smaller(end - 1, length - 1 - after) + after;
  float* inside = window + (first - (begin - before));
  for (int32_t i = 0; i <= last - first; ++i) {
    const float value = sums[first + i];
    inside[i] = value == value ? value : kNegInf;
  }
  int32_t remaining = count;
  for (int32_t covered = 1; covered < width;) {
    const int32_t step = selection::smaller(covered, width - covered);
    remaining -= step;
#pragma omp simd  // reads run ahead of writes
    for (int32_t i = 0; i < remaining; ++i) window[i] = window[i] > window[i + step] ? window[i] : window[i + step];
    covered += step;
  }
  for (int32_t i = begin; i < end; ++i) scores[i] = sums[i] >= -FLT_MAX ? window[i - begin] : kNegInf;
}

// ---- threshold ----------------------------------------------------------------------------------

// Bit i: scores[i] > bound, or >= bound if kOrEqual, for 16 scores. NaN never is.
template <bool kOrEqual>
inline __attribute__((always_inline)) uint32_t beats(const float* scores, float bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(_mm512_loadu_ps(scores), _mm512_set1_ps(bound), kOrEqual ? _CMP_GE_OQ : _CMP_GT_OQ);
#elif defined(__AVX__)
  constexpr int kCompare = kOrEqual ? _CMP_GE_OQ : _CMP_GT_OQ;
  const __m256 b = _mm256_set1_ps(bound);
  const uint32_t low = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(scores), b, kCompare));
  return low | _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(scores + 8), b, kCompare)) << 8;
#elif defined(__SSE2__)
  const __m128 b = _mm_set1_ps(bound);
  uint32_t mask = 0;
  for (int i = 0; i < 4; ++i) {
    const __m128 s = _mm_loadu_ps(scores + 4 * i);
    mask |= _mm_movemask_ps(kOrEqual ? _mm_cmpge_ps(s, b) : _mm_cmpgt_ps(s, b)) << (4 * i);
  }
  return mask;
#else
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(kOrEqual ? scores[i] >= bound : scores[i] > bound) << i;
  return mask;
#endif
}

// The same for the last few scores of a row, when fewer than 16 are left.
template <bool kOrEqual>
inline __attribute__((always_inline)) uint32_t beats(const float* scores, int32_t count, float bound) {
  if (count >= 16) return beats<kOrEqual>(scores, bound);
  uint32_t mask = 0;
  for (int32_t i = 0; i < count; ++i) {
    mask |= static_cast<uint32_t>(kOrEqual ? scores[i] >= bound : scores[i] > bound) << i;
  }
  return mask;
}

// Appends the scores, or the positions from `first` on, whose bits are set; returns how many.
inline __attribute__((always_inline)) int32_t append_scores(const float* scores, uint32_t mask, float* out) {
  const int32_t count = __builtin_popcount(mask);
#if defined(__AVX512F__)
  const __m512 kept = _mm512_maskz_compress_ps(mask, _mm512_maskz_loadu_ps(mask, scores));
  _mm512_mask_storeu_ps(out, (1u << count) - 1, kept);
#else
  for (; mask; mask &= mask - 1) *out++ = scores[__builtin_ctz(mask)];
#endif
  return count;
}

inline __attribute__((always_inline)) int32_t append_positions(int32_t first, uint32_t mask, int32_t* out) {
  const int32_t count = __builtin_popcount(mask);
#if defined(__AVX512F__)
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i kept = _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(lanes, _mm512_set1_epi32(first)));
  _mm512_mask_storeu_epi32(out, (1u << count) - 1, kept);
#else
  for (; mask; mask &= mask - 1) *out++ = first + __builtin_ctz(mask);
#endif
  return count;
}

// The rank-th largest of `scores` (1 is the largest), by radix digits. No score is NaN or -inf.
float nth_largest(const float* scores, int32_t count, int32_t rank) {
  uint32_t histogram[selection::kBins];
  uint32_t prefix = 0;
  for (int digit = 0; digit < selection::kDigits; ++digit) {
    std::memset(histogram, 0, sizeof histogram);
    for (int32_t i = 0; i < count; ++i) {
      const uint32_t key = selection::order_key(bits_of(scores[i]));
      if (selection::has_prefix(key, prefix, digit)) ++histogram[selection::digit_of(key, digit)];
    }
    uint32_t bin = selection::kBins - 1;
    for (; static_cast<int64_t>(histogram[bin]) < rank; --bin) rank -= histogram[bin];
    prefix |= bin << selection::digit_shift(digit);
  }
  const uint32_t bits = selection::key_bits(prefix);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Bracket {
  float low;
  float high;
};

constexpr Bracket kEverything = {-FLT_MAX, __builtin_inff()};

// Bounds between which the rank-th largest of [begin, end) probably lies.
Bracket sample_bracket(const float* scores, int32_t begin, int32_t end, int32_t rank) {
  const int32_t count = end - begin;
  if (count < kSampledLength) return kEverything;
  float sample[kSample];
  int32_t sampled = 0;
  for (int32_t i = 0; i < kSample; ++i) {
    const float score = scores[begin + static_cast<int64_t>(i) * count / kSample];
    if (score >= -FLT_MAX) sample[sampled++] = score;
  }
  const double share = static_cast<double>(rank) / count;
  const double expected = share * kSample, margin = 4 * std::sqrt(expected * (1 - share)) + 2;
  const double upper = std::floor(expected - margin), lower = std::ceil(expected + margin);
  Bracket bracket = kEverything;
  if (upper >= 1 && upper <= sampled) bracket.high = nth_largest(sample, sampled, static_cast<int32_t>(upper));
  if (lower <= sampled) bracket.low = nth_largest(sample, sampled, static_cast<int32_t>(lower));
  return bracket;
}

struct ChunkCount {
  int32_t above;   // scores above the bracket, later: above the threshold
  int32_t inside;  // scores inside the bracket, later: equal to the threshold
};

// Counts the scores of [begin, end) above the bracket, and copies those inside it.
ChunkCount split(const float* scores, int32_t begin, int32_t end, const Bracket& bracket, float* inside) {
  ChunkCount count = {0, 0};
  for (int32_t i = begin; i < end; i += 16) {
    const uint32_t high = beats<false>(scores + i, end - i, bracket.high);
    const uint32_t mask = beats<true>(scores + i, end - i, bracket.low) & ~high;
    count.above += __builtin_popcount(high);
    count.inside += append_scores(scores + i, mask, inside + count.inside);
  }
  return count;
}

// Writes the positions in [begin, end) that score above `threshold`, and the first `ties` equal to it.
void emit(const VegasSelectParams& p, int32_t request, const float* scores, int32_t begin, int32_t end, float threshold,
          int32_t ties, int32_t* out) {
  int32_t* const start = out;
  for (int32_t i = begin; i < end; i += 16) {
    const uint32_t high = beats<false>(scores + i, end - i, threshold);
    uint32_t equal = beats<true>(scores + i, end - i, threshold) & ~high;
    for (int32_t surplus = __builtin_popcount(equal) - ties; surplus > 0; --surplus) {
      equal &= ~(1u << (31 - __builtin_clz(equal)));
    }
    ties -= __builtin_popcount(equal);
    out += append_positions(i, high | equal, out);
  }
  if (p.page_size == 0) return;
  for (int32_t* at = start; at < out; ++at) *at = selection::output_of(p, request, *at);
}

// ---- one list -----------------------------------------------------------------------------------

// Memory of one list in progress.
struct Scratch {
  float* sums;
  float* scores;
  float* inside;
  ChunkCount* counts;
  float* windows;  // one per thread
  int64_t window_floats;
};

int32_t chunks_of(int32_t length, int32_t chunk) { return length / chunk + (length % chunk != 0); }

// Positions that a thread pools at once: no fewer than the window, or reading its margins would dominate.
int32_t pooled_chunk(const VegasSelectParams& p) {
  const int64_t width = static_cast<int64_t>(selection::smaller(p.pool_before, p.max_seqlen_k)) +
                        selection::smaller(p.pool_after, p.max_seqlen_k);
  return static_cast<int32_t>(width < kChunk ? kChunk : width < p.max_seqlen_k ? width : p.max_seqlen_k);
}

// The scores of a list, either in `scratch` or, where nothing is to be computed, in the dump itself.
const float* score_list(const VegasSelectParams& p, const Planes& planes, int32_t length, const Scratch& scratch,
                        int threads) {
  const float* sums = scratch.sums;
  if (p.dump <= VEGAS_DUMP_TOKEN_WEIGHT) {
    sums = static_cast<const float*>(p.logits) + planes.offset;
  } else {
    const int32_t chunks = chunks_of(length, kChunk);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int32_t c = 0; c < chunks; ++c) {
      const int32_t begin = c * kChunk;
      sum_chunk(p, planes, begin, selection::smaller(length - begin, kChunk) + begin, scratch.sums + begin);
    }
  }
  if (p.pool_before == 0 && p.pool_after == 0) return sums;
  const int32_t before = selection::smaller(p.pool_before, length), after = selection::smaller(p.pool_after, length);
  const int32_t pooled = pooled_chunk(p), chunks = chunks_of(length, pooled);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int32_t c = 0; c < chunks; ++c) {
    const int32_t begin = c * pooled, end = selection::smaller(length - begin, pooled) + begin;
    float* window = scratch.windows + (threads > 1 ? omp_get_thread_num() : 0) * scratch.window_floats;
    pool_chunk(sums, length, before, after, begin, end, window, scratch.scores);
  }
  return scratch.scores;
}

// Selects `quota.free` of [begin, end), fewer where fewer are selectable; returns how many it wrote.
int32_t select_free(const VegasSelectParams& p, int32_t request, const Quota& quota, const float* scores,
                    const Scratch& scratch, int threads, int32_t* out) {
  const int32_t begin = quota.begin, end = quota.end, chunks = chunks_of(end - begin, kChunk);
  if (quota.free == 0) return 0;
  Bracket bracket = sample_bracket(scores, begin, end, quota.free);
  int32_t above, inside;
  for (bool narrow = bracket.low > -FLT_MAX || bracket.high <= FLT_MAX;; narrow = false) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int32_t c = 0; c < chunks; ++c) {
      const int32_t from = begin + c * kChunk, to = selection::smaller(end - from, kChunk) + from;
      scratch.counts[c] = split(scores, from, to, bracket, scratch.inside + (from - begin));
    }
    above = inside = 0;
    for (int32_t c = 0; c < chunks; ++c) above += scratch.counts[c].above;
    for (int32_t c = 0; c < chunks; ++c) inside += scratch.counts[c].inside;
    if (!narrow || (above < quota.free && quota.free <= above + inside)) break;
    bracket = kEverything;
  }

  const int32_t selected = selection::smaller(quota.free, above + inside);
  if (selected == 0) return 0;
  // The chunks' shares move together, so that the threshold is found in one stretch of memory.
  float* kept = scratch.inside;
  int32_t gathered = 0;
  for (int32_t c = 0; c < chunks; ++c) {
    std::memmove(kept + gathered, scratch.inside + c * static_cast<int64_t>(kChunk),
                 scratch.counts[c].inside * sizeof(float));
    gathered += scratch.counts[c].inside;
  }
  const bool known = bracket.low == bracket.high;
  const float threshold = known ? bracket.low : nth_largest(kept, gathered, selected - above);

  int32_t ties = selected, at = 0;
  for (int32_t c = 0; c < chunks; ++c) {
    ChunkCount& count = scratch.counts[c];
    const float* shares = kept + at;
    int32_t better = 0, equal = 0;
    for (int32_t i = 0; i < count.inside; ++i) better += shares[i] > threshold;
    for (int32_t i = 0; i < count.inside; ++i) equal += shares[i] == threshold;
    at += count.inside;
    count = {count.above + better, equal};
    ties -= count.above;
  }
  // From here on a chunk's counts are its place in the output and the ties it may take.
  int32_t place = 0;
  for (int32_t c = 0; c < chunks; ++c) {
    const int32_t taken = selection::smaller(scratch.counts[c].inside, ties);
    const int32_t next = place + scratch.counts[c].above + taken;
    scratch.counts[c] = {place, taken};
    ties -= taken;
    place = next;
  }
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int32_t c = 0; c < chunks; ++c) {
    const int32_t from = begin + c * kChunk, to = selection::smaller(end - from, kChunk) + from;
    emit(p, request, scores, from, to, threshold, scratch.counts[c].inside, out + scratch.counts[c].above);
  }
  return selected;
}

void select_list(const VegasSelectParams& p, int64_t index, const Scratch& scratch, int threads) {
  const List list = selection::list_at(p, index);
  const Planes planes = selection::planes_of(p, list);
  const int32_t length = selection::candidates(p, list.request);
  const Quota quota = selection::quota_of(p, list.request);
  int32_t* out = p.indices + index * p.max_k;
  int32_t count = 0;
  for (int32_t i = 0; i < quota.head; ++i) out[count++] = selection::output_of(p, list.request, i);
  if (planes.rows && quota.free) {
    const float* scores = score_list(p, planes, length, scratch, threads);
    count += select_free(p, list.request, quota, scores, scratch, threads, out + count);
  }
  for (int32_t i = 0; i < quota.tail; ++i) out[count++] = selection::output_of(p, list.request, quota.end + i);
  p.topk_length[index] = count;
  for (; count < p.max_k; ++count) out[count] = -1;
}

int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

}  // namespace

int select(const VegasSelectParams& p) {
  const int64_t lists = selection::num_lists(p);
  if (lists == 0) return VEGAS_OK;
  int64_t total = 0;
  int32_t longest = 0;
  for (int32_t request = 0; request < p.batch; ++request) {
    const int32_t length = selection::candidates(p, request);
    total += length;
    longest = selection::larger(longest, length);
  }
  const bool pools = p.pool_before || p.pool_after;
  const bool sums = p.dump > VEGAS_DUMP_TOKEN_WEIGHT;
  const int64_t planes = !sums ? 1 : p.dump == VEGAS_DUMP_ALL ? p.total_q / p.batch + 1 : 2;
  const int64_t heads = p.per_kv_head || !sums ? 1 : p.num_heads;
  int threads = total * planes * heads * (lists / p.batch) < kParallelElements ? 1 : omp_get_max_threads();
  // Lists share out over the threads; where they are few and long, each is cut into chunks.
  const bool whole = lists >= 4 * threads || longest * planes * heads < kSharedElements;
  if (whole && lists < threads) threads = static_cast<int>(lists);
  const int slots = whole ? threads : 1;

  const int64_t row = round_up(longest, 16), counts = round_up(chunks_of(longest, kChunk) * 2, 16);
  const int64_t window =
      pools ? round_up(pooled_chunk(p) + static_cast<int64_t>(selection::smaller(p.pool_before, longest)) +
                           selection::smaller(p.pool_after, longest),
                       16)
            : 0;
  const int64_t slot_floats = row * (1 + sums + pools) + counts + window * (whole ? 1 : threads);
  float* memory = static_cast<float*>(std::malloc(slots * slot_floats * sizeof(float) + 64));
  if (!memory) return fail(VEGAS_OUT_OF_MEMORY, "out of memory: selecting from %d candidates", longest);

  const auto scratch_of = [&](int slot) {
    float* at = memory + slot * slot_floats;
    Scratch scratch;
    scratch.inside = at;
    at += row;
    scratch.sums = at;
    at += row * sums;
    scratch.scores = at;
    at += row * pools;
    scratch.counts = reinterpret_cast<ChunkCount*>(at);
    scratch.windows = at + counts;
    scratch.window_floats = window;
    return scratch;
  };
  if (whole) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
    for (int64_t i = 0; i < lists; ++i) select_list(p, i, scratch_of(omp_get_thread_num()), 1);
  } else {
    for (int64_t i = 0; i < lists; ++i) select_list(p, i, scratch_of(0), threads);
  }
  std::free(memory);
  return VEGAS_OK;
}

int aggregate(const VegasSelectParams& p) {
  const int64_t chunks = chunks_of(p.max_seqlen_k, kChunk);
  const int64_t tasks = static_cast<int64_t>(p.layers) * p.batch * chunks;
#pragma omp parallel for if (tasks > 8) schedule(dynamic)
  for (int64_t task = 0; task < tasks; ++task) {
    List list;
    list.head = -1;
    list.request = static_cast<int32_t>(task / chunks % p.batch);
    list.layer = static_cast<int32_t>(task / chunks / p.batch);
    const int32_t begin = static_cast<int32_t>(task % chunks) * kChunk;
    const int32_t length = selection::candidates(p, list.request);
    if (begin >= length) continue;
    const Planes planes = selection::planes_of(p, list);
    const int32_t count = selection::smaller(length - begin, kChunk);
    float* sums = p.sums + list.layer * p.sums_stride_layer + list.request * p.sums_stride_batch + begin;
    sum_chunk(p, planes, begin, begin + count, sums);
    for (int32_t i = 0; i < count; ++i) {
      if (sums[i] == sums[i]) continue;
      const bool masked = p.logits_dtype == VEGAS_FLOAT32 ? any_masked<float>(p, planes, begin + i)
                                                          : any_masked<uint16_t>(p, planes, begin + i);
      if (masked) sums[i] = kNegInf;
    }
  }
  return VEGAS_OK;
}

}  // namespace vegas_ops::VEGAS_ISA
