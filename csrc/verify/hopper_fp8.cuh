// The row group of the Hopper verify kernel for fp8 caches.
//
// Keys are the rows of both products and packed rows their columns: scores are K Q^T, output V^T P^T. So keys and
// values are operands that come from registers, where they are widened, and no 16-bit tile goes through shared memory,
// which would be busier than memory. Values become fp16, which holds them exactly, and so do the weights that meet
// them; keys become the query's type. The guide rows are columns of the same product; the guide warps get the results.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "verify/hopper_traits.cuh"

namespace vegas_ops::hopper {

// Weights lie between 2^kTopWeight, where their reference was when it last moved, and 2^15: fp16 then keeps what is
// down to 2^-32 of the largest.
constexpr float kTopWeight = 7.0f;
constexpr float kWeightLimit = 15.0f;  // log2 units

// Called by a warpgroup: waits for all at a named barrier, and says whether `flag` was set by any.
template <int kBarrier>
__device__ __forceinline__ bool any_of_group(bool flag) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.s32 mine, %1, 0;\n"
      "barrier.cta.red.or.pred all, %2, %3, mine;\n"
      "selp.s32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(any)
      : "r"(static_cast<int>(flag)), "n"(kBarrier), "n"(kGroupThreads)
      : "memory");
  return any != 0;
}

// The two fp8 values in the low or the high half of a word.
template <class Element, bool kHigh>
__device__ __forceinline__ uint32_t widen_half(uint32_t word) {
  const uint32_t halves = portable::widen_fp8<__half>(kHigh ? word >> 16 : word & 0xffff);
  if constexpr (std::is_same_v<Element, __half>) {
    return halves;
  } else {
    // Three bits of mantissa: cutting off is exact.
    const float2 values = portable::unpack<__half>(halves);
    return __byte_perm(__float_as_uint(values.x), __float_as_uint(values.y), 0x7632);
  }
}

// What a lane keeps of a tile's key mask: its two keys, 8 apart, of every 64.
template <int kBlocks>
struct LaneKeys {
  uint32_t bits[kBlocks];
  bool all;  // of the tile

  __device__ __forceinline__ bool exists(int block, int i) const { return bits[block] >> 8 * i & 1; }
};

// The row group: its fragments, and the phases of its work on a tile of keys.
template <class T>
class ColumnAttention {
 public:
  __device__ __forceinline__ ColumnAttention(const VegasVerifyParams& p, const Workspace& w, SharedMemory<T>& shared)
      : p_(p), w_(w), shared_(shared), rows_(shared.rows) {}

  // Attends all segments of the CTA.
  __device__ __forceinline__ void attend() {
    SegmentReader<T> segments = {shared_};
    for (const Segment* next; (next = segments.next()); segments.done()) {
      const Segment& s = *next;
      const int tiles = s.end_tile - s.first_tile;
      guided_ = s.request.num_guides > 0 && s.row_tile == 0;
      cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);  // what follows is no longer read
      load_query(s);
      cutlass::arch::fence_view_async_shared();
      cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);
      if (guided_ && tiles > 0) {
        wait_barrier(rows_.guides_ready, guides_phase_);
        guides_phase_ ^= 1;
      }
      const float scale = p_.softmax_scale * portable::descale_of(p_.cache.k, s.index, s.kv_head);
      capped_ = p_.softcap > 0.0f;
      forms_logits_ = capped_ || !(scale > 0.0f);
      to_logit_ = capped_ ? scale / p_.softcap : scale;
      to_log2_ = capped_ ? p_.softcap * kLog2e : forms_logits_ ? kLog2e : scale * kLog2e;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum_[c] = 0.0f;
      cute::clear(output_);
      if (tiles > 0) attend_tiles(s);
      write_output(s);
    }
  }

 private:
  using Element = typename T::Element;
  using Mma = typename T::Mma;
  using Tile = CacheTile<T>;
  static constexpr int kBarrier = 1;
  static constexpr int kColumns = T::kRows / 4;  // packed rows of a lane, see row_of
  static constexpr int kBlocks = T::kHeadDim / 64;
  static constexpr int kKeyBlocks = T::kTileKeys / 64;
  static constexpr int kScores = T::kRows / 2;          // of a block of keys
  static constexpr int kBlockScores = T::kColumns / 2;  // with those of guide columns, which come last
  // Element kBlockScores * b + 4t + 2i + e: key 64b + 16 * warp + lane / 4 + 8i, packed row of column 2t + e.
  using Scores = decltype(cute::partition_fragment_C(typename T::QkMma{},
                                                     cute::Shape<cute::Int<T::kTileKeys>, cute::Int<T::kColumns>>{}));
  // Element kScores * m + 4t + 2i + e: dimension 64m + 16 * warp + 2 * (lane / 4) + i.
  using Output = decltype(cute::partition_fragment_C(typename T::PvMma{},
                                                     cute::Shape<cute::Int<T::kHeadDim>, cute::Int<T::kRows>>{}));
  using Keys = decltype(cute::make_tensor<Mma>(
      cute::partition_shape_A(typename T::QkMma{}, cute::Shape<cute::Int<T::kTileKeys>, cute::Int<T::kHeadDim>>{})));
  using Values = decltype(cute::make_tensor<cute::half_t>(
      cute::partition_shape_A(typename T::PvMma{}, cute::Shape<cute::Int<T::kHeadDim>, cute::Int<T::kTileKeys>>{})));
  static_assert(decltype(cute::size(Scores{}))::value == kKeyBlocks * kBlockScores,
                "a lane's scores are two keys of its columns, of every block");
  static_assert(decltype(cute::size<1>(typename T::QkMma::AtomShape_MNK{}))::value == T::kColumns,
                "one instruction has all columns");
  static_assert(decltype(cute::size(Output{}))::value == kBlocks * kScores, "and its output two dimensions of a block");

  // The packed row of column c of this lane.
  __device__ __forceinline__ int row_of(int c) const { return 8 * (c / 2) + 2 * (lane_ % 4) + c % 2; }

  // Queries, their positions and references of the weights. A row that does not exist is masked like the last.
  __device__ __forceinline__ void load_query(const Segment& s) {
    constexpr int kThreadsPerRow = kGroupThreads / T::kRows;
    constexpr int kCopies = T::kHeadDim / 8 / kThreadsPerRow;
    static_assert(kCopies % 2 == 0, "a thread orders 16 elements");
    const int first_row = s.row_tile * T::kRows;
    const int row = thread_ / kThreadsPerRow;
    const int first_segment = thread_ % kThreadsPerRow * kCopies;
    const bool exists = first_row + row < s.packed_rows;
    const PackedRow packed(p_, s.request, s.kv_head, exists ? first_row + row : s.packed_rows - 1);
    const Element* source = static_cast<const Element*>(p_.q) +
                            (s.request.q_begin + int64_t{packed.query}) * p_.q_stride_row +
                            packed.head * p_.q_stride_head + first_segment * 8;
    const int copies = exists ? min(kCopies, p_.cache.head_dim / 8 - first_segment) : 0;
    uint4 loaded[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      loaded[i] = i < copies ? *reinterpret_cast<const uint4*>(source + i * 8) : make_uint4(0, 0, 0, 0);
    }
    if (first_segment == 0) {
      s.visible(packed.query, rows_.seen[row].x, rows_.seen[row].y);
      rows_.base[row] = -FLT_MAX;
    }
#pragma unroll
    for (int i = 0; i < kCopies; i += 2) {
      const uint4 low = loaded[i];
      const uint4 high = loaded[i + 1];
      const int segment = first_segment + i;
      *reinterpret_cast<uint4*>(rows_.query + swizzled_offset<T::kColumns>(row, segment)) =
          make_uint4(low.x, low.z, high.x, high.z);
      *reinterpret_cast<uint4*>(rows_.query + swizzled_offset<T::kColumns>(row, segment + 1)) =
          make_uint4(low.y, low.w, high.y, high.w);
    }
  }

  __device__ __forceinline__ void attend_tiles(const Segment& s) {
    int first_key = s.template key_of<T::kTileKeys>(s.first_tile);
    const int last_key = s.template key_of<T::kTileKeys>(s.end_tile - 1);  // first of the last tile
    const int first_full_key = s.request.first_full_key;
    const int last_full_key = s.request.last_full_key;
    multiply_keys();
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(scores_);
    hand_products();
    while (true) {
      // One tile: its weights, while the values of the tile before are accumulated, then the scores of the next.
      if (forms_logits_) {
#pragma unroll
        for (int b = 0; b < kKeyBlocks; ++b) {
          form_logits<kScores>(scores_(cute::_, b, 0), Cap(to_logit_), to_logit_, capped_);
        }
      }
      if (!loaded_keys_.all || first_key < first_full_key || first_key + T::kTileKeys - 1 > last_full_key) {
        mask_scores(first_key);
      }
      bool moves = weigh();
      cutlass::arch::fence_view_async_shared();
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(output_);
      // All warps are done with the products of the tile before, so that its weights may be overwritten next.
      if (any_of_group<kBarrier>(moves)) {
        move_references();
        weigh();
        cutlass::arch::fence_view_async_shared();
        cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum_[c] += added_[c];
      const bool last = first_key >= last_key;
      if (last) break;
      first_key += T::kTileKeys;
      multiply_keys();
      if constexpr (!T::kOverlaps) {
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(scores_);
        hand_products();
      }
      accumulate_values();
      if constexpr (T::kOverlaps) {
        cute::warpgroup_wait<1>();
        cute::warpgroup_fence_operand(scores_);
        hand_products();
      } else {
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(output_);
      }
    }
    accumulate_values();
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(output_);
  }

  // Widens the next tile of keys, gives its place back, and has it multiplied with the query.
  __device__ __forceinline__ void multiply_keys() {
    wait_barrier(shared_.keys_full[key_ring_.stage], key_ring_.phase);
    widen_keys(shared_.keys[key_ring_.stage]);
    const KeyMask<T::kTileKeys> valid = shared_.valid[key_ring_.stage];
#pragma unroll
    for (int b = 0; b < kKeyBlocks; ++b) {
      const uint32_t own_half = warp_ < 2 ? valid.words[2 * b] : valid.words[2 * b + 1];
      loaded_keys_.bits[b] = own_half >> (16 * (warp_ % 2) + lane_ / 4);
    }
    loaded_keys_.all = valid.all();
    if (guided_) {
      wait_barrier(shared_.guide_empty[guide_ring_.stage], guide_ring_.phase ^ 1);
      if (thread_ == 0) shared_.guide_valid[guide_ring_.stage] = valid;
    }
    arrive_barrier(shared_.keys_empty[key_ring_.stage]);
    key_ring_.advance();
    const auto query = qk_.get_thread_slice(thread_).partition_fragment_B(
        cute::make_tensor(cute::make_smem_ptr(reinterpret_cast<Mma*>(rows_.query)), typename T::QueryLayout{}));
    cute::warpgroup_fence_operand(keys_);
    multiply_tiles(qk_, keys_, query, scores_, cute::GMMA::ScaleOut::Zero);
  }

  // Hands the guide columns' products to the guide warps.
  __device__ __forceinline__ void hand_products() {
    if (!guided_) return;
#pragma unroll
    for (int b = 0; b < kKeyBlocks; ++b) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = scores_(kBlockScores * b + kScores + i);
      if (p_.dump == VEGAS_DUMP_TOKEN) {
        // Its four terms are in two columns each of neighbours.
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          x[i] += x[i + 1];
          x[i] += __shfl_xor_sync(0xffffffffu, x[i], 1);
          x[i + 1] = x[i];
        }
      }
      // Columns repeat: neighbours have both guide rows, too, of which each hands over a key's.
      const int own = lane_ % 4;
      if (own < 2) {
        rows_.guide_products[guide_ring_.stage][64 * b + 16 * warp_ + lane_ / 4 + 8 * own] =
            own == 0 ? make_float2(x[0], x[1]) : make_float2(x[2], x[3]);
      }
    }
    arrive_barrier(shared_.guide_full[guide_ring_.stage]);
    guide_ring_.advance();
  }

  // Widens the next tile of values, gives its place back, and has it multiplied with the last weights.
  __device__ __forceinline__ void accumulate_values() {
    wait_barrier(shared_.values_full[value_ring_.stage], value_ring_.phase);
    widen_values(shared_.values[value_ring_.stage]);
    arrive_barrier(shared_.values_empty[value_ring_.stage]);
    value_ring_.advance();
    const auto weights = pv_.get_thread_slice(thread_).partition_fragment_B(cute::make_tensor(
        cute::make_smem_ptr(reinterpret_cast<cute::half_t*>(rows_.weights[buffer_])), typename T::WeightLayout{}));
    cute::warpgroup_fence_operand(values_);
    multiply_tiles(pv_, values_, weights, output_, cute::GMMA::ScaleOut::One);
    buffer_ ^= 1;
  }

  // A word of an fp8 key is the pairs k = 2j and 2j + 8 of an operand; the query lies in that order.
  __device__ __forceinline__ void widen_keys(const char* tile) {
    uint32_t* const words = reinterpret_cast<uint32_t*>(keys_.data());
    const int offset = swizzled_offset<T::kTileKeys, Tile::kBlockBytes>(16 * warp_ + lane_ % 16, lane_ / 16);
#pragma unroll
    for (int segment = 0; segment < Tile::kSegments; segment += 2) {
#pragma unroll
      for (int b = 0; b < kKeyBlocks; ++b) {
        uint32_t r[4];
        portable::load_matrices(r, tile + (offset ^ segment * 16) + b * (64 * Tile::kBlockBytes));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t* const pairs = words + 4 * (b + kKeyBlocks * (segment + h));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            pairs[i] = widen_half<Element, false>(r[2 * h + i]);
            pairs[2 + i] = widen_half<Element, true>(r[2 * h + i]);
          }
        }
      }
    }
  }

  // A word holds two neighbouring columns of two keys: the even one is a row of the operand, the odd one another.
  __device__ __forceinline__ void widen_values(const char* tile) {
    uint32_t* const words = reinterpret_cast<uint32_t*>(values_.data());
    const int offset = swizzled_offset<T::kTileKeys, Tile::kBlockBytes>(lane_, warp_);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int half = 0; half < T::kTileKeys / 32; ++half) {
        uint32_t r[4];
        portable::load_matrices_transposed(r, tile + (offset ^ m * 64) + half * (32 * Tile::kBlockBytes));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t* pair = words + 4 * (m + kBlocks * (2 * half + i / 2)) + 2 * (i % 2);
          const uint32_t sorted = __byte_perm(r[i], 0, 0x3120);
          pair[0] = widen_half<__half, false>(sorted);
          pair[1] = widen_half<__half, true>(sorted);
        }
      }
    }
  }

  // Most tiles of most calls need none of it.
  __device__ __forceinline__ void mask_scores(int first_key) {
    const int key = first_key + 16 * warp_ + lane_ / 4;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int2 seen = rows_.seen[row_of(c)];
#pragma unroll
      for (int b = 0; b < kKeyBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int own = key + 64 * b + 8 * i;
          if (!loaded_keys_.exists(b, i) || own < seen.x || own > seen.y) {
            scores_(kBlockScores * b + 4 * (c / 2) + 2 * i + c % 2) = -INFINITY;
          }
        }
      }
    }
  }

  // Leaves the weights of the scores in shared memory; true where one is too large for the reference.
  __device__ __forceinline__ bool weigh() {
    const int offset = swizzled_offset<T::kRows>(8 * (lane_ / 16) + lane_ % 8, 2 * warp_ + lane_ / 8 % 2);
    int highest = INT_MIN;  // where anything is positive, the bits of a float order as the float does
#pragma unroll
    for (int pair = 0; pair < T::kRows / 16; ++pair) {
      uint32_t packed[kKeyBlocks][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int t = 2 * pair + n;
        const float2 base = *reinterpret_cast<const float2*>(rows_.base + row_of(2 * t));
#pragma unroll
        for (int b = 0; b < kKeyBlocks; ++b) {
          float weight[2][2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float x[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              x[i] = fmaf(scores_(kBlockScores * b + 4 * t + 2 * i + e), to_log2_, e == 0 ? -base.x : -base.y);
              weight[i][e] = exp2_approx(x[i]);
            }
            highest = __vimax3_s32(highest, __float_as_int(x[0]), __float_as_int(x[1]));
            const float both = weight[0][e] + weight[1][e];
            added_[2 * t + e] = b == 0 ? both : added_[2 * t + e] + both;
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) packed[b][2 * n + i] = portable::pack<__half>(weight[i][0], weight[i][1]);
        }
      }
#pragma unroll
      for (int b = 0; b < kKeyBlocks; ++b) {
        char* const to = rows_.weights[buffer_] + offset + pair * 16 * 128 + b * (T::kRows * 128);
        cute::SM90_U16x8_STSM_T::copy(packed[b][0], packed[b][1], packed[b][2], packed[b][3],
                                      *reinterpret_cast<cute::uint128_t*>(to));
      }
    }
    return highest > __float_as_int(kWeightLimit);
  }

  // Moves the reference of rows whose weights are too large, and their output with it.
  __device__ __forceinline__ void move_references() {
    float top[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      top[c] = -INFINITY;
#pragma unroll
      for (int b = 0; b < kKeyBlocks; ++b) {
        const int at = kBlockScores * b + 4 * (c / 2) + c % 2;
        top[c] = fmaxf(top[c], fmaxf(scores_(at), scores_(at + 2)));
      }
#pragma unroll
      for (int step = 4; step < 32; step *= 2) top[c] = fmaxf(top[c], __shfl_xor_sync(0xffffffffu, top[c], step));
      if (lane_ < 4) rows_.exchange[warp_][row_of(c)] = top[c];
    }
    cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int row = row_of(c);
#pragma unroll
      for (int from = 0; from < kGroupWarps; ++from) top[c] = fmaxf(top[c], rows_.exchange[from][row]);
      const float base = rows_.base[row];
      const bool moves = fmaf(top[c], to_log2_, -base) > kWeightLimit;
      top[c] = moves ? top[c] * to_log2_ - kTopWeight : base;
      const float factor = moves ? exp2_approx(base - top[c]) : 1.0f;
      sum_[c] *= factor;
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) output_(kScores * m + 4 * (c / 2) + 2 * i + c % 2) *= factor;
      }
    }
    cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (thread_ < 4) rows_.base[row_of(c)] = top[c];
    }
    cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);
  }

  // Threads finish one row each, then all write what belongs to it.
  __device__ __forceinline__ void write_output(const Segment& s) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum_[c] += __shfl_xor_sync(0xffffffffu, sum_[c], step);
      if (lane_ < 4) rows_.exchange[warp_][row_of(c)] = sum_[c];
    }
    cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);
    const int first_row = s.row_tile * T::kRows;
    const int in_tile = min(T::kRows, s.packed_rows - first_row);
    if (thread_ < in_tile) {
      float total = 0.0f;
#pragma unroll
      for (int from = 0; from < kGroupWarps; ++from) total += rows_.exchange[from][thread_];
      const RowNorm norm = {total == 0.0f ? -INFINITY : rows_.base[thread_], total};
      if (s.whole) {
        const RowOutput<Element> target = row_output<Element>(p_, s.request, s.index, s.kv_head, first_row + thread_);
        *target.lse = norm.lse();
        rows_.output[thread_] = {target.out, output_factor(target, norm), norm.sum == 0.0f};
      } else {
        w_.partial_norm[int64_t{s.slot} * w_.norm_rows + thread_] = make_float2(norm.maximum, norm.sum);
      }
    }
    cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int row = row_of(c);
      if (row >= in_tile) continue;
      const OutputRow<Element> target = rows_.output[row];
      float* partial = w_.partial_output + (int64_t{s.slot} * w_.tile_rows + row) * T::kHeadDim;
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        const int d = 64 * m + 16 * warp_ + lane_ / 4 * 2;
        const float first = output_(kScores * m + 4 * (c / 2) + c % 2);
        const float second = output_(kScores * m + 4 * (c / 2) + 2 + c % 2);
        if (!s.whole) {
          *reinterpret_cast<float2*>(partial + d) = make_float2(first, second);
        } else if (d < p_.cache.head_dim) {
          target.out[d] = portable::from_float<Element>(target.keyless ? 0.0f : first * target.factor);
          target.out[d + 1] = portable::from_float<Element>(target.keyless ? 0.0f : second * target.factor);
        }
      }
    }
  }

  const VegasVerifyParams& p_;
  const Workspace& w_;
  SharedMemory<T>& shared_;
  RowMemory<T>& rows_;
  const int thread_ = threadIdx.x % kGroupThreads;
  const int warp_ = thread_ / 32;
  const int lane_ = thread_ % 32;
  typename T::QkMma qk_;
  typename T::PvMma pv_;
  Scores scores_;
  Output output_;
  Keys keys_;
  Values values_;
  RingPosition<T::kStages> key_ring_;
  RingPosition<T::kStages> value_ring_;
  RingPosition<T::kGuideSlots> guide_ring_;
  uint32_t guides_phase_ = 0;
  int buffer_ = 0;  // of the weights
  // Of a segment.
  bool guided_;
  bool capped_;
  bool forms_logits_;  // capped or oddly scaled logits are formed before the softmax; capped ones in units of the cap
  float to_logit_;
  float to_log2_;
  float sum_[kColumns];    // of this lane's keys
  float added_[kColumns];  // by the last tile
  LaneKeys<kKeyBlocks> loaded_keys_;
};

}  // namespace vegas_ops::hopper
