#include "common/dispatch.h"

int vegas_topk_aggregate_logits(const VegasSelectParams* params, VegasDevice device, void* stream) {
  const VegasSelectParams& p = *params;
  return vegas_ops::dispatch(p, device, stream, vegas_ops::cpu_kernels().select, VEGAS_CUDA_KERNEL(select_portable));
}

int vegas_aggregate_logits(const VegasSelectParams* params, VegasDevice device, void* stream) {
  const VegasSelectParams& p = *params;
  return vegas_ops::dispatch(p, device, stream, vegas_ops::cpu_kernels().aggregate,
                             VEGAS_CUDA_KERNEL(aggregate_portable));
}
