// Entry points of the kernels behind each op. Arguments have been checked; each returns a VegasStatus.
#pragma once

#include "vegas_ops/api.h"

namespace vegas_ops {

// One table per instruction set: the same sources are compiled once for each (see cmake/cpu_isa.cmake).
struct CpuKernels {
  const char* isa;  // "x86-64-v4", "x86-64-v3", "baseline"
  int (*verify)(const VegasVerifyParams&);
  int (*select)(const VegasSelectParams&);
  int (*aggregate)(const VegasSelectParams&);
  int (*sparse)(const VegasSparseParams&);
};

// The best table for this processor; the environment variable VEGAS_OPS_ISA forces a lesser one.
const CpuKernels& cpu_kernels();

#ifdef VEGAS_WITH_CUDA
int verify_cuda(const VegasVerifyParams&, void* stream);
size_t verify_cuda_workspace(const VegasBounds&);
// Leaves the first `kept` bytes of the workspace alone.
int verify_portable(const VegasVerifyParams&, size_t kept, void* stream);
int select_cuda(const VegasSelectParams&, void* stream);
int select_portable(const VegasSelectParams&, void* stream);
int aggregate_portable(const VegasSelectParams&, void* stream);
int sparse_portable(const VegasSparseParams&, void* stream);
size_t verify_portable_workspace(const VegasBounds&);
size_t select_portable_workspace(const VegasBounds&);
size_t sparse_portable_workspace(const VegasBounds&);
// The rules of an op's values.h on device data.
int verify_values_cuda(const VegasVerifyParams&, void* stream);
int select_values_cuda(const VegasSelectParams&, void* stream);
int sparse_values_cuda(const VegasSparseParams&, void* stream);
#endif

#ifdef VEGAS_WITH_HOPPER
// The current device is of compute capability 9.0, and VEGAS_OPS_KERNELS=portable is not set.
bool on_hopper();
bool verify_hopper_takes(const VegasVerifyParams&);
int verify_hopper(const VegasVerifyParams&, void* stream);
size_t verify_hopper_workspace(const VegasBounds&);
// At the start of every workspace for verification; zeros between calls.
size_t verify_hopper_ring_bytes();
bool select_hopper_takes(const VegasSelectParams&);
int select_hopper(const VegasSelectParams&, void* stream);
#endif

}  // namespace vegas_ops
