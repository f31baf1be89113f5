#include "worker/compute/cpu/kernels.h"
#include "worker/compute/cpu/packing.h"
#include "worker/compute/cpu/simd_generic.h"

#define PALIMPSEST_ISA generic
#include "worker/compute/cpu/matmul_impl.h"
// After matmul_impl.h, whose functions it uses.
#include "worker/compute/cpu/attention_impl.h"

namespace palimpsest::generic {

extern const Kernels kKernels;
const Kernels kKernels = {"generic", Project, ProjectAdd, ProjectGated, RmsNorm,     LayerNorm,
                          Rotate,    ToBf16,  Attention,  SoftCap,      Exponential, FarShares};

}  // namespace palimpsest::generic
