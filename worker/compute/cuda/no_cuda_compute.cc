#include "worker/compute/cuda/cuda_compute.h"

namespace palimpsest {

absl::StatusOr<CudaCompute> MakeCudaCompute(const ModelConfig&, const ImageLayout&,
                                            absl::Span<const ModelMemory>, ParameterGate*,
                                            const CudaComputeOptions&) {
  return absl::FailedPreconditionError(
      "device cuda: this program was built without a CUDA toolkit; build it where one is (see "
      "README.md), or set engine.device to cpu");
}

}  // namespace palimpsest
