// C interface of libvegas.so. Every op returns VEGAS_OK, or a status that vegas_last_error() explains. An invalid
// or unsupported argument is named there and leaves all outputs untouched; after the other errors outputs are
// undefined.
#pragma once

#include "vegas_ops/params.h"

#if defined(__GNUC__)
#define VEGAS_API __attribute__((visibility("default")))
#else
#define VEGAS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  VEGAS_OK = 0,
  VEGAS_INVALID_ARGUMENT = 1,
  VEGAS_UNSUPPORTED = 2,  // valid, but no kernel of this build serves it
  VEGAS_CUDA_ERROR = 3,
  VEGAS_OUT_OF_MEMORY = 4,  // of the host, for the CPU kernels' intermediate results
} VegasStatus;

// `stream` is a cudaStream_t for VEGAS_CUDA and ignored for VEGAS_CPU. No device memory is allocated, the host
// never waits for the device, and the current device is the caller's affair. Any thread may call; the CPU kernels run
// on OpenMP threads and keep a buffer per calling thread.
VEGAS_API int vegas_flash_attn_with_logit_dump(const VegasVerifyParams* params, VegasDevice device, void* stream);
VEGAS_API int vegas_topk_aggregate_logits(const VegasSelectParams* params, VegasDevice device, void* stream);
VEGAS_API int vegas_aggregate_logits(const VegasSelectParams* params, VegasDevice device, void* stream);
VEGAS_API int vegas_sparse_paged_decode(const VegasSparseParams* params, VegasDevice device, void* stream);

// Bytes of workspace that any call within the bounds needs; 0 where none is needed.
VEGAS_API size_t vegas_workspace_bytes(VegasOp op, const VegasBounds* bounds, VegasDevice device);

// Message of this thread's last failed call.
VEGAS_API const char* vegas_last_error(void);

// Build facts, for `vegas-ops info`.
VEGAS_API const char* vegas_version(void);
VEGAS_API const char* vegas_cpu_isa(void);             // the instruction set that this machine's kernels use
VEGAS_API const char* vegas_cuda_architectures(void);  // "" for a build without CUDA
// Name of the kernels that serve an op on a device ("portable"; on the CPU its instruction set), or NULL.
VEGAS_API const char* vegas_kernel_name(VegasOp op, VegasDevice device);

#ifdef __cplusplus
}
#endif
