#include "common/backends.h"
#include "common/value_check.cuh"
#include "verify/values.h"

namespace vegas_ops {

int verify_values_cuda(const VegasVerifyParams& p, void* stream) {
  return check_device_values(VerifyValues{p}, stream, "flash_attn_with_logit_dump");
}

}  // namespace vegas_ops
