#include "common/backends.h"

namespace vegas_ops {

int sparse_portable(const VegasSparseParams&, void*) { return VEGAS_UNSUPPORTED; }
size_t sparse_portable_workspace(const VegasBounds&) { return 0; }

}  // namespace vegas_ops
