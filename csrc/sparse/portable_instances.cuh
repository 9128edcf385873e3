// Body of portable_bf16.cu and portable_fp16.cu: the kernels of one query type.
#pragma once

#include <atomic>

#include "common/portable_launch.cuh"
#include "sparse/portable.cuh"
#include "sparse/portable_launch.h"

namespace vegas_ops::portable {

// Of a warp of eight: memory needs no more at once, and the rest is left to the launches before and after.
constexpr int kBytesInFlight = 12 * 1024;

template <class Element, bool kFp8, int kHeadDim, class Use>
auto with_calls(Calls calls, const Use& use) {
  if constexpr (!kFp8) {
    if (calls == Calls::kFew) return use(HeadTraits<Element, kFp8, kHeadDim, 1, Calls::kFew>());
    if (calls == Calls::kSlots) return use(HeadTraits<Element, kFp8, kHeadDim, 1, Calls::kSlots>());
  }
  return use(HeadTraits<Element, kFp8, kHeadDim, 1>());
}

// Calls use(HeadTraits) of the kernel that serves the call.
template <class Element, bool kFp8, class Use>
auto with_instance(const VegasSparseParams& p, Calls calls, const Use& use) {
  const bool wide = head_tiles_for(p.num_heads_q / p.cache.num_heads_kv, p.cache.head_dim) == 2;
  switch (padded_head_dim(p.cache.head_dim)) {
    case 64:
      if (wide) return use(HeadTraits<Element, kFp8, 64, 2>());
      return with_calls<Element, kFp8, 64>(calls, use);
    case 128:
      if (wide) return use(HeadTraits<Element, kFp8, 128, 2>());
      return with_calls<Element, kFp8, 128>(calls, use);
    default:
      return use(HeadTraits<Element, kFp8, 256, 1>());
  }
}

template <class Element, class Use>
auto with_instance(const VegasSparseParams& p, Calls calls, const Use& use) {
  return p.cache.dtype == VEGAS_FP8_E4M3 ? with_instance<Element, true>(p, calls, use)
                                         : with_instance<Element, false>(p, calls, use);
}

// As many warps as fit with two stages each, then as many stages as are of use. Where CTAs have several segments, after
// each of which their warps meet, two smaller CTAs are faster.
template <class Element>
SparseCta sparse_cta(const VegasSparseParams& p, const SparseDevice& device) {
  return with_instance<Element>(p, Calls::kAny, [&](auto traits) {
    using T = decltype(traits);
    const int group = p.num_heads_q / p.cache.num_heads_kv;
    const int rows = group < T::kHeads ? group : T::kHeads;
    const auto most_stages = [&](int warps, int bytes, int limit = kSparseMaxStages) {
      int stages = limit;
      while (stages > 0 && SparseShared<T>::bytes(warps, stages, rows) > bytes) --stages;
      return stages;
    };
    const bool balanced = split_rule(p.num_splits, p.batch_invariant).mode == SplitMode::kBalanced;
    const int64_t pairs = int64_t{p.batch} * p.cache.num_heads_kv * ceil_div(group, T::kHeads);
    const int half = most_stages(kSparseMaxWarps / 2, device.shared_per_half);
    if (balanced && pairs > device.multiprocessors && half >= 3) return SparseCta{kSparseMaxWarps / 2, half, 2};
    const int useful = kBytesInFlight / T::kStageBytes;
    const int limit = useful < 3 ? 3 : useful < kSparseMaxStages ? useful : kSparseMaxStages;
    for (int warps = kSparseMaxWarps; warps > 0; warps /= 2) {
      const int stages = most_stages(warps, device.shared_per_cta, limit);
      if (stages >= 2) return SparseCta{warps, stages, 1};
    }
    return SparseCta{0, 0, 0};
  });
}

// How the kernel is launched, but for its grid and stream.
template <class T>
struct SparseLaunch {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2] = {};
  cudaError_t error;

  SparseLaunch(const SparseDevice& device, const SparseCta& cta, int rows, int cluster) {
    config.blockDim = 32 * cta.warps;
    config.dynamicSmemBytes = SparseShared<T>::bytes(cta.warps, cta.stages, rows);
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {1, static_cast<unsigned>(cluster), 1};
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : device.dependent_launch ? 1 : 0;
    // The same for every call, since threads of the host share it.
    error = cudaFuncSetAttribute(sparse_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_per_cta);
    if (error != cudaSuccess) return;
    // Left alone, the driver may give an SM's memory to the L1 cache and leave room for one CTA.
    error = cudaFuncSetAttribute(sparse_kernel<T>, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  SparseLaunch(const SparseLaunch&) = delete;  // `config` points into it
};

// Asked once: the answer is about the device's layout, for a multiprocessor has one CTA. Other devices of the process
// are taken to be alike, which costs time if they are not.
template <class Element>
int clusters_at_once(const VegasSparseParams& p, const SparseDevice& device, const SparseCta& cta, int rows, int ctas) {
  return with_instance<Element>(p, Calls::kAny, [&](auto traits) {
    using T = decltype(traits);
    static std::atomic<int> known[kMaxCluster + 1];  // one more than the answer; 0 until it is there
    int count = known[ctas].load(std::memory_order_relaxed) - 1;
    if (count >= 0) return count;
    SparseLaunch<T> launch(device, cta, rows, ctas);
    launch.config.gridDim = dim3(1, ctas);
    if (launch.error != cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&count, sparse_kernel<T>, &launch.config) != cudaSuccess) {
      cudaGetLastError();  // the call goes on without clusters
      count = 0;
    }
    known[ctas].store(count + 1, std::memory_order_relaxed);
    return count;
  });
}

template <class Element>
cudaError_t launch_sparse(const VegasSparseParams& p, const SparsePlan& plan, const SparseDevice& device,
                          const SparseCta& cta, int team, int teams, cudaStream_t stream) {
  return with_instance<Element>(p, plan.calls, [&](auto traits) {
    using T = decltype(traits);
    SparseLaunch<T> launch(device, cta, plan.rows, plan.cluster);
    if (launch.error != cudaSuccess) return launch.error;
    launch.config.gridDim = dim3(team, teams);
    launch.config.stream = stream;
    int warps_log2 = 0;
    while (1 << warps_log2 < cta.warps) ++warps_log2;
    return cudaLaunchKernelEx(&launch.config, sparse_kernel<T>, p, plan, cta.stages, warps_log2);
  });
}

}  // namespace vegas_ops::portable
