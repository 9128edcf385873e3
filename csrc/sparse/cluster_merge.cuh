// Where the CTAs that attend a request for one KV head are a cluster (from sm_90), each of them adds up a share of the
// output's columns, from the parts that the warps of all have left in shared memory.
#pragma once

#include "sparse/head_tile.cuh"
#include "sparse/row_pair.cuh"
#include "sparse/segments.cuh"

namespace vegas_ops::portable {

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// What lies at this place in the shared memory of another CTA of the cluster.
__device__ __forceinline__ float2 load_remote(const void* place, int rank) {
  float2 pair = make_float2(0.0f, 0.0f);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(place))), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
#endif
  return pair;
}

// Called by all threads of a cluster, each warp of which has left its part.
template <class T, class Shared>
__device__ __forceinline__ void merge_cluster(const VegasSparseParams& p, const SparsePlan& plan, const Shared& shared,
                                              int request, int kv_head, int first_head, int heads) {
  constexpr int kPairs = T::kHeadDim / 2;
  const int pairs = heads * kPairs;
  const int per_cta = ceil_div(pairs, plan.cluster);
  const int first_pair = cluster_rank() * per_cta;
  float4* of_ctas = reinterpret_cast<float4*>(shared.base);  // (CTA, pair): norm, two columns
  cluster_arrive();
  const float v_descale = descale_of(p.cache.v, request, kv_head);
  cluster_wait();
#pragma unroll 1
  for (int item = threadIdx.x; item < per_cta * plan.cluster; item += blockDim.x) {
    const int cta = __float2int_rz(__fdividef(item + 0.5f, static_cast<float>(per_cta)));
    const int pair = min(first_pair + item - cta * per_cta, pairs - 1);
    const int row = pair / kPairs;
    const int d = pair % kPairs * 2;
    float2 norms[kSparseMaxWarps];
    float2 values[kSparseMaxWarps];
#pragma unroll
    for (int i = 0; i < kSparseMaxWarps; ++i) {
      const int warp = min(i, shared.warps - 1);
      norms[i] = load_remote(shared.norms(0, warp) + row, cta);
      values[i] = load_remote(shared.output(0, warp) + row_place<T>(row, d), cta);
    }
    RowPair sum = {{-INFINITY, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < kSparseMaxWarps; ++i) {
      if (i >= shared.warps) norms[i] = make_float2(-INFINITY, 0.0f);
      sum.norm.maximum = fmaxf(sum.norm.maximum, norms[i].x);
    }
#pragma unroll
    for (int i = 0; i < kSparseMaxWarps; ++i) sum.add({norms[i].x, norms[i].y}, values[i]);
    of_ctas[item] = make_float4(sum.norm.maximum, sum.norm.sum, sum.value.x, sum.value.y);
  }
  cluster_arrive();
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < min(per_cta, pairs - first_pair); i += blockDim.x) {
    const int row = (first_pair + i) / kPairs;
    const int head = first_head + row;
    const float sink_logit = p.sinks ? p.sinks[head] : -INFINITY;
    RowPair sum = {{-INFINITY, 0.0f}, {0.0f, 0.0f}};
    float4 parts[kMaxCluster];
#pragma unroll
    for (int cta = 0; cta < kMaxCluster; ++cta) {
      parts[cta] = of_ctas[min(cta, plan.cluster - 1) * per_cta + i];
      if (cta >= plan.cluster) parts[cta] = make_float4(-INFINITY, 0.0f, 0.0f, 0.0f);
      sum.norm.maximum = fmaxf(sum.norm.maximum, parts[cta].x);
    }
#pragma unroll
    for (int cta = 0; cta < kMaxCluster; ++cta) {
      sum.add({parts[cta].x, parts[cta].y}, make_float2(parts[cta].z, parts[cta].w));
    }
    write_pair<T>(p, request, head, (first_pair + i) % kPairs * 2, sum, sink_logit, v_descale);
  }
  // No CTA leaves before the others have read its parts.
  cluster_wait();
}

}  // namespace vegas_ops::portable
