#include "common/backends.h"

namespace vegas_ops {

int verify_portable(const VegasVerifyParams&, void*) { return VEGAS_UNSUPPORTED; }
size_t verify_portable_workspace(const VegasBounds&) { return 0; }

}  // namespace vegas_ops
