// TEST DOUBLE of the kernels in slab_checksum.cu, for the test double of the driver.
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_TESTING_FAKE_KERNELS_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_TESTING_FAKE_KERNELS_H_

#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/cuda/testing/fake_driver.h"
#include "worker/memory/cuda/hashed_blocks.h"

namespace palimpsest {

inline void RegisterFakeKernels() {
  FakeCuda::RegisterKernel("palimpsest_hash_chunks", [](void** parameters) {
    const auto data = *static_cast<CUdeviceptr*>(parameters[0]);
    const unsigned chunk = *static_cast<unsigned*>(parameters[1]);
    const unsigned chunks = *static_cast<unsigned*>(parameters[2]);
    auto* const hashes = *static_cast<uint64_t**>(parameters[3]);
    return [data, chunk, chunks, hashes] {
      const auto* const bytes = reinterpret_cast<const char*>(data);
      for (unsigned i = 0; i < chunks; ++i) {
        hashes[i] = XXH3_64bits(bytes + size_t{i} * chunk, chunk);
      }
    };
  });
  FakeCuda::RegisterKernel("palimpsest_hash_blocks", [](void** parameters) {
    const auto kv = *static_cast<CUdeviceptr*>(parameters[0]);
    const auto block_bytes = *static_cast<unsigned long long*>(parameters[1]);
    const unsigned chunk = *static_cast<unsigned*>(parameters[2]);
    const unsigned chunks = *static_cast<unsigned*>(parameters[3]);
    const HashedBlocks blocks = *static_cast<HashedBlocks*>(parameters[4]);
    auto* const hashes = *static_cast<uint64_t**>(parameters[5]);
    return [=] {
      std::vector<char> padded(size_t{chunk} * chunks);
      for (unsigned i = 0; i < blocks.count; ++i) {
        std::memcpy(padded.data(),
                    reinterpret_cast<const char*>(kv) + blocks.numbers[i] * block_bytes,
                    block_bytes);
        for (unsigned c = 0; c < chunks; ++c) {
          hashes[i * chunks + c] = XXH3_64bits(padded.data() + size_t{c} * chunk, chunk);
        }
      }
    };
  });
}

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_TESTING_FAKE_KERNELS_H_
