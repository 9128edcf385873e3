// C interface of libvegas.so. Every function returns 0, or a VegasStatus after which
// vegas_last_error() explains, naming the argument; outputs are then untouched.
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
} VegasStatus;

// `stream` is a cudaStream_t for VEGAS_CUDA and ignored for VEGAS_CPU. Nothing is allocated, no host
// synchronisation takes place, and the current device is the caller's affair.
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
// Name of the kernel that serves an op on a device ("portable", "sm90", "cpu-x86-64-v4", ...), or NULL.
VEGAS_API const char* vegas_kernel_name(VegasOp op, VegasDevice device);

#ifdef __cplusplus
}
#endif
