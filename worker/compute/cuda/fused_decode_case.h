// Steps of decodes for the fused kernel's check and benchmark, on the host and in device memory.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_FUSED_DECODE_CASE_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_FUSED_DECODE_CASE_H_

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "worker/compute/cuda/bench_device.h"
#include "worker/compute/cuda/fused_decode.h"

namespace palimpsest::cuda {

inline constexpr int32_t kBlockTokens = 16;

struct Heads {
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;

  int32_t group() const { return heads / kv_heads; }
  int64_t row() const { return int64_t{heads + 2 * kv_heads} * head_dim; }
  int64_t token() const { return int64_t{kv_heads} * head_dim; }
  int64_t plane() const { return kBlockTokens * token(); }
};

template <typename T>
void Upload(bench::Buffer<T>& to, const std::vector<T>& from) {
  bench::Check(cudaMemcpy(to.data(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
               "upload");
}

inline float Rounded(float value) { return __bfloat162float(__float2bfloat16(value)); }

inline int32_t Multiprocessors() {
  int count = 0;
  bench::Check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0),
               "multiprocessors");
  return count;
}

// The blocks of a step's sequences: ids in no order, each sequence's newest token in place.
struct Step {
  std::vector<int32_t> lengths, indices, indptr, last;
  std::vector<int64_t> slots;

  Step(const Heads& heads, int32_t layers, std::vector<int32_t> of, int32_t blocks)
      : lengths(std::move(of)), indptr{0} {
    std::vector<int32_t> ids(static_cast<size_t>(blocks));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(7));
    for (const int32_t length : lengths) {
      for (int32_t t = 0; t < length; t += kBlockTokens) {
        indices.push_back(ids[indices.size()]);
      }
      indptr.push_back(static_cast<int32_t>(indices.size()));
      last.push_back((length - 1) % kBlockTokens + 1);
      slots.push_back(indices.back() * BlockElements(heads, layers) +
                      (last.back() - 1) * heads.token());
    }
  }

  static int64_t BlockElements(const Heads& heads, int32_t layers) {
    return heads.plane() * 2 * layers;
  }
  int32_t sequences() const { return static_cast<int32_t>(lengths.size()); }
};

// A step in device memory.
struct Device {
  Device(const Heads& h, int32_t layer_count, const Step& step, int32_t block_count)
      : heads(h),
        layers(layer_count),
        sequences(step.sequences()),
        blocks(block_count),
        kv(static_cast<size_t>(Step::BlockElements(h, layer_count) * block_count)),
        qkv(static_cast<size_t>(h.row() * sequences)),
        output(static_cast<size_t>(sequences) * h.heads * h.head_dim),
        rotations(static_cast<size_t>(sequences) * h.head_dim / 2),
        indices(step.indices.size()),
        indptr(step.indptr.size()),
        last(step.last.size()),
        slots(step.slots.size()),
        arrivals(static_cast<size_t>(sequences) * h.kv_heads),
        partials(FusedDecodePartialBytes(h.head_dim, Multiprocessors())) {
    Upload(indices, step.indices);
    Upload(indptr, step.indptr);
    Upload(last, step.last);
    Upload(slots, step.slots);
    bench::Check(cudaMemset(arrivals.data(), 0, arrivals.size() * 4), "clear");
    cache.kv = kv.data();
    cache.block_bytes = Step::BlockElements(h, layers) * 2;
    cache.blocks = blocks;
    cache.layers = layers;
    cache.heads = h.heads;
    cache.kv_heads = h.kv_heads;
    cache.head_dim = h.head_dim;
    cache.block_tokens = kBlockTokens;
    bench::Check(PrepareFusedDecode(cache, sequences, &map), "prepare");
  }

  void Launch(int32_t layer, bool append, int32_t multiprocessors, cudaStream_t stream) {
    FusedDecode decode;
    decode.cache = &cache;
    decode.map = &map;
    decode.layer = layer;
    decode.sequences = decode.max_sequences = sequences;
    decode.multiprocessors = multiprocessors;
    decode.qkv = qkv.data();
    decode.rotations = append ? rotations.data() : nullptr;
    decode.kv_slots = slots.data();
    decode.indices = indices.data();
    decode.indptr = indptr.data();
    decode.last_block_len = last.data();
    decode.output = output.data();
    decode.scale = 1.0f / std::sqrt(static_cast<float>(heads.head_dim));
    decode.partials = partials.data();
    decode.arrivals = arrivals.data();
    decode.overlap = true;
    bench::Check(LaunchFusedDecode(decode, stream), "fused decode");
  }

  const Heads heads;
  const int32_t layers;
  const int32_t sequences;
  const int32_t blocks;
  bench::Buffer<__nv_bfloat16> kv, qkv, output;
  bench::Buffer<float2> rotations;
  bench::Buffer<int32_t> indices, indptr, last;
  bench::Buffer<int64_t> slots;
  bench::Buffer<int32_t> arrivals;
  bench::Buffer<std::byte> partials;
  KvCacheShape cache;
  KvCacheMap map;
};

// Prints each failure; *error becomes the largest error of a number.
bool CheckFusedDecode(double* error);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_FUSED_DECODE_CASE_H_
