// Which CUDA kernels a selection runs on.
#include "common/backends.h"

namespace vegas_ops {

int select_cuda(const VegasSelectParams& p, void* stream) {
#ifdef VEGAS_WITH_HOPPER
  if (on_hopper() && select_hopper_takes(p)) return select_hopper(p, stream);
#endif
  return select_portable(p, stream);
}

}  // namespace vegas_ops
