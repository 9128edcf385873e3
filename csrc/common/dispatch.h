// First and last step of every op's check.cpp: what all calls must get right, and the hand-over of the checked
// arguments to the kernels of a device.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "common/backends.h"
#include "common/status.h"

namespace vegas_ops {

inline int check_call(const void* params, VegasDevice device) {
  VEGAS_CHECK(params, "`params` must be given, got NULL");
  VEGAS_CHECK(device == VEGAS_CPU || device == VEGAS_CUDA, "`device` must be VEGAS_CPU or VEGAS_CUDA, got %d",
              int(device));
  return VEGAS_OK;
}

inline int check_workspace(const void* workspace) {
  VEGAS_CHECK(reinterpret_cast<uintptr_t>(workspace) % 16 == 0, "`workspace` must be aligned to 16 bytes, got %p",
              workspace);
  return VEGAS_OK;
}

template <class Params>
using CudaKernel = int (*)(const Params&, void* stream);

template <class Params>
int dispatch(const Params& params, VegasDevice device, void* stream, int (*cpu)(const Params&),
             std::common_type_t<CudaKernel<Params>> cuda) {
  if (device == VEGAS_CPU) return cpu(params);
  if (!cuda) return fail(VEGAS_UNSUPPORTED, "this build of vegas_ops has no CUDA kernels; rebuild with VEGAS_CUDA=ON");
  return cuda(params, stream);
}

}  // namespace vegas_ops

#ifdef VEGAS_WITH_CUDA
#define VEGAS_CUDA_KERNEL(name) ::vegas_ops::name
#else
#define VEGAS_CUDA_KERNEL(name) nullptr
#endif
