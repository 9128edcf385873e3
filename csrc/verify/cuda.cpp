// Which CUDA kernels a verification runs on.
#include <algorithm>

#include "common/backends.h"

namespace vegas_ops {

int verify_cuda(const VegasVerifyParams& p, void* stream) {
#ifdef VEGAS_WITH_HOPPER
  if (on_hopper()) {
    return verify_hopper_takes(p) ? verify_hopper(p, stream) : verify_portable(p, verify_hopper_ring_bytes(), stream);
  }
#endif
  return verify_portable(p, 0, stream);
}

size_t verify_cuda_workspace(const VegasBounds& bounds) {
  size_t bytes = verify_portable_workspace(bounds);
#ifdef VEGAS_WITH_HOPPER
  // What the Hopper kernels do not take goes to the portable ones, which leave alone what must stay zero for them.
  if (on_hopper() && bytes > 0) bytes = std::max(bytes + verify_hopper_ring_bytes(), verify_hopper_workspace(bounds));
#endif
  return bytes;
}

}  // namespace vegas_ops
