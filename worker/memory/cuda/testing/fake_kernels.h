// TEST DOUBLE of the kernels in slab_checksum.cu, for the test double of the driver.
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_TESTING_FAKE_KERNELS_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_TESTING_FAKE_KERNELS_H_

#include <xxhash.h>

#include <cstdint>

#include "common/cuda/testing/fake_driver.h"

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
}

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_TESTING_FAKE_KERNELS_H_
