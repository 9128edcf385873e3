#include <algorithm>

#include "common/backends.h"
#include "common/value_check.cuh"
#include "verify/values.h"

namespace vegas_ops {

int verify_values_cuda(const VegasVerifyParams& p, void* stream) {
  size_t zeros = 0;
#ifdef VEGAS_WITH_HOPPER
  if (on_hopper() && p.workspace) zeros = std::min(p.workspace_bytes, verify_hopper_ring_bytes());
#endif
  const VerifyValues values = {p, static_cast<int64_t>(zeros / sizeof(int32_t))};
  return check_device_values(values, stream, "flash_attn_with_logit_dump");
}

}  // namespace vegas_ops
