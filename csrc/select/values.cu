#include "common/backends.h"
#include "common/value_check.cuh"
#include "select/values.h"

namespace vegas_ops {

int select_values_cuda(const VegasSelectParams& p, void* stream) {
  return check_device_values(SelectValues{p}, stream, p.sums ? "aggregate_logits" : "topk_aggregate_logits");
}

}  // namespace vegas_ops
