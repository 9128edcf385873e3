// What every file of the CPU backend includes: the kernels of one instruction set live in namespace
// vegas_ops::VEGAS_ISA. These files must define no weak symbol (no std:: templates that are not
// inlined, no inline functions outside VEGAS_ISA): the linker would keep one copy for all sets, and
// an older processor could end up running instructions it lacks.
#pragma once

#include "vegas_ops/params.h"

#if !defined(VEGAS_ISA) || !defined(VEGAS_ISA_NAME)
#error "CPU kernels are compiled once per instruction set, with VEGAS_ISA and VEGAS_ISA_NAME defined"
#endif

namespace vegas_ops::VEGAS_ISA {

int verify(const VegasVerifyParams& params);
int select(const VegasSelectParams& params);
int aggregate(const VegasSelectParams& params);
int sparse(const VegasSparseParams& params);

}  // namespace vegas_ops::VEGAS_ISA
