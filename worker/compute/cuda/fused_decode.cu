#include <cstring>

#include "worker/compute/cuda/fused_decode.h"
#include "worker/compute/cuda/fused_decode_kernel.cuh"
#include "worker/compute/cuda/tensor_map.h"

namespace palimpsest::cuda {
namespace {

using namespace fused_decode;  // NOLINT(google-build-using-namespace): this file is its host side

constexpr int32_t kMaxGroup = 8;  // columns of a fragment
constexpr int kMaxSharedBytes = 227 * 1024;

template <class S>
int SharedBytes(int32_t max_sequences) {
  return S::kIndptrOffset + (max_sequences + 1) * static_cast<int>(sizeof(int32_t));
}

template <class S>
cudaError_t Prepare(int32_t max_sequences) {
  return cudaFuncSetAttribute(FusedDecodeKernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              SharedBytes<S>(max_sequences));
}

template <class S>
cudaError_t Launch(const FusedDecode& decode, const Params& params, cudaStream_t stream) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(decode.multiprocessors));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(SharedBytes<S>(decode.max_sequences));
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = decode.overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, FusedDecodeKernel<S>, params);
}

}  // namespace

bool HasFusedDecode(int32_t head_dim, int32_t heads_per_kv_head, int32_t block_tokens,
                    int32_t max_sequences) {
  if (heads_per_kv_head > kMaxGroup || block_tokens != kTokens) return false;
  if (head_dim == 64) return SharedBytes<Shape<64>>(max_sequences) <= kMaxSharedBytes;
  return head_dim == 128 && SharedBytes<Shape<128>>(max_sequences) <= kMaxSharedBytes;
}

size_t FusedDecodePartialBytes(int32_t head_dim, int32_t multiprocessors) {
  const int vectors = head_dim == 64 ? Shape<64>::kPartialVectors : Shape<128>::kPartialVectors;
  return size_t{2} * static_cast<size_t>(multiprocessors) * static_cast<size_t>(vectors) *
         sizeof(float4);
}

cudaError_t PrepareFusedDecode(const KvCacheShape& shape, int32_t max_sequences, KvCacheMap* map) {
  static_assert(sizeof(KvCacheMap) == sizeof(CUtensorMap));
  const auto row_bytes = static_cast<uint64_t>(shape.kv_heads) * shape.head_dim * 2;
  const auto halves = static_cast<uint64_t>(shape.head_dim) / 64;
  const uint64_t sizes[] = {64, kTokens, shape.kv_heads * halves,
                            static_cast<uint64_t>(shape.layers) * 2,
                            static_cast<uint64_t>(shape.blocks)};
  const uint64_t strides[] = {row_bytes, kRowBytes, row_bytes * kTokens,
                              static_cast<uint64_t>(shape.block_bytes)};
  const uint32_t box[] = {64, kTokens, static_cast<uint32_t>(halves), 2, 1};
  CUtensorMap encoded;
  const cudaError_t error =
      EncodeTensor(&encoded, shape.kv, 5, CU_TENSOR_MAP_SWIZZLE_128B, sizes, strides, box);
  if (error != cudaSuccess) return error;
  std::memcpy(map->bytes, &encoded, sizeof(encoded));
  return shape.head_dim == 64 ? Prepare<Shape<64>>(max_sequences)
                              : Prepare<Shape<128>>(max_sequences);
}

cudaError_t LaunchFusedDecode(const FusedDecode& decode, cudaStream_t stream) {
  const KvCacheShape& cache = *decode.cache;
  if (!HasFusedDecode(cache.head_dim, cache.heads / cache.kv_heads, cache.block_tokens,
                      decode.max_sequences) ||
      decode.sequences < 1 || decode.sequences > decode.max_sequences) {
    return cudaErrorInvalidValue;
  }
  Params params;
  std::memcpy(&params.map, decode.map->bytes, sizeof(params.map));
  params.qkv = static_cast<const __nv_bfloat16*>(decode.qkv);
  params.rotations = decode.rotations;
  params.kv_slots = decode.kv_slots;
  params.indices = decode.indices;
  params.indptr = decode.indptr;
  params.last_block_len = decode.last_block_len;
  const int64_t plane = int64_t{kTokens} * cache.kv_heads * cache.head_dim;
  params.keys = static_cast<__nv_bfloat16*>(cache.kv) + 2 * plane * decode.layer;
  params.values = params.keys + plane;
  params.output = static_cast<__nv_bfloat16*>(decode.output);
  params.partials = static_cast<float4*>(decode.partials);
  params.arrivals = decode.arrivals;
  params.sequences = decode.sequences;
  params.layer = decode.layer;
  params.heads = cache.heads;
  params.kv_heads = cache.kv_heads;
  params.group = cache.heads / cache.kv_heads;
  params.scale_log2 = decode.scale * kLog2E;
  return cache.head_dim == 64 ? Launch<Shape<64>>(decode, params, stream)
                              : Launch<Shape<128>>(decode, params, stream);
}

}  // namespace palimpsest::cuda
