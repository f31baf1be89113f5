// What the kernel benchmarks share: device memory, seeded data, timing by graph replay, and the
// rate at which this GPU reads memory at best. Errors end the program.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_BENCH_DEVICE_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_BENCH_DEVICE_H_

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace palimpsest::bench {

void Check(cudaError_t error, const char* what);

// Device memory of `count` elements.
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
    Check(cudaMalloc(&data_, count * sizeof(T)), "cudaMalloc");
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() const { return data_; }
  size_t size() const { return count_; }
  // Every byte 0xff: NaN in bf16 and fp32.
  void Poison() { Check(cudaMemset(data_, 0xff, count_ * sizeof(T)), "cudaMemset"); }
  std::vector<T> Read() const {
    std::vector<T> host(count_);
    Check(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

// Uniform values in [-scale, scale) + offset, the same for the same seed.
void Fill(__nv_bfloat16* data, size_t count, float scale, float offset, uint64_t seed);

// Microseconds for each call of `launch(i, stream)`, i from 0 to count - 1, captured in one graph:
// the median of `repeats` replays.
double TimeGraph(int count, int repeats, const std::function<void(int, cudaStream_t)>& launch);

// Bytes per second read from `data` (far larger than the caches), without computing: the best of
// several ways to read.
double MeasureReadBandwidth(const void* data, size_t bytes);

}  // namespace palimpsest::bench

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_BENCH_DEVICE_H_
