#include "common/backends.h"
#include "common/value_check.cuh"
#include "sparse/values.h"

namespace vegas_ops {

int sparse_values_cuda(const VegasSparseParams& p, void* stream) {
  return check_device_values(SparseValues{p}, stream, "sparse_paged_decode");
}

}  // namespace vegas_ops
