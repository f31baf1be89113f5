#include "worker/compute/cpu/kernels.h"

namespace palimpsest {
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace generic {
extern const Kernels kKernels;
}

const std::vector<const Kernels*>& SupportedKernels() {
  static const auto* const kernels = [] {
    auto* list = new std::vector<const Kernels*>;
    const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
      list->push_back(&avx512::kKernels);
    }
    if (fma) list->push_back(&avx2::kKernels);
    list->push_back(&generic::kKernels);
    return list;
  }();
  return *kernels;
}

}  // namespace palimpsest
