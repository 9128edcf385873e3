#include "common/dispatch.h"

int vegas_flash_attn_with_logit_dump(const VegasVerifyParams* params, VegasDevice device, void* stream) {
  const VegasVerifyParams& p = *params;
  return vegas_ops::dispatch(p, device, stream, vegas_ops::cpu_kernels().verify, VEGAS_CUDA_KERNEL(verify_portable));
}
