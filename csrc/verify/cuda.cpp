// Which CUDA kernels a verification runs on.
#include "common/backends.h"

namespace vegas_ops {

int verify_cuda(const VegasVerifyParams& p, void* stream) {
#ifdef VEGAS_WITH_HOPPER
  if (on_hopper() && verify_hopper_takes(p)) return verify_hopper(p, stream);
#endif
  return verify_portable(p, stream);
}

size_t verify_cuda_workspace(const VegasBounds& bounds) {
  size_t bytes = verify_portable_workspace(bounds);
#ifdef VEGAS_WITH_HOPPER
  // What the Hopper kernels do not take goes to the portable ones.
  const size_t hopper = on_hopper() ? verify_hopper_workspace(bounds) : 0;
  if (hopper > bytes) bytes = hopper;
#endif
  return bytes;
}

}  // namespace vegas_ops
