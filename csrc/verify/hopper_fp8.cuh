// The row group of the Hopper verify kernel for fp8 caches.
//
// Keys are the rows of both products and packed rows their columns: scores are K Q^T, output V^T P^T. So keys and
// values are operands that come from registers, where they are widened, and no 16-bit tile goes through shared memory,
// which would be busier than memory. Values become fp16, which holds them exactly, and so do the weights that meet
// them; keys become the query's type. Products with the guide rows take the same registers; the guide warps get the
// results.
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

// What a lane keeps of a tile's key mask: its two keys, 8 apart.
struct LaneKeys {
  uint32_t bits;
  bool all;  // of the tile

  __device__ __forceinline__ bool exists(int i) const { return bits >> 8 * i & 1; }
};

template <class T>
__device__ __forceinline__ void attend_columns(const VegasVerifyParams& p, const Workspace& w,
                                               SharedMemory<T>& shared) {
  using namespace cute;
  using Element = typename T::Element;
  using Mma = typename T::Mma;
  using Tile = CacheTile<T>;
  constexpr int kBarrier = 1;
  constexpr int kColumns = T::kRows / 4;  // packed rows of a lane: 8t + 2 * (lane % 4) + e for column 2t + e
  constexpr int kBlocks = T::kHeadDim / 64;
  const int thread = threadIdx.x % kGroupThreads;
  const int warp = thread / 32;
  const int lane = thread % 32;
  RowMemory<T>& rows = shared.rows;

  typename T::QkMma qk;
  typename T::PvMma pv;
  const auto thread_qk = qk.get_thread_slice(thread);
  const auto thread_pv = pv.get_thread_slice(thread);
  // Element 4t + 2i + e: key 16 * warp + lane / 4 + 8i, packed row of column 2t + e.
  Tensor scores = partition_fragment_C(qk, Shape<_64, Int<T::kRows>>{});
  // Element (kRows / 2) * m + 4t + 2i + e: dimension 64m + 16 * warp + 2 * (lane / 4) + i.
  Tensor output = partition_fragment_C(pv, Shape<Int<T::kHeadDim>, Int<T::kRows>>{});
  constexpr int kScores = decltype(size(scores))::value;
  constexpr int kOutputs = decltype(size(output))::value;
  static_assert(kScores == T::kRows / 2 && kOutputs == kBlocks * kScores);
  Tensor keys = make_tensor<Mma>(partition_shape_A(qk, Shape<_64, Int<T::kHeadDim>>{}));
  Tensor values = make_tensor<half_t>(partition_shape_A(pv, Shape<Int<T::kHeadDim>, _64>{}));
  uint32_t* const key_words = reinterpret_cast<uint32_t*>(keys.data());
  uint32_t* const value_words = reinterpret_cast<uint32_t*>(values.data());

  // A word of an fp8 key is the pairs k = 2j and 2j + 8 of an operand; the query lies in that order.
  const int key_offset = swizzled_offset<T::kTileKeys, Tile::kBlockBytes>(16 * warp + lane % 16, lane / 16);
  const auto widen_keys = [&](const char* tile) __attribute__((always_inline)) {
#pragma unroll
    for (int segment = 0; segment < Tile::kSegments; segment += 2) {
      uint32_t r[4];
      portable::load_matrices(r, tile + (key_offset ^ segment * 16));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          key_words[4 * (segment + h) + i] = widen_half<Element, false>(r[2 * h + i]);
          key_words[4 * (segment + h) + 2 + i] = widen_half<Element, true>(r[2 * h + i]);
        }
      }
    }
  };
  // A word holds two neighbouring columns of two keys: the even one is a row of the operand, the odd one another.
  const int value_offset = swizzled_offset<T::kTileKeys, Tile::kBlockBytes>(lane, warp);
  const auto widen_values = [&](const char* tile) __attribute__((always_inline)) {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t r[4];
        portable::load_matrices_transposed(r, tile + (value_offset ^ m * 64) + half * (32 * Tile::kBlockBytes));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t* words = value_words + 4 * (m + kBlocks * (2 * half + i / 2)) + 2 * (i % 2);
          const uint32_t sorted = __byte_perm(r[i], 0, 0x3120);
          words[0] = widen_half<__half, false>(sorted);
          words[1] = widen_half<__half, true>(sorted);
        }
      }
    }
  };

  RingPosition<T::kStages> key_ring;
  RingPosition<T::kStages> value_ring;
  RingPosition<T::kGuideSlots> guide_ring;
  uint32_t guides_phase = 0;
  int buffer = 0;  // of the weights
  SegmentReader<T> segments = {shared};
  for (const Segment* next; (next = segments.next()); segments.done()) {
    const Segment& s = *next;
    const int first_row = s.row_tile * T::kRows;
    const int tiles = s.end_tile - s.first_tile;
    const bool guided = s.request.num_guides > 0 && s.row_tile == 0;

    cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);  // what follows is no longer read
    {
      constexpr int kThreadsPerRow = kGroupThreads / T::kRows;
      constexpr int kCopies = T::kHeadDim / 8 / kThreadsPerRow;
      static_assert(kCopies % 2 == 0, "a thread orders 16 elements");
      const int row = thread / kThreadsPerRow;
      const int first_segment = thread % kThreadsPerRow * kCopies;
      const bool exists = first_row + row < s.packed_rows;
      const PackedRow packed(p, s.request, s.kv_head, exists ? first_row + row : s.packed_rows - 1);
      const Element* source = static_cast<const Element*>(p.q) +
                              (s.request.q_begin + int64_t{packed.query}) * p.q_stride_row +
                              packed.head * p.q_stride_head + first_segment * 8;
      const int copies = exists ? min(kCopies, p.cache.head_dim / 8 - first_segment) : 0;
      uint4 loaded[kCopies];
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        loaded[i] = i < copies ? *reinterpret_cast<const uint4*>(source + i * 8) : make_uint4(0, 0, 0, 0);
      }
      // A row that does not exist is masked like the last.
      if (first_segment == 0) {
        s.visible(packed.query, rows.seen[row].x, rows.seen[row].y);
        rows.base[row] = -FLT_MAX;
      }
#pragma unroll
      for (int i = 0; i < kCopies; i += 2) {
        const uint4 low = loaded[i];
        const uint4 high = loaded[i + 1];
        const int segment = first_segment + i;
        *reinterpret_cast<uint4*>(rows.query + swizzled_offset<T::kRows>(row, segment)) =
            make_uint4(low.x, low.z, high.x, high.z);
        *reinterpret_cast<uint4*>(rows.query + swizzled_offset<T::kRows>(row, segment + 1)) =
            make_uint4(low.y, low.w, high.y, high.w);
      }
    }
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);
    if (guided && tiles > 0) {
      wait_barrier(rows.guides_ready, guides_phase);
      guides_phase ^= 1;
    }

    const float scale = p.softmax_scale * portable::descale_of(p.cache.k, s.index, s.kv_head);
    const bool forms_logits = p.softcap > 0.0f || !(scale > 0.0f);
    const float to_log2 = forms_logits ? kLog2e : scale * kLog2e;
    float sum[kColumns] = {};  // of this lane's keys
    float added[kColumns];     // by the last tile
    clear(output);
    const int first_full_key = s.request.first_full_key;
    const int last_full_key = s.request.last_full_key;

    LaneKeys loaded_keys;
    // Widens the next tile of keys, gives its place back, and has it multiplied with the query.
    const auto multiply_keys = [&]() __attribute__((always_inline)) {
      wait_barrier(shared.keys_full[key_ring.stage], key_ring.phase);
      widen_keys(shared.keys[key_ring.stage]);
      const KeyMask<T::kTileKeys> valid = shared.valid[key_ring.stage];
      const uint32_t own_half = warp < 2 ? valid.words[0] : valid.words[1];
      loaded_keys = {own_half >> (16 * (warp % 2) + lane / 4), valid.all()};
      arrive_as_warp(shared.keys_empty[key_ring.stage]);
      key_ring.advance();
      if (guided) {
        const Element* column = rows.guides[lane / 4 % portable::kGuideColumns] + 4 * (lane % 4);
        float x[2][4] = {};
#pragma unroll
        for (int k = 0; k < T::kHeadDim / 16; ++k) {
          const uint2 b = *reinterpret_cast<const uint2*>(column + 16 * k);
          const uint32_t a[4] = {key_words[4 * k], key_words[4 * k + 1], key_words[4 * k + 2], key_words[4 * k + 3]};
          portable::mma<Element>(x[k % 2], a, b.x, b.y);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) x[0][i] += x[1][i];
        if (p.dump == VEGAS_DUMP_TOKEN) {
          // Its four terms are in two columns each of neighbours.
#pragma unroll
          for (int i = 0; i < 4; i += 2) {
            x[0][i] += x[0][i + 1];
            x[0][i] += __shfl_xor_sync(0xffffffffu, x[0][i], 1);
            x[0][i + 1] = x[0][i];
          }
        }
        wait_barrier(rows.guide_empty[guide_ring.stage], guide_ring.phase ^ 1);
        const int own = lane % 4;
        if (own < 2) {
          rows.guide_products[guide_ring.stage][16 * warp + lane / 4 + 8 * own] =
              own == 0 ? make_float2(x[0][0], x[0][1]) : make_float2(x[0][2], x[0][3]);
        }
        if (thread == 0) rows.guide_valid[guide_ring.stage] = valid;
        arrive_as_warp(rows.guide_full[guide_ring.stage]);
        guide_ring.advance();
      }
      const Tensor query = thread_qk.partition_fragment_B(
          make_tensor(make_smem_ptr(reinterpret_cast<Mma*>(rows.query)), typename T::QueryLayout{}));
      warpgroup_fence_operand(scores);
      warpgroup_fence_operand(keys);
      warpgroup_arrive();
      qk.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
      for (int k = 0; k < size<2>(keys); ++k) {
        cute::gemm(qk, keys(_, _, k), query(_, _, k), scores);
        qk.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      warpgroup_fence_operand(scores);
    };
    const auto accumulate_values = [&]() __attribute__((always_inline)) {
      wait_barrier(shared.values_full[value_ring.stage], value_ring.phase);
      widen_values(shared.values[value_ring.stage]);
      arrive_as_warp(shared.values_empty[value_ring.stage]);
      value_ring.advance();
      const Tensor weights = thread_pv.partition_fragment_B(
          make_tensor(make_smem_ptr(reinterpret_cast<half_t*>(rows.weights[buffer])), typename T::WeightLayout{}));
      warpgroup_fence_operand(output);
      warpgroup_fence_operand(values);
      warpgroup_arrive();
      pv.accumulate_ = GMMA::ScaleOut::One;
#pragma unroll
      for (int k = 0; k < size<2>(values); ++k) cute::gemm(pv, values(_, _, k), weights(_, _, k), output);
      warpgroup_commit_batch();
      warpgroup_fence_operand(output);
    };
    // Scales, caps and masks the scores of a tile; most tiles of most calls need none of it.
    const auto finish_logits = [&](int first_key, const LaneKeys& valid) __attribute__((always_inline)) {
      if (forms_logits) {
        const float to_cap = p.softcap > 0.0f ? 2.0f * kLog2e / p.softcap : 0.0f;
#pragma unroll
        for (int c = 0; c < kScores; ++c) {
          float logit = scores(c) * scale;
          if (p.softcap > 0.0f) logit = p.softcap * capped_share(logit * to_cap);
          scores(c) = logit;
        }
      }
      const int key = first_key + 16 * warp + lane / 4;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int2 seen = rows.seen[8 * (c / 2) + 2 * (lane % 4) + c % 2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!valid.exists(i) || key + 8 * i < seen.x || key + 8 * i > seen.y) {
            scores(4 * (c / 2) + 2 * i + c % 2) = -INFINITY;
          }
        }
      }
    };
    // Leaves the weights of the scores in shared memory; true where one is too large for the reference.
    const int weight_offset = swizzled_offset<T::kRows>(8 * (lane / 16) + lane % 8, 2 * warp + lane / 8 % 2);
    const auto weigh = [&]() __attribute__((always_inline)) {
      float highest = -INFINITY;
#pragma unroll
      for (int pair = 0; pair < T::kRows / 16; ++pair) {
        uint32_t packed[4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int t = 2 * pair + n;
          const float2 base = *reinterpret_cast<const float2*>(rows.base + 8 * t + 2 * (lane % 4));
          float weight[2][2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const float x = fmaf(scores(4 * t + 2 * i + e), to_log2, e == 0 ? -base.x : -base.y);
              highest = fmaxf(highest, x);
              weight[i][e] = exp2_approx(x);
            }
            added[2 * t + e] = weight[0][e] + weight[1][e];
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) packed[2 * n + i] = portable::pack<__half>(weight[i][0], weight[i][1]);
        }
        SM90_U16x8_STSM_T::copy(packed[0], packed[1], packed[2], packed[3],
                                *reinterpret_cast<uint128_t*>(rows.weights[buffer] + weight_offset + pair * 16 * 128));
      }
      return highest > kWeightLimit;
    };
    // Moves the reference of rows whose weights are too large, and their output with it.
    const auto move_references = [&]() __attribute__((always_inline)) {
      float top[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        top[c] = fmaxf(scores(4 * (c / 2) + c % 2), scores(4 * (c / 2) + 2 + c % 2));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top[c] = fmaxf(top[c], __shfl_xor_sync(0xffffffffu, top[c], step));
        if (lane < 4) rows.exchange[warp][8 * (c / 2) + 2 * lane + c % 2] = top[c];
      }
      cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int row = 8 * (c / 2) + 2 * (lane % 4) + c % 2;
#pragma unroll
        for (int from = 0; from < kGroupWarps; ++from) top[c] = fmaxf(top[c], rows.exchange[from][row]);
        const float base = rows.base[row];
        const bool moves = fmaf(top[c], to_log2, -base) > kWeightLimit;
        top[c] = moves ? top[c] * to_log2 - kTopWeight : base;
        const float factor = moves ? exp2_approx(base - top[c]) : 1.0f;
        sum[c] *= factor;
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
          for (int i = 0; i < 2; ++i) output(kScores * m + 4 * (c / 2) + 2 * i + c % 2) *= factor;
        }
      }
      cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (thread < 4) rows.base[8 * (c / 2) + 2 * lane + c % 2] = top[c];
      }
      cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);
    };

    if (tiles > 0) {
      int first_key = s.template key_of<T::kTileKeys>(s.first_tile);
      const int last_key = s.template key_of<T::kTileKeys>(s.end_tile - 1);  // first of the last tile
      multiply_keys();
      warpgroup_wait<0>();
      warpgroup_fence_operand(scores);
      while (true) {
        // One tile: its weights, while the values of the tile before are accumulated, then the scores of the next.
        const bool plain = !forms_logits && loaded_keys.all && first_key >= first_full_key &&
                           first_key + T::kTileKeys - 1 <= last_full_key;
        if (!plain) finish_logits(first_key, loaded_keys);
        bool moves = weigh();
        cutlass::arch::fence_view_async_shared();
        warpgroup_wait<0>();
        warpgroup_fence_operand(output);
        // All warps are done with the products of the tile before, so that its weights may be overwritten next.
        if (any_of_group<kBarrier>(moves)) {
          move_references();
          weigh();
          cutlass::arch::fence_view_async_shared();
          cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);
        }
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[c] += added[c];
        const bool last = first_key >= last_key;
        if (last) break;
        first_key += T::kTileKeys;
        multiply_keys();
        if constexpr (!T::kOverlaps) {
          warpgroup_wait<0>();
          warpgroup_fence_operand(scores);
        }
        accumulate_values();
        buffer ^= 1;
        if constexpr (T::kOverlaps) {
          warpgroup_wait<1>();
          warpgroup_fence_operand(scores);
        } else {
          warpgroup_wait<0>();
          warpgroup_fence_operand(output);
        }
      }
      accumulate_values();
      buffer ^= 1;
      warpgroup_wait<0>();
      warpgroup_fence_operand(output);
    }

    // Threads finish one row each, then all write what belongs to it.
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int row = 8 * (c / 2) + 2 * (lane % 4) + c % 2;
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], step);
      if (lane < 4) rows.exchange[warp][row] = sum[c];
    }
    cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);
    const int in_tile = min(T::kRows, s.packed_rows - first_row);
    if (thread < in_tile) {
      float total = 0.0f;
#pragma unroll
      for (int from = 0; from < kGroupWarps; ++from) total += rows.exchange[from][thread];
      const RowNorm norm = {total == 0.0f ? -INFINITY : rows.base[thread], total};
      if (s.whole) {
        const RowOutput<Element> target = row_output<Element>(p, s.request, s.index, s.kv_head, first_row + thread);
        *target.lse = norm.lse();
        rows.output[thread] = {target.out, output_factor(target, norm), norm.sum == 0.0f};
      } else {
        w.partial_norm[int64_t{s.slot} * w.norm_rows + thread] = make_float2(norm.maximum, norm.sum);
      }
    }
    cutlass::arch::NamedBarrier::sync(kGroupThreads, kBarrier);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int row = 8 * (c / 2) + 2 * (lane % 4) + c % 2;
      if (row >= in_tile) continue;
      const OutputRow<Element> target = rows.output[row];
      float* partial = w.partial_output + (int64_t{s.slot} * w.tile_rows + row) * T::kHeadDim;
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        const int d = 64 * m + 16 * warp + lane / 4 * 2;
        const float first = output(kScores * m + 4 * (c / 2) + c % 2);
        const float second = output(kScores * m + 4 * (c / 2) + 2 + c % 2);
        if (!s.whole) {
          *reinterpret_cast<float2*>(partial + d) = make_float2(first, second);
        } else if (d < p.cache.head_dim) {
          target.out[d] = portable::from_float<Element>(target.keyless ? 0.0f : first * target.factor);
          target.out[d + 1] = portable::from_float<Element>(target.keyless ? 0.0f : second * target.factor);
        }
      }
    }
  }
}

}  // namespace vegas_ops::hopper
