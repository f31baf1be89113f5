// Which kernel runs a step's decodes; attention.h says what each takes.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_DECODE_KERNEL_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_DECODE_KERNEL_H_

namespace palimpsest::cuda {

// kMasked runs on tensor cores too, and is the one that knows windows and soft caps.
enum class DecodeKernel { kCudaCores, kTensorCores, kMasked };
inline constexpr DecodeKernel kDecodeKernels[] = {
    DecodeKernel::kCudaCores, DecodeKernel::kTensorCores, DecodeKernel::kMasked};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_DECODE_KERNEL_H_
