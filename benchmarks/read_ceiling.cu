// The fastest plain read of global memory: the floor that the benchmarks measure against.
// Compiled at run time by harness.py with nvcc, called through ctypes.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace {

constexpr int kThreads = 512;

// Every byte is used once, so the loads keep out of L1.
__device__ __forceinline__ uint4 load_once(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

template <int kLoadsInFlight>
__global__ void __launch_bounds__(kThreads) read_all(const uint4* data, size_t count, uint32_t* sink) {
  constexpr size_t kTile = size_t{kThreads} * kLoadsInFlight;
  uint32_t folded = 0;
  for (size_t tile = blockIdx.x * kTile; tile < count; tile += gridDim.x * kTile) {
    uint4 values[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const size_t index = tile + size_t{kThreads} * i + threadIdx.x;
      values[i] = index < count ? load_once(data + index) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) folded ^= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
  }
  // Practically never true, but the compiler must keep the loads for it.
  if (folded == 0x5eed5eedu) *sink = folded;
}

}  // namespace

// Reads `bytes` (a multiple of 16) from 16-byte-aligned `data`; `sink` is one writable word. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int vegas_read_all(const void* data, size_t bytes, void* sink,
                                                                     int blocks, int loads_in_flight,
                                                                     cudaStream_t stream) {
  const auto* words = static_cast<const uint4*>(data);
  auto* word = static_cast<uint32_t*>(sink);
  if (loads_in_flight == 8) {
    read_all<8><<<blocks, kThreads, 0, stream>>>(words, bytes / sizeof(uint4), word);
  } else {
    read_all<4><<<blocks, kThreads, 0, stream>>>(words, bytes / sizeof(uint4), word);
  }
  return static_cast<int>(cudaGetLastError());
}
