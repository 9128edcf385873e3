// The rules of value_check.h on a GPU: one launch, and the host waits for it.
#pragma once

#include <cuda_runtime.h>

#include <mutex>

#include "common/value_check.h"

namespace vegas_ops {

constexpr int kCheckThreads = 1024;

template <class Values>
__device__ Fault found_fault;

template <class Values>
__global__ void __launch_bounds__(kCheckThreads) find_fault(Values values) {
  __shared__ unsigned long long first;
  const int64_t count = values.count();
  if (threadIdx.x == 0) {
    first = count;
    found_fault<Values>.value = Value::kNone;
  }
  __syncthreads();
  Fault mine;
  int64_t i = threadIdx.x;
  while (i < count && !values.find(i, &mine)) i += kCheckThreads;
  if (i < count) atomicMin(&first, static_cast<unsigned long long>(i));
  __syncthreads();
  if (i < count && first == static_cast<unsigned long long>(i)) found_fault<Values> = mine;
}

template <class Values>
int check_device_values(const Values& values, void* stream_handle, const char* op) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  cudaStreamCaptureStatus capture;
  cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  if (error == cudaSuccess && capture != cudaStreamCaptureStatusNone) {
    return fail(VEGAS_UNSUPPORTED,
                "%s: VEGAS_OPS_CHECK=1 waits for the device, which a stream under capture cannot; unset it, or run "
                "without CUDA graphs",
                op);
  }
  Fault fault = {};
  if (error == cudaSuccess) {
    static std::mutex one_at_a_time;  // for there is one place for a verdict
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    find_fault<<<1, kCheckThreads, 0, stream>>>(values);
    error = cudaGetLastError();
    if (error == cudaSuccess) {
      error = cudaMemcpyFromSymbolAsync(&fault, found_fault<Values>, sizeof fault, 0, cudaMemcpyDeviceToHost, stream);
    }
    const cudaError_t waited = cudaStreamSynchronize(stream);
    if (error == cudaSuccess) error = waited;
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // returned here, so the next call must not find it
    return fail(VEGAS_CUDA_ERROR, "%s: the check of its values failed: %s", op, cudaGetErrorString(error));
  }
  return fault.value == Value::kNone ? int{VEGAS_OK} : report(fault);
}

}  // namespace vegas_ops
