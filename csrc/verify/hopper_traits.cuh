// What the roles of a Hopper verify CTA share: sizes, shared memory, barriers, and the walk through segments.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>

#include <cute/tensor.hpp>

#include "verify/guides.cuh"
#include "verify/hopper_boxes.h"
#include "verify/hopper_launch.h"
#include "verify/hopper_plan.cuh"

namespace vegas_ops::hopper {

using portable::exp2_approx;
using portable::kLog2e;
using portable::PackedRow;
using portable::row_output;
using portable::RowNorm;
using portable::RowOutput;

constexpr int kGroupThreads = 128;
constexpr int kGroupWarps = kGroupThreads / 32;
constexpr int kValueWarp = 1;  // warp 0 loads keys
constexpr int kFirstGuideWarp = 2;
constexpr int kGuideWarps = 2;
constexpr int kJudgeThreads = 32 * (kFirstGuideWarp + 1);  // the warps that load, and one that guesses their work
// Named barriers of parts of the CTA; a softmax group's own is 1 + group.
constexpr int kProducerBarrier = 1 + kMaxRowGroups;
constexpr int kGuideBarrier = kProducerBarrier + 1;
constexpr int kTurnBarrier = kGuideBarrier + 1;  // of the first row group; the second's follows
constexpr int kSegmentSlots = 2;                 // segments that the CTA's roles may be apart

template <class Element>
using MmaElement = std::conditional_t<std::is_same_v<Element, __half>, cutlass::half_t, cutlass::bfloat16_t>;

// One kernel: query type, padded head dimension, how many warpgroups own 64 packed rows each, keys of a tile, whether
// CTAs look for their work while the previous launch ends, and whether guide rows may be among the packed ones, where
// these leave the last warp of the last row group nothing to do. Kernels that guess have either always or never.
template <class Element_, int kHeadDim_, int kRowGroups_, int kTileKeys_, bool kGuesses_ = false,
          bool kGuidesInRows_ = guides_fit(kRowGroups_, kHeadDim_, kTileKeys_)>
struct Traits {
  using Element = Element_;
  using Mma = MmaElement<Element>;
  static constexpr bool kFp8 = false;
  static constexpr bool kGuesses = kGuesses_;
  static constexpr bool kDumpsRows = !kGuesses;  // small calls wait for code
  static constexpr int kCacheBytes = 2;          // of an element
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowGroups = kRowGroups_;
  static constexpr int kTileKeys = kTileKeys_;
  static constexpr int kRows = 64 * kRowGroups;
  static constexpr bool kGuidesInRows = kGuidesInRows_;
  // Tiles whose products with guide rows wait for the guide warps.
  static constexpr int kGuideSlots = kGuidesInRows ? 2 * kHeadDim / kTileKeys : 1;
  static constexpr int kThreads = kGroupThreads * (1 + kRowGroups);
  // One row group leaves room for two CTAs, whose softmax and products then overlap.
  static constexpr int kCtasPerSm = ctas_per_sm(kRowGroups, kHeadDim);
  // CTAs of large calls keep step. One that has an SM to itself would leave it idle.
  static constexpr bool kPaced = kCtasPerSm == 2;
  // Together as many as the threads start with.
  static constexpr int kConsumerRegisters = kCtasPerSm == 2   ? (kHeadDim == 64 ? 152 : 144)
                                            : kRowGroups == 1 ? 240
                                            : kRowGroups == 2 ? 192
                                            : kHeadDim == 64  ? 128
                                                              : 144;
  static constexpr int kProducerRegisters = kCtasPerSm == 2   ? 256 - kConsumerRegisters
                                            : kRowGroups == 1 ? 240
                                            : kRowGroups == 2 ? 120
                                                              : 512 - 3 * kConsumerRegisters;
  static constexpr int kTileBytes = kTileKeys * kHeadDim * 2;  // of K or V
  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  static constexpr int kSharedPerSm = 228 * 1024;
  static constexpr int kReservedPerCta = 1024;
  static constexpr int kMiscBytes = 1024;  // all but tiles and queries
  static constexpr int kRingBytes = kSharedPerSm / kCtasPerSm - kReservedPerCta - kMiscBytes - kQueryBytes;
  static constexpr int kStages = kRingBytes / (2 * kTileBytes) < 8 ? kRingBytes / (2 * kTileBytes) : 8;
  static constexpr int kSegments = kHeadDim / 8;  // of 16 bytes, in a row

  // Pairs of a lane's weights that are made while the last ones are still being multiplied. Two row groups whose
  // weights take as long as their products gain by it, others lose more by the registers.
  static constexpr int kEarlyPairs = kRowGroups == 2 && kHeadDim == 64 ? kTileKeys / 8 : 0;

  // Where weights take as long as products, two row groups that do the same at the same time wait for each other.
  static constexpr bool kTurns = kRowGroups == 2 && kHeadDim == 64;

  // Queries in registers leave shared memory to keys; only the smallest head dimension has room for them.
  static constexpr bool kQueryInRegisters = kHeadDim == 64;
  using QkShape = cute::Shape<cute::_64, cute::Int<kTileKeys>, cute::Int<kHeadDim>>;
  using QkMma =
      std::conditional_t<kQueryInRegisters,
                         decltype(cute::make_tiled_mma(cute::GMMA::rs_op_selector<Mma, Mma, float, QkShape>())),
                         decltype(cute::make_tiled_mma(cute::GMMA::ss_op_selector<Mma, Mma, float, QkShape>()))>;
  using PvMma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Mma, Mma, float, cute::Shape<cute::_64, cute::Int<kHeadDim>, cute::Int<kTileKeys>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::MN>()));
  using QueryLayout = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Mma>{},
                                                   cute::Shape<cute::_64, cute::Int<kHeadDim>>{}));
  using KeyLayout = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Mma>{},
                                                 cute::Shape<cute::Int<kTileKeys>, cute::Int<kHeadDim>>{}));
  using ValueLayout = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Mma>{},
                                                   cute::Shape<cute::Int<kHeadDim>, cute::Int<kTileKeys>>{},
                                                   cute::Step<cute::_2, cute::_1>{}));
  static_assert(kStages >= 2, "the ring needs two stages");
};

// A kernel for fp8 caches: query type, padded head dimension, packed rows of the one warpgroup that owns rows, and keys
// of a tile.
template <class Element_, int kHeadDim_, int kRows_, int kTileKeys_>
struct Fp8Traits {
  using Element = Element_;
  using Mma = MmaElement<Element>;
  static constexpr bool kFp8 = true;
  static constexpr bool kGuesses = false;
  static constexpr bool kDumpsRows = false;
  static constexpr bool kGuidesInRows = false;
  static constexpr bool kPaced = false;
  static constexpr int kCacheBytes = 1;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowGroups = 1;
  static constexpr int kTileKeys = kTileKeys_;
  static constexpr int kRows = kRows_;
  static constexpr int kThreads = 2 * kGroupThreads;
  static constexpr int kCtasPerSm = ctas_per_sm(1, kHeadDim);
  static constexpr int kProducerRegisters = kRows * kHeadDim == 64 * 128 ? 88 : 96;
  static constexpr int kConsumerRegisters = 256 - kProducerRegisters;
  // Whether registers allow the operands of both products at once.
  static constexpr bool kOverlaps = kRows * kHeadDim * kTileKeys <= 64 * 64 * 64;
  static constexpr int kTileBytes = kTileKeys * kHeadDim;
  static constexpr int kGuideSlots = 4;  // tiles whose products with guide rows wait for the guide warps
  static constexpr int kSharedPerSm = 228 * 1024;
  static constexpr int kReservedPerCta = 1024;
  static constexpr int kColumns = kRows + 8;  // of a product with keys: the guide columns come last
  static constexpr int kRowBytes = kColumns * kHeadDim * 2 + kRows * 2 * kTileKeys * 2;  // and weights of two tiles
  static constexpr int kMiscBytes = 3072 + kTileKeys * 32 + kRows * 48;
  static constexpr int kRingBytes = kSharedPerSm / kCtasPerSm - kReservedPerCta - kMiscBytes - kRowBytes;
  static constexpr int kStages = kRingBytes / (2 * kTileBytes) < 8 ? kRingBytes / (2 * kTileBytes) : 8;

  // Keys are the rows of both products, packed rows their columns.
  using QkMma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Mma, Mma, float, cute::Shape<cute::_64, cute::Int<kColumns>, cute::Int<kHeadDim>>>()));
  using PvMma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<cute::half_t, cute::half_t, float,
                                 cute::Shape<cute::_64, cute::Int<kRows>, cute::Int<kTileKeys>>>()));
  using QueryLayout = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Mma>{},
                                                   cute::Shape<cute::Int<kColumns>, cute::Int<kHeadDim>>{}));
  using WeightLayout = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<cute::half_t>{},
                                                    cute::Shape<cute::Int<kRows>, cute::Int<kTileKeys>>{}));
};

// How a tile of the cache lies in shared memory: blocks of columns, whose rows are swizzled as the copy engine does it.
template <class T>
struct CacheTile {
  static constexpr int kRowBytes = T::kHeadDim * T::kCacheBytes;
  static constexpr int kSegments = kRowBytes / 16;                       // of 16 bytes, in a row
  static constexpr int kBlockBytes = kRowBytes < 128 ? kRowBytes : 128;  // of a row
  static constexpr int kBlocks = kRowBytes / kBlockBytes;
  static constexpr int kBlockColumns = kBlockBytes / T::kCacheBytes;
};

// Blocks of columns, rows of 128 (64) bytes swizzled by the 8 (by the 4 pairs): byte offset of a 16-byte segment.
template <int kTileRows, int kBlockBytes = 128>
__device__ __forceinline__ int swizzled_offset(int row, int segment) {
  constexpr int kSegments = kBlockBytes / 16;
  const int turn = kBlockBytes == 128 ? row : row / 2;
  return segment / kSegments * (kTileRows * kBlockBytes) + row * kBlockBytes +
         ((segment ^ turn) & (kSegments - 1)) * 16;
}

template <class T>
__device__ __forceinline__ bool guides_in_rows(const Workspace& w) {
  return T::kGuidesInRows && (T::kGuesses || w.guides_in_rows);
}

// A bit per key of a tile.
template <int kKeys>
struct alignas(kKeys / 8) KeyMask {
  uint32_t words[kKeys / 32];

  __device__ __forceinline__ bool all() const {
    uint32_t both = words[0];
#pragma unroll
    for (int i = 1; i < kKeys / 32; ++i) both &= words[i];
    return both == 0xffffffffu;
  }
};

// Where the sums of a tile of a summed dump belong: row[first_key] and further, up to row[length].
struct PendingSum {
  float* row;
  int first_key;
  int length;
};

// tanh(factor * x). Three coefficients, which hold the factor, serve most scores, whatever the others are; each result
// depends on its own score alone.
class Cap {
 public:
  __device__ __forceinline__ explicit Cap(float factor) : factor_(factor) {
    // Where powers of the factor leave the range of fp32, or scores would, the polynomial is not used.
    const float size = fabsf(factor);
    const float square = factor * factor;
    const bool fits = size < kLargestFactor;
    limit_ = fits ? fminf(__fdividef(kLimit, size), kLargestScore) : 0.0f;
    one_ = kOne * factor;
    third_ = fits ? kThird * factor * square : 0.0f;
    fifth_ = fits ? kFifth * factor * square * square : 0.0f;
  }

  // Whether the polynomial serves a score of this size, to 2^-17 of the result.
  __device__ __forceinline__ bool is_small(float size) const { return size <= limit_; }

  __device__ __forceinline__ float small(float score) const {
    const float square = score * score;
    return score * fmaf(square, fmaf(square, fifth_, third_), one_);
  }

  // Beyond the polynomial's range, where the absolute error is below 2^-22.
  __device__ __forceinline__ float operator()(float score) const {
    const float x = score * factor_;
    const float large = 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(2.0f * kLog2e * x));
    const float square = x * x;
    const float tiny = x * fmaf(square, fmaf(square, kFifth, kThird), kOne);
    return is_small(fabsf(score)) ? small(score) : fabsf(x) <= kLimit ? tiny : large;
  }

 private:
  static constexpr float kLimit = 0.4f;  // of the polynomial
  static constexpr float kOne = 0.99999375f;
  static constexpr float kThird = -0.33262575f;
  static constexpr float kFifth = 0.12127785f;
  static constexpr float kLargestFactor = 1048576.0f;
  static constexpr float kLargestScore = 2097152.0f;

  float factor_;
  float limit_;
  float one_;
  float third_;
  float fifth_;
};

// Turns a warp's first kScores scores into logits, or where these are capped into their share of the cap.
template <int kScores, class Scores>
__device__ __forceinline__ void form_logits(Scores&& scores, const Cap& cap, float factor, bool capped) {
  constexpr int kBatch = 8;  // of the longer way: more at once have no registers
  if (!capped) {
#pragma unroll
    for (int c = 0; c < kScores; ++c) scores(c) *= factor;
    return;
  }
  float most = 0.0f;
#pragma unroll
  for (int c = 0; c < kScores; ++c) most = fmaxf(most, fabsf(scores(c)));
  if (__all_sync(0xffffffffu, cap.is_small(most))) {
#pragma unroll
    for (int c = 0; c < kScores; ++c) scores(c) = cap.small(scores(c));
    return;
  }
  // The vote, which is always lost, keeps the compiler from doing it all at once.
#pragma unroll
  for (int first = 0; first < kScores; first += kBatch) {
    if (!__all_sync(0xffffffffu, cap.is_small(most))) {
#pragma unroll
      for (int c = first; c < first + kBatch; ++c) scores(c) = cap(scores(c));
    }
  }
}

// d = a b, or d += a b, by a warpgroup: a batch for warpgroup_wait. Registers of `a` are fenced by the caller.
template <class TiledMma, class A, class B, class D>
__device__ __forceinline__ void multiply_tiles(TiledMma& mma, const A& a, const B& b, D& d,
                                               cute::GMMA::ScaleOut first) {
  cute::warpgroup_fence_operand(d);
  cute::warpgroup_arrive();
  mma.accumulate_ = first;
#pragma unroll
  for (int k = 0; k < cute::size<2>(a); ++k) {
    cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k), d);
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
  cute::warpgroup_commit_batch();
  cute::warpgroup_fence_operand(d);
}

// What row groups keep in shared memory.
template <class T, bool kFp8 = T::kFp8>
struct RowMemory {
  alignas(1024) char query[T::kRowGroups][64 * T::kHeadDim * 2];

  // Of a guide row with a tile, by key. They lie in rows of the query that are not in use, the last eight of the last
  // row group, which are whole blocks of its swizzle: what a product has of these rows is never looked at.
  __device__ __forceinline__ float* guide_products(int slot, int guide) {
    constexpr int kBlockBytes = 64 * 128;
    constexpr int kSlotsOfBlock = 128 / T::kTileKeys;
    char* free_rows = query[T::kRowGroups - 1] + slot / kSlotsOfBlock * kBlockBytes + 56 * 128;
    return reinterpret_cast<float*>(free_rows) + (slot % kSlotsOfBlock * 2 + guide) * T::kTileKeys;
  }
};

// An output row: where it goes, and what the accumulated values are multiplied with.
template <class Element>
struct OutputRow {
  Element* out;
  float factor;
  bool keyless;  // zeros instead
};

template <class T>
struct RowMemory<T, true> {
  alignas(1024) char query[T::kColumns * T::kHeadDim * 2];
  alignas(1024) char weights[2][T::kRows * T::kTileKeys * 2];
  float2 guide_products[T::kGuideSlots][T::kTileKeys];  // of both guide rows
  uint64_t guides_ready;
  float exchange[kGroupWarps][T::kRows];  // maxima or sums of a warp's keys
  float base[T::kRows];                   // of the weights, log2 units; -FLT_MAX: no key yet
  int2 seen[T::kRows];                    // first and last key
  OutputRow<typename T::Element> output[T::kRows];
};

template <class T>
struct SharedMemory {
  alignas(1024) char keys[T::kStages][T::kTileBytes];
  alignas(1024) char values[T::kStages][T::kTileBytes];
  RowMemory<T> rows;
  KeyMask<T::kTileKeys> valid[T::kStages];
  KeyMask<T::kTileKeys> guide_valid[T::kGuideSlots];
  uint64_t guide_full[T::kGuideSlots];
  uint64_t guide_empty[T::kGuideSlots];
  uint64_t keys_full[T::kStages];
  uint64_t keys_empty[T::kStages];
  uint64_t values_full[T::kStages];
  uint64_t values_empty[T::kStages];
  uint64_t segment_full[kSegmentSlots];
  uint64_t segment_empty[kSegmentSlots];
  PendingSum pending[kGuideWarps][kMostPending];
  Share share;
  Segment segments[kSegmentSlots];
  int guess_holds;           // of the first segment, where lengths were read before the previous launch had ended
  RowNorm guide_norm[2][2];  // of the last guide warp: by parity of the segment, and guide row; scratch before
};

// Stage and phase of a role's walk around a ring.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

__device__ __forceinline__ void wait_barrier(const uint64_t& barrier, uint32_t phase) {
  cutlass::arch::ClusterBarrier::wait(&barrier, phase);
  asm volatile("" ::: "memory");  // CUTLASS does not tell the compiler that memory has changed
}

// What this thread has read and written comes before: barriers count every lane, none arrives for others.
__device__ __forceinline__ void arrive_barrier(const uint64_t& barrier) {
  asm volatile("" ::: "memory");
  cutlass::arch::ClusterBarrier::arrive(&barrier);
}

// What has been loaded: all lanes of the loading warp arrive, and for keys one more, which tells which of them exist.
template <class T>
__device__ __forceinline__ void init_full_barriers(SharedMemory<T>& shared) {
  for (int stage = 0; stage < T::kStages; ++stage) {
    cutlass::arch::ClusterBarrier::init(&shared.keys_full[stage], 32 + 1);
    cutlass::arch::ClusterBarrier::init(&shared.values_full[stage], 32);
  }
  cutlass::arch::fence_barrier_init();
}

// Before they are initialised anew.
template <class T>
__device__ __forceinline__ void invalidate_full_barriers(SharedMemory<T>& shared) {
  for (int stage = 0; stage < T::kStages; ++stage) {
    cutlass::arch::ClusterBarrier::invalidate(&shared.keys_full[stage]);
    cutlass::arch::ClusterBarrier::invalidate(&shared.values_full[stage]);
  }
}

// A role's walk through the CTA's segments: next() waits for a segment, done() gives its slot back. Every lane for
// itself, so that a slot is written after all that was read of it.
template <class T>
struct SegmentReader {
  SharedMemory<T>& shared;
  RingPosition<kSegmentSlots> ring;

  // A guess is there from the start.
  __device__ const Segment* next(bool guess = false) {
    if (!guess) wait_barrier(shared.segment_full[ring.stage], ring.phase);
    const Segment* s = &shared.segments[ring.stage];
    return s->index < 0 ? nullptr : s;
  }
  __device__ void done() {
    arrive_barrier(shared.segment_empty[ring.stage]);
    ring.advance();
  }
};

}  // namespace vegas_ops::hopper
