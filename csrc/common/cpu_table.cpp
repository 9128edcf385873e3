// Compiled once per instruction set, like the kernels it lists; VEGAS_ISA is that set's namespace.
#include "common/backends.h"
#include "common/cpu_isa.h"

namespace vegas_ops::VEGAS_ISA {

extern const CpuKernels kernels;
const CpuKernels kernels = {VEGAS_ISA_NAME, verify, select, aggregate, sparse};

}  // namespace vegas_ops::VEGAS_ISA
