// Matrix products of a decode step: few tokens against a large weight matrix, y = act(norm(x) W^T
// + bias) + residual, at the speed at which memory delivers W. What stands around a weight matrix
// in a transformer layer (RMSNorm before, bias, residual, gated activation after) is fused, so a
// layer is six kernels.
//
// Everything is bf16 with fp32 accumulation. The caller owns all memory, which must stay valid
// until the launched work has run. Any thread may launch; a launch does not block or allocate and
// may be captured in a CUDA graph. Needs compute capability 9.0.
//
// Determinism: no atomics. The order of every sum depends on k, and on whether there are more than
// kSkinnyGemmSameTokens tokens: apart from that a token's row of y has the same bits in every run,
// for every m and in every place of the batch.
//
// Overlap: with `programmatic`, blocks start as soon as the kernel before in the stream lets them
// and an SM has room (a block needs up to 215 KiB of shared memory), fill their pipelines with
// weights, and wait for that kernel only then. That is legal if nothing that is still running
// writes `w`: clear `prefetch_weights` where weights are being copied in. A launch lets the kernel
// behind it start at once; such a kernel must execute griddepcontrol.wait, in every block, before
// it touches what this launch or an earlier kernel reads or writes.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_SKINNY_GEMM_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_SKINNY_GEMM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace palimpsest {

inline constexpr int kSkinnyGemmMaxTokens = 32;
// Up to this many, and above it, the number of tokens does not matter to the bits of a row.
inline constexpr int kSkinnyGemmSameTokens = 16;

enum class SkinnyActivation : int32_t {
  kNone,
  kRelu,
  // Gated: rows [0, n) of w are the gate, rows [n, 2n) the other factor (up):
  kSiluAndMul,      // silu(gate) * up
  kGeluTanhAndMul,  // gelu(gate) * up, in the tanh approximation
};

struct SkinnyGemm {
  int32_t m = 0;  // tokens, 1 to kSkinnyGemmMaxTokens
  int32_t n = 0;  // columns of y
  int32_t k = 0;  // columns of x and w; a multiple of 64

  const void* x = nullptr;  // bf16 [m, k], 16-byte aligned
  int64_t x_stride = 0;     // elements between rows of x; a multiple of 8
  const void* w = nullptr;  // bf16 [n, k], or [2n, k] if gated; row-major, 16-byte aligned
  void* y = nullptr;        // [m, n], bf16, or fp32 if `fp32_output`; must not overlap x
  int64_t y_stride = 0;     // elements between rows of y
  bool fp32_output = false;

  // bf16 [k], 16-byte aligned, or null: x is replaced by RMSNorm(x) with this weight, that is
  // x[i] * norm_weight[i] / sqrt(mean(x^2) + norm_epsilon). The product of x and weight is rounded
  // to bf16; the root is applied to the sums, in fp32.
  const void* norm_weight = nullptr;
  float norm_epsilon = 0;

  const void* bias = nullptr;  // bf16, one for each row of w, or null; added before the activation
  SkinnyActivation activation = SkinnyActivation::kNone;
  const void* residual = nullptr;  // bf16 [m, n], or null; added last; may be y itself
  int64_t residual_stride = 0;     // elements between rows of residual

  bool programmatic = false;     // launch with programmatic stream serialization
  bool prefetch_weights = true;  // read weights before waiting for the kernel before
};

// Once for each device, with the device current, before the first launch there.
cudaError_t PrepareSkinnyGemm();

// cudaErrorInvalidValue if a field is outside what it allows.
cudaError_t LaunchSkinnyGemm(const SkinnyGemm& gemm, cudaStream_t stream);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_SKINNY_GEMM_H_
