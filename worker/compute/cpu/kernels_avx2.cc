#include "worker/compute/cpu/kernels.h"
#include "worker/compute/cpu/packing.h"
#include "worker/compute/cpu/simd_avx2.h"

#define PALIMPSEST_ISA avx2
#include "worker/compute/cpu/matmul_impl.h"
// After matmul_impl.h, whose functions it uses.
#include "worker/compute/cpu/attention_impl.h"

namespace palimpsest::avx2 {

extern const Kernels kKernels;
const Kernels kKernels = {"avx2", Project, ProjectAdd, ProjectGated, RmsNorm,     LayerNorm,
                          Rotate, ToBf16,  Attention,  SoftCap,      Exponential, FarShares};

}  // namespace palimpsest::avx2
