#include <cuda.h>

#include "worker/compute/cuda/skinny_gemm.h"
#include "worker/compute/cuda/skinny_gemm_kernel.cuh"
#include "worker/compute/cuda/tensor_map.h"

namespace palimpsest {
namespace {

using namespace skinny;  // NOLINT(google-build-using-namespace): this file is its host side

// The fastest of those tried on an H200. The number of warps and of sums must agree, for a row of y
// to have the same bits with both, up to kSkinnyGemmSameTokens.
using UpTo8 = Shape</*tiles=*/2, /*chunk=*/512, /*stages=*/5, /*warps=*/8, /*token_tiles=*/1>;
using UpTo16 = Shape<2, 256, 7, 8, 2>;
static_assert(UpTo8::kWarps == UpTo16::kWarps && UpTo16::kTokens == kSkinnyGemmSameTokens);
// More tokens leave no room for two sums. Where a block has three tiles, it takes them at a time:
// it reads the tokens once.
using UpTo32 = Shape<2, 256, 5, 8, 4, /*sums=*/1>;
using UpTo32Wide = Shape<3, 256, 4, 8, 4, /*sums=*/1>;
static_assert(UpTo32::kTokens == kSkinnyGemmMaxTokens);

Tiling TilingOf(int n, int k, bool gated, int multiprocessors) {
  const int rows = gated ? kTileRows / 2 : kTileRows;
  const int tiles = (n + rows - 1) / rows;
  return {k, rows, tiles, tiles < multiprocessors ? tiles : multiprocessors};
}

template <class S>
cudaError_t EncodeParams(const SkinnyGemm& gemm, int multiprocessors, Params* params) {
  const bool gated = IsGated(gemm);
  params->gemm = gemm;
  params->tiling = TilingOf(gemm.n, gemm.k, gated, multiprocessors);
  const uint64_t k = gemm.k;
  const uint64_t n = gemm.n;
  const uint64_t blocks = k / kBlockColumns;
  const uint32_t halves = gated ? 2 : 1;
  const uint64_t w_sizes[] = {kBlockColumns, n, blocks, halves};
  const uint64_t w_strides[] = {k * 2, kBlockColumns * 2, n * k * 2};
  const uint32_t w_box[] = {kBlockColumns, kTileRows / halves, S::kBlocks, halves};
  cudaError_t error =
      EncodeTensor(&params->w, gemm.w, 4, CU_TENSOR_MAP_SWIZZLE_128B, w_sizes, w_strides, w_box);
  if (error != cudaSuccess) return error;

  const uint64_t stride = gemm.m == 1 ? k : gemm.x_stride;
  const uint64_t x_sizes[] = {kBlockColumns, static_cast<uint64_t>(gemm.m), blocks};
  const uint64_t x_strides[] = {stride * 2, kBlockColumns * 2};
  const uint32_t x_box[] = {kBlockColumns, S::kTokens, S::kBlocks};
  error =
      EncodeTensor(&params->x, gemm.x, 3, CU_TENSOR_MAP_SWIZZLE_128B, x_sizes, x_strides, x_box);
  if (error != cudaSuccess) return error;

  if (gemm.norm_weight != nullptr) {
    const uint64_t norm_sizes[] = {kBlockColumns, blocks};
    const uint64_t norm_strides[] = {kBlockColumns * 2};
    const uint32_t norm_box[] = {kBlockColumns, S::kBlocks};
    error = EncodeTensor(&params->norm, gemm.norm_weight, 2, CU_TENSOR_MAP_SWIZZLE_NONE, norm_sizes,
                         norm_strides, norm_box);
  }
  return error;
}

template <class S>
cudaError_t Prepare() {
  static_assert(S::kSharedBytes <= 227 * 1024);
  return cudaFuncSetAttribute(SkinnyGemmKernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              S::kSharedBytes);
}

template <class S>
cudaError_t Launch(const SkinnyGemm& gemm, int multiprocessors, cudaStream_t stream) {
  Params params = {};
  const cudaError_t error = EncodeParams<S>(gemm, multiprocessors, &params);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(params.tiling.blocks));
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = S::kSharedBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = gemm.programmatic ? 1 : 0;
  return cudaLaunchKernelEx(&config, SkinnyGemmKernel<S>, params);
}

bool IsAligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

bool IsValid(const SkinnyGemm& gemm) {
  return gemm.m >= 1 && gemm.m <= kSkinnyGemmMaxTokens && gemm.n >= 1 && gemm.k >= kBlockColumns &&
         gemm.k % kBlockColumns == 0 && gemm.x != nullptr && gemm.w != nullptr &&
         gemm.y != nullptr && IsAligned(gemm.x) && IsAligned(gemm.w) &&
         IsAligned(gemm.norm_weight) && gemm.x_stride % 8 == 0 &&
         (gemm.m == 1 || gemm.x_stride >= gemm.k) && (gemm.m == 1 || gemm.y_stride >= gemm.n);
}

}  // namespace

cudaError_t PrepareSkinnyGemm() {
  for (const cudaError_t error :
       {Prepare<UpTo8>(), Prepare<UpTo16>(), Prepare<UpTo32>(), Prepare<UpTo32Wide>()}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchSkinnyGemm(const SkinnyGemm& gemm, cudaStream_t stream) {
  if (!IsValid(gemm)) return cudaErrorInvalidValue;
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  if (gemm.m <= UpTo8::kTokens) return Launch<UpTo8>(gemm, multiprocessors, stream);
  if (gemm.m <= UpTo16::kTokens) return Launch<UpTo16>(gemm, multiprocessors, stream);
  const Tiling tiling = TilingOf(gemm.n, gemm.k, IsGated(gemm), multiprocessors);
  return tiling.tiles <= UpTo32::kTiles * multiprocessors
             ? Launch<UpTo32>(gemm, multiprocessors, stream)
             : Launch<UpTo32Wide>(gemm, multiprocessors, stream);
}

}  // namespace palimpsest
