// Verify attention for Hopper: wgmma over tiles of keys that two warps load (TMA boxes, or cp.async by the row).
//
// A CTA is persistent and takes one contiguous share of all units of work, so every SM reads the same number of bytes.
// Its first warpgroup feeds a ring of K and a ring of V tiles (warps 0 and 1) and multiplies the guide rows (warps 2
// and 3, mma.sync), off everyone's critical path. Each other warpgroup owns 64 packed rows: scores of the next tile are
// multiplied while this tile's values are accumulated. docs/attention.md draws the schedule beside its roofline.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include "verify/hopper_fp8.cuh"
#include "verify/hopper_guides.cuh"
#include "verify/hopper_load.cuh"
#include "verify/hopper_rows.cuh"

namespace vegas_ops::hopper {

constexpr float kMostWeight = 4096.0f;  // of a lane's keys of a tile together, relative to the row's reference

// A warpgroup that owns 64 packed rows.
template <class T>
__device__ __forceinline__ void attend_rows(const VegasVerifyParams& p, const Workspace& w, const CacheBoxes& boxes,
                                            SharedMemory<T>& shared) {
  using namespace cute;
  using Element = typename T::Element;
  using Mma = typename T::Mma;
  const int group = cutlass::canonical_warp_group_idx() - 1;
  const int thread = threadIdx.x % kGroupThreads;
  const int warp = cutlass::canonical_warp_idx_sync() % kGroupWarps;
  const int lane = thread % 32;

  typename T::QkMma qk;
  typename T::PvMma pv;
  const auto thread_qk = qk.get_thread_slice(thread);
  const auto thread_pv = pv.get_thread_slice(thread);
  // Element 4n + 2i + j: row of i, key or column 8n + 2 * (lane % 4) + j.
  Tensor scores = partition_fragment_C(qk, Shape<_64, Int<T::kTileKeys>>{});
  Tensor output = partition_fragment_C(pv, Shape<_64, Int<T::kHeadDim>>{});
  constexpr int kScores = decltype(size(scores))::value;
  constexpr int kOutputs = decltype(size(output))::value;
  static_assert(kScores == T::kTileKeys / 2 && kOutputs == T::kHeadDim / 2);
  Tensor weights = make_tensor<Mma>(partition_shape_A(pv, Shape<_64, Int<T::kTileKeys>>{}));
  static_assert(decltype(size(weights))::value == kScores);

  const auto shared_query = [&]() __attribute__((always_inline)) {
    // Descriptors are made anew for every tile: kept, they would cost the registers of a quarter of the scores.
    int own_group = group;
    asm volatile("" : "+r"(own_group));
    return make_tensor(make_smem_ptr(reinterpret_cast<Mma*>(shared.rows.query[own_group])), typename T::QueryLayout{});
  };
  Tensor own_query =
      make_tensor<Mma>(partition_shape_A(qk, Shape<_64, Int<T::kQueryInRegisters ? T::kHeadDim : 16>>{}));
  const auto multiply_keys = [&](int stage) __attribute__((always_inline)) {
    const Tensor query = [&] {
      if constexpr (T::kQueryInRegisters) {
        return own_query;
      } else {
        return thread_qk.partition_fragment_A(shared_query());
      }
    }();
    const Tensor tile = make_tensor(make_smem_ptr(reinterpret_cast<Mma*>(shared.keys[stage])), typename T::KeyLayout{});
    multiply_tiles(qk, query, thread_qk.partition_fragment_B(tile), scores, GMMA::ScaleOut::Zero);
  };
  const auto accumulate_values = [&](int stage) __attribute__((always_inline)) {
    const Tensor tile =
        make_tensor(make_smem_ptr(reinterpret_cast<Mma*>(shared.values[stage])), typename T::ValueLayout{});
    warpgroup_fence_operand(weights);
    multiply_tiles(pv, weights, thread_pv.partition_fragment_B(tile), output, GMMA::ScaleOut::One);
  };
  // What cp.async has written is handed over to the tensor cores, unless the loading warp did it.
  const auto hand_over = [&]() __attribute__((always_inline)) {
    if (boxes.box == 0) cutlass::arch::fence_view_async_shared();
  };

  // Row groups that both have rows issue their products in turns.
  const auto await_turn = [&](bool both) __attribute__((always_inline)) {
    if (T::kTurns && both) cutlass::arch::NamedBarrier::sync(2 * kGroupThreads, kTurnBarrier + group);
  };
  const auto pass_turn = [&](bool both) __attribute__((always_inline)) {
    if (T::kTurns && both) cutlass::arch::NamedBarrier::arrive(2 * kGroupThreads, kTurnBarrier + 1 - group);
  };
  pass_turn(group == 1);

  // The guide warps get the products of a tile with the guide rows.
  const bool token = p.dump == VEGAS_DUMP_TOKEN;
  unsigned handed = 0;  // tiles
  const auto hand_products = [&](const KeyMask<T::kTileKeys>& valid) __attribute__((always_inline)) {
    if constexpr (T::kGuidesInRows) {
      const int slot = handed % T::kGuideSlots;
      wait_barrier(shared.guide_empty[slot], ~handed / T::kGuideSlots & 1);
      ++handed;
      // Queries in registers were read from where the products go.
      if (T::kQueryInRegisters) __syncwarp();
      float* products = shared.rows.guide_products(slot, lane / 4 % 2) + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kScores / 4; ++n) {
        float2 both = make_float2(scores(4 * n), scores(4 * n + 1));
        if (token) {
          // Its four terms are rows of neighbours.
#pragma unroll
          for (int step = 4; step <= 8; step *= 2) {
            both.x += __shfl_xor_sync(0xffffffffu, both.x, step);
            both.y += __shfl_xor_sync(0xffffffffu, both.y, step);
          }
        }
        if (lane < 8) *reinterpret_cast<float2*>(products + 8 * n) = both;
      }
      if (lane == 0) shared.guide_valid[slot] = valid;
      arrive_barrier(shared.guide_full[slot]);
    }
  };

  RingPosition<T::kStages> ring;
  SegmentReader<T> segments = {shared};
  for (const Segment* next; (next = segments.next()); segments.done()) {
    const Segment& s = *next;
    const int first_row = s.row_tile * T::kRows + 64 * group;
    const bool guided = guides_in_rows<T>(w) && s.request.num_guides > 0;
    const bool both = s.row_tile * T::kRows + 64 < s.packed_rows || guided;
    if (first_row >= s.packed_rows && !(guided && group == T::kRowGroups - 1)) {
      for (int tile = s.first_tile; tile < s.end_tile; ++tile) {
        wait_barrier(shared.keys_full[ring.stage], ring.phase);
        arrive_barrier(shared.keys_empty[ring.stage]);
        wait_barrier(shared.values_full[ring.stage], ring.phase);
        arrive_barrier(shared.values_empty[ring.stage]);
        ring.advance();
      }
      continue;
    }

    cutlass::arch::NamedBarrier::sync(kGroupThreads, 1 + group);  // the last segment's query is read no more
    const bool has_guides = guides_in_rows<T>(w) && group == T::kRowGroups - 1 && 16 * warp == kFirstGuideRow;
    const bool hands = has_guides && guided;
    if (has_guides) {
      if constexpr (T::kGuidesInRows) {
        const int segments = hands ? (token ? portable::kGuideColumns : 2) * T::kSegments : 0;
#pragma unroll 1
        for (int task = lane; task < segments; task += 32) {
          const int guide = task / T::kSegments;
          const int segment = task % T::kSegments;
          uint4 made[1];
          if (token) {
            portable::guide_column<Element>(p, s.request, s.kv_head, guide, segment, made);
          } else {
            made[0] = guide_segment<Element>(p, s.request, s.kv_head, min(guide, s.request.num_guides - 1), segment);
          }
          *reinterpret_cast<uint4*>(shared.rows.query[group] + swizzled_offset<64>(kFirstGuideRow + guide, segment)) =
              made[0];
        }
      }
    } else {
      // Two threads per row.
      constexpr int kCopies = T::kSegments / 2;
      const int row = thread / 2;
      const int first_segment = thread % 2 * kCopies;
      const bool exists = first_row + row < s.packed_rows;
      const PackedRow packed(p, s.request, s.kv_head, exists ? first_row + row : first_row);
      const Element* source = static_cast<const Element*>(p.q) +
                              (s.request.q_begin + int64_t{packed.query}) * p.q_stride_row +
                              packed.head * p.q_stride_head + first_segment * 8;
      const int copies = exists ? min(kCopies, p.cache.head_dim / 8 - first_segment) : 0;
      uint4 loaded[kCopies];
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        loaded[i] = i < copies ? *reinterpret_cast<const uint4*>(source + i * 8) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        *reinterpret_cast<uint4*>(shared.rows.query[group] + swizzled_offset<64>(row, first_segment + i)) = loaded[i];
      }
    }
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kGroupThreads, 1 + group);

    if constexpr (T::kQueryInRegisters) copy(thread_qk.partition_A(shared_query()), own_query);

    const bool warp_in_use = first_row + 16 * warp < s.packed_rows;
    // This lane's rows are own_row and 8 further; a row that does not exist is masked like the last.
    const int own_row = first_row + 16 * warp + lane / 4;
    const float scale = p.softmax_scale * portable::descale_of(p.cache.k, s.index, s.kv_head);
    // Capped or oddly scaled logits are formed before the softmax, not within it; capped ones in units of the cap.
    const bool capped = p.softcap > 0.0f;
    const bool forms_logits = capped || !(scale > 0.0f);
    const float to_logit = capped ? scale / p.softcap : scale;
    const Cap cap(to_logit);
    const float to_log2 = capped ? p.softcap * kLog2e : forms_logits ? kLog2e : scale * kLog2e;
    float reference[2] = {-INFINITY, -INFINITY};  // of the weights, log2 units
    float base[2] = {0.0f, 0.0f};                 // it, or 0 of a row that has seen no key yet
    float sum[2] = {0.0f, 0.0f};                  // of this lane's columns
    clear(output);
    clear(weights);  // of rows that are not in use
    const int first_full_key = s.request.first_full_key;
    const int last_full_key = s.request.last_full_key;
    // Most tiles of most calls need none of it.
    const auto mask_scores = [&](int first_key, const KeyMask<T::kTileKeys>& valid) __attribute__((always_inline)) {
      // Keys of this lane's columns that a row sees, relative to its first column.
      int first_seen[2];
      int last_seen[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const PackedRow packed(p, s.request, s.kv_head, min(own_row + 8 * i, s.packed_rows - 1));
        s.visible(packed.query, first_seen[i], last_seen[i]);
        first_seen[i] -= first_key + 2 * (lane % 4);
        last_seen[i] -= first_key + 2 * (lane % 4);
      }
#pragma unroll
      for (int c = 0; c < kScores; ++c) {
        const int i = c / 2 % 2;
        const int column = 8 * (c / 4) + c % 2;
        const bool exists = valid.words[column / 32] >> 2 * (lane % 4) >> column % 32 & 1;
        if (!exists || column < first_seen[i] || column > last_seen[i]) scores(c) = -INFINITY;
      }
    };
    // Pairs [begin, end) of the weights, of neighbouring columns, of the lane's rows in turn; and what they add up to.
    float added[2][2];
    const auto weigh_pairs = [&](int begin, int end, uint32_t* pairs) __attribute__((always_inline)) {
#pragma unroll
      for (int pair = begin; pair < end; ++pair) {
        const int i = pair % 2;
        float weight[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          weight[j] = exp2_approx(fmaf(scores(2 * pair + j), to_log2, -base[i]));
          added[i][j] = pair < 2 ? weight[j] : added[i][j] + weight[j];
        }
        pairs[pair - begin] = portable::pack<Element>(weight[0], weight[1]);
      }
    };
    uint32_t early[T::kEarlyPairs + 1];
    // Weights are relative to a reference that moves, and the output with it, only where it must: then they are made
    // anew. The first tile's reference is its maximum.
    const auto weigh = [&](bool first) __attribute__((always_inline)) {
      uint32_t* packed = reinterpret_cast<uint32_t*>(weights.data());
      bool exceeds[2] = {true, true};
      if (!first) {
#pragma unroll
        for (int pair = 0; pair < T::kEarlyPairs; ++pair) packed[pair] = early[pair];
        weigh_pairs(T::kEarlyPairs, kScores / 2, packed + T::kEarlyPairs);
#pragma unroll
        for (int i = 0; i < 2; ++i) exceeds[i] = added[i][0] + added[i][1] > kMostWeight || reference[i] == -INFINITY;
      }
      if (__any_sync(0xffffffffu, exceeds[0] || exceeds[1])) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float top = -INFINITY;
          int moves = exceeds[i];
#pragma unroll
          for (int c = 2 * i; c < kScores; c += 4) top = fmaxf(top, fmaxf(scores(c), scores(c + 1)));
#pragma unroll
          for (int step = 1; step < 4; step *= 2) {
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            moves |= __shfl_xor_sync(0xffffffffu, moves, step);
          }
          // A row that has seen no key yet keeps -inf, which must not meet -inf in a difference.
          const float highest = top * to_log2;
          if (!(highest > reference[i])) moves = 0;
          if (moves) base[i] = highest;
          const float factor = moves ? exp2_approx(reference[i] - base[i]) : 1.0f;
          if (moves) reference[i] = highest;
          sum[i] *= factor;
#pragma unroll
          for (int c = 2 * i; c < kOutputs; c += 4) {
            output(c) *= factor;
            output(c + 1) *= factor;
          }
        }
        weigh_pairs(0, kScores / 2, packed);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) sum[i] += added[i][0] + added[i][1];
    };
    if (s.first_tile < s.end_tile) {
      int first_key = s.template key_of<T::kTileKeys>(s.first_tile);
      const int last_key = s.template key_of<T::kTileKeys>(s.end_tile - 1);  // first of the last tile
      wait_barrier(shared.keys_full[ring.stage], ring.phase);
      bool whole = shared.valid[ring.stage].all();
      hand_over();
      multiply_keys(ring.stage);
      warpgroup_wait<0>();
      warpgroup_fence_operand(scores);
      int stage;
      uint32_t phase;
      int previous = -1;  // stage whose values are being accumulated
      while (true) {
        // One tile: its weights, the first of them while the values of the tile before are accumulated, then the scores
        // of the next.
        stage = ring.stage;
        phase = ring.phase;
        if (warp_in_use) {
          if (forms_logits) form_logits<kScores>(scores, cap, to_logit, capped);
          if (!whole || first_key < first_full_key || first_key + T::kTileKeys - 1 > last_full_key) {
            mask_scores(first_key, shared.valid[stage]);
          }
        }
        KeyMask<T::kTileKeys> valid;
        if (hands) valid = shared.valid[stage];
        arrive_barrier(shared.keys_empty[stage]);
        if (hands) hand_products(valid);
        const bool first = previous < 0;
        if (warp_in_use && !first) weigh_pairs(0, T::kEarlyPairs, early);
        warpgroup_wait<0>();
        warpgroup_fence_operand(output);
        if (!first) arrive_barrier(shared.values_empty[previous]);
        previous = stage;
        if (warp_in_use) weigh(first);
        ring.advance();
        if (first_key >= last_key) break;
        first_key += T::kTileKeys;
        wait_barrier(shared.keys_full[ring.stage], ring.phase);
        whole = shared.valid[ring.stage].all();
        hand_over();
        await_turn(both);
        multiply_keys(ring.stage);
        wait_barrier(shared.values_full[stage], phase);
        hand_over();
        accumulate_values(stage);
        pass_turn(both);
        warpgroup_wait<1>();
        warpgroup_fence_operand(scores);
      }
      wait_barrier(shared.values_full[stage], phase);
      hand_over();
      accumulate_values(stage);
      warpgroup_wait<0>();
      warpgroup_fence_operand(output);
      arrive_barrier(shared.values_empty[stage]);
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
      const int in_group = 16 * warp + lane / 4 + 8 * i;
      const int row = first_row + in_group;
      if (row >= s.packed_rows) continue;
      const RowNorm norm = {reference[i], sum[i]};
      if (s.whole) {
        const RowOutput<Element> target = row_output<Element>(p, s.request, s.index, s.kv_head, row);
        if (lane % 4 == 0) *target.lse = norm.lse();
        const float factor = output_factor(target, norm);
#pragma unroll
        for (int n = 0; n < kOutputs / 4; ++n) {
          const int d = 8 * n + 2 * (lane % 4);
          if (d >= p.cache.head_dim) continue;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float value = output(4 * n + 2 * i + j);
            target.out[d + j] = portable::from_float<Element>(norm.sum == 0.0f ? 0.0f : value * factor);
          }
        }
      } else {
        const int64_t at = int64_t{s.slot} * w.tile_rows + 64 * group + in_group;
        if (lane % 4 == 0) {
          w.partial_norm[int64_t{s.slot} * w.norm_rows + 64 * group + in_group] = make_float2(norm.maximum, norm.sum);
        }
#pragma unroll
        for (int n = 0; n < kOutputs / 4; ++n) {
          *reinterpret_cast<float2*>(w.partial_output + at * T::kHeadDim + 8 * n + 2 * (lane % 4)) =
              make_float2(output(4 * n + 2 * i), output(4 * n + 2 * i + 1));
        }
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    verify_kernel(const __grid_constant__ VegasVerifyParams p, const __grid_constant__ Workspace w,
                  const __grid_constant__ CacheBoxes boxes) {
  extern __shared__ __align__(1024) char shared_bytes[];
  SharedMemory<T>& shared = *reinterpret_cast<SharedMemory<T>*>(shared_bytes);
  const bool dumps = p.dump != VEGAS_DUMP_NONE;  // which the guide warps do
  // Of a few requests, a warp finds the CTA's work while the previous launch ends, when lengths may still change. They
  // are looked at again afterwards, while the first keys are on their way.
  const bool guesses = T::kGuesses && threadIdx.x / 32 == kFirstGuideWarp;
  VerifyRequest guessed;
  if (guesses) {
    guessed = lane_request(p, w);
    make_warp_plan(p, w, guessed, shared.share, shared.segments[0], [] {});
  }
  if (threadIdx.x == 0) {
    using cutlass::arch::ClusterBarrier;
    constexpr int kRowThreads = T::kRowGroups * kGroupThreads;
    constexpr int kGuideThreads = 32 * kGuideWarps;
    for (int stage = 0; stage < T::kStages; ++stage) {
      // Of an fp8 cache, the guide warps get products.
      ClusterBarrier::init(&shared.keys_empty[stage],
                           kRowThreads + (dumps && !T::kFp8 && !guides_in_rows<T>(w) ? kGuideThreads : 0));
      ClusterBarrier::init(&shared.values_empty[stage], kRowThreads);
    }
    for (int slot = 0; slot < kSegmentSlots; ++slot) {
      ClusterBarrier::init(&shared.segment_full[slot], 1);
      ClusterBarrier::init(&shared.segment_empty[slot], 2 * 32 + kRowThreads + (dumps ? kGuideThreads : 0));
    }
    if constexpr (T::kFp8) {
      ClusterBarrier::init(&shared.rows.guides_ready, kGuideThreads);
      for (int slot = 0; slot < T::kGuideSlots; ++slot) {
        ClusterBarrier::init(&shared.guide_full[slot], kGroupThreads);
        ClusterBarrier::init(&shared.guide_empty[slot], kGuideThreads);
      }
    }
    if constexpr (T::kGuidesInRows) {
      for (int slot = 0; slot < T::kGuideSlots; ++slot) {
        ClusterBarrier::init(&shared.guide_full[slot], 32);
        ClusterBarrier::init(&shared.guide_empty[slot], kGuideThreads);
      }
    }
    init_full_barriers(shared);
    if (boxes.box > 0) {
      cute::prefetch_tma_descriptor(&boxes.k);
      cute::prefetch_tma_descriptor(&boxes.v);
    }
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    if (guesses) {
      judge_guess(p, w, shared, guessed);
    } else if (!T::kGuesses) {
      cudaGridDependencySynchronize();
      cudaTriggerProgrammaticLaunchCompletion();
      static_assert(kPlanThreads == kGroupThreads);
      const auto sync = [] { cutlass::arch::NamedBarrier::sync(kGroupThreads, kProducerBarrier); };
      make_plan(p, w, shared.share, shared.segments[0], reinterpret_cast<int*>(shared.guide_norm), sync,
                [&] { arrive_barrier(shared.segment_full[0]); });
    }
    if (threadIdx.x / 32 < kFirstGuideWarp) {
      load_tiles<T>(p, w, boxes, shared);
    } else if (p.dump == VEGAS_DUMP_ROWS) {
      if constexpr (T::kDumpsRows) dump_rows<T>(p, shared);
    } else if (dumps) {
      if constexpr (T::kFp8 || (T::kGuesses && T::kGuidesInRows)) {
        multiply_guides<T, true>(p, w, shared);
      } else if (guides_in_rows<T>(w)) {
        if constexpr (T::kGuidesInRows) multiply_guides<T, true>(p, w, shared);
      } else {
        multiply_guides<T, false>(p, w, shared);
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    if constexpr (T::kFp8) {
      ColumnAttention<T>(p, w, shared).attend();
    } else {
      attend_rows<T>(p, w, boxes, shared);
    }
  }
}

}  // namespace vegas_ops::hopper
