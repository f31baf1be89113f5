// What the checks of copied KV on a GPU share: a region of KV, and the speed of its link.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_CHECKED_REGION_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_CHECKED_REGION_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "common/cuda/context.h"
#include "common/cuda/status.h"
#include "common/cuda/virtual_memory.h"
#include "tools/gpu_check/timing.h"
#include "worker/core/model_runner.h"

namespace palimpsest::cuda {

[[noreturn]] inline void Die(const absl::Status& status) {
  std::cerr << "swap_check: " << status << "\n";
  std::exit(EXIT_FAILURE);
}

template <typename T>
T ValueOrDie(absl::StatusOr<T> value) {
  if (!value.ok()) Die(value.status());
  return *std::move(value);
}

inline void OkOrDie(const absl::Status& status) {
  if (!status.ok()) Die(status);
}

// KV in slabs of 32 MiB that blocks straddle, as a worker has it.
class Region {
 public:
  Region(CudaContextPtr context, int device, int slabs, Bytes block)
      : context_(std::move(context)), slabs_(slabs) {
    range_ = ValueOrDie(CudaAddressRange::Reserve(context_->driver(), device, kSlab * slabs));
    for (int i = 0; i < slabs; ++i) {
      allocations_.push_back(ValueOrDie(CudaAllocation::Create(context_->driver(), device, kSlab)));
      OkOrDie(range_.Map(kSlab * i, kSlab, allocations_.back()));
    }
    OkOrDie(range_.Open(Bytes(0), kSlab * slabs));
    memory_.kv = reinterpret_cast<std::byte*>(range_.base());
    memory_.kv_block_bytes = block;
    memory_.slab_bytes = kSlab;
  }
  ~Region() { (void)range_.Unmap(Bytes(0), kSlab * slabs_); }

  const ModelMemory& memory() const { return memory_; }
  int32_t blocks() const { return static_cast<int32_t>(kSlab * slabs_ / memory_.kv_block_bytes); }

  void Write(uint32_t block, const std::vector<std::byte>& bytes) {
    OkOrDie(CudaStatus(cudaMemcpy(At(block), bytes.data(), bytes.size(), cudaMemcpyHostToDevice),
                       "write a block"));
  }
  std::vector<std::byte> Read(uint32_t block) {
    std::vector<std::byte> bytes(static_cast<size_t>(memory_.kv_block_bytes.count()));
    OkOrDie(CudaStatus(cudaMemcpy(bytes.data(), At(block), bytes.size(), cudaMemcpyDeviceToHost),
                       "read a block"));
    return bytes;
  }

 private:
  static constexpr Bytes kSlab = MiB(32);

  std::byte* At(uint32_t block) { return memory_.kv + (memory_.kv_block_bytes * block).count(); }

  const CudaContextPtr context_;
  const int slabs_;
  CudaAddressRange range_;
  std::vector<CudaAllocation> allocations_;
  ModelMemory memory_;
};

inline std::vector<std::byte> Pattern(Bytes size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(static_cast<size_t>(size.count()));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

inline std::vector<uint32_t> Numbers(uint32_t first, size_t count) {
  std::vector<uint32_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

// What the link gives to one large copy from pinned memory, in each direction.
inline double LinkRate(Region& region, bool to_device, Bytes bytes) {
  void* host = nullptr;
  OkOrDie(CudaStatus(cudaMallocHost(&host, static_cast<size_t>(bytes.count())), "pinned memory"));
  std::vector<absl::Duration> times;
  for (int i = 0; i < 5; ++i) {
    times.push_back(Timed([&] {
      OkOrDie(CudaStatus(
          to_device ? cudaMemcpy(region.memory().kv, host, bytes.count(), cudaMemcpyHostToDevice)
                    : cudaMemcpy(host, region.memory().kv, bytes.count(), cudaMemcpyDeviceToHost),
          "one large copy"));
    }));
  }
  cudaFreeHost(host);
  return GigabytesPerSecond(bytes, Median(times));
}

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_CHECKED_REGION_H_
