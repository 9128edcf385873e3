#include "common/backends.h"

namespace vegas_ops {

int select_portable(const VegasSelectParams&, void*) { return VEGAS_UNSUPPORTED; }
size_t select_portable_workspace(const VegasBounds&) { return 0; }
int aggregate_portable(const VegasSelectParams&, void*) { return VEGAS_UNSUPPORTED; }

}  // namespace vegas_ops
