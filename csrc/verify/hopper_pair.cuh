// How two CTAs, a cluster, add up their KV heads' parts of a summed dump: one sends its parts to the other, which adds
// its own and writes.
//
// Among all the reads, writing a part to memory costs several times what its bytes do. The receiver looks one tile
// further back than the sender, so that mail has the time of a tile to arrive.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "verify/hopper_traits.cuh"

namespace vegas_ops::hopper {

// Makes the barriers of mail known to the pair, by all threads of both CTAs; before the first mail, await_pair.
__device__ __forceinline__ void join_pair() { cute::cluster_arrive_relaxed(); }
__device__ __forceinline__ void await_pair() { cute::cluster_wait(); }
// Called by the guide warps at their end: a CTA stays until nobody sends to it. Threads that have exited do not count.
__device__ __forceinline__ void leave_pair() {
  cute::cluster_arrive();
  cute::cluster_wait();
}

// A guide warp's side of it. A lane looks after kOwnKeys keys of every tile.
template <class T, int kOwnKeys>
class PairedDump {
 public:
  __device__ __forceinline__ PairedDump(SharedMemory<T>& shared, int guide_warp)
      : mail_(shared.mail[guide_warp]), receives_(blockIdx.x % 2) {}

  __device__ __forceinline__ bool receives() const { return receives_; }

  // Sends this lane's parts of the next tile. `place` is that of the first of its keys, 8 apart.
  __device__ __forceinline__ void send(int place, const float (&parts)[kOwnKeys]) {
    wait_barrier(mail_.empty[ring_.stage], ring_.phase ^ 1);
#pragma unroll
    for (int i = 0; i < kOwnKeys; ++i) {
      cute::store_shared_remote(__float_as_uint(parts[i]),
                                cute::cast_smem_ptr_to_uint(&mail_.parts[ring_.stage][place + 8 * i]),
                                cute::cast_smem_ptr_to_uint(&mail_.full[ring_.stage]), 1);
    }
    ring_.advance();
  }

  // Adds what was sent for the next tile.
  __device__ __forceinline__ void receive(int place, float (&parts)[kOwnKeys]) {
    using Barrier = cutlass::arch::ClusterTransactionBarrier;
    const bool first_lane = threadIdx.x % 32 == 0;
    if (first_lane) Barrier::arrive_and_expect_tx(&mail_.full[ring_.stage], 32 * kOwnKeys * sizeof(float));
    wait_barrier(mail_.full[ring_.stage], ring_.phase);
#pragma unroll
    for (int i = 0; i < kOwnKeys; ++i) {
      const float sent = mail_.parts[ring_.stage][place + 8 * i];
      parts[i] = sent == -INFINITY || parts[i] == -INFINITY ? -INFINITY : sent + parts[i];
    }
    __syncwarp();
    asm volatile("" ::: "memory");
    if (first_lane) Barrier::arrive(&mail_.empty[ring_.stage], 0, true);
    ring_.advance();
  }

 private:
  Mail<T>& mail_;
  const bool receives_;
  RingPosition<T::kMailSlots> ring_;
};

}  // namespace vegas_ops::hopper
