#include "worker/compute/cuda/cuda_compute.h"

namespace palimpsest {

namespace {

absl::Status NoCuda() {
  return absl::FailedPreconditionError(
      "device cuda: this program was built without a CUDA toolkit; build it where one is (see "
      "README.md), or set engine.device to cpu");
}

}  // namespace

absl::StatusOr<CudaCompute> MakeCudaCompute(const ModelConfig&, const ImageLayout&,
                                            absl::Span<const ModelMemory>, ParameterGate*,
                                            const CudaComputeOptions&) {
  return NoCuda();
}

absl::StatusOr<std::unique_ptr<SwapCopier>> MakeCudaSwapCopier(absl::Span<const ModelMemory>,
                                                               const CudaSwapOptions&) {
  return NoCuda();
}

}  // namespace palimpsest
