#include "sparse/portable_instances.cuh"

namespace vegas_ops::portable {
template SparseCta sparse_cta<__nv_bfloat16>(const VegasSparseParams&, const SparseDevice&);
template int clusters_at_once<__nv_bfloat16>(const VegasSparseParams&, const SparseDevice&, const SparseCta&, int, int);
template cudaError_t launch_sparse<__nv_bfloat16>(const VegasSparseParams&, const SparsePlan&, const SparseDevice&,
                                                  const SparseCta&, int, int, cudaStream_t);
}  // namespace vegas_ops::portable
