// cuBLASLt as a yardstick for benchmarks: opened at run time, the best of its heuristics'
// algorithms.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_CUBLASLT_BASELINE_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_CUBLASLT_BASELINE_H_

#include <cstddef>
#include <functional>
#include <memory>

namespace palimpsest::bench {

class CublasLtBaseline {
 public:
  // Null, with a line on stderr, if the library is not on this machine.
  static std::unique_ptr<CublasLtBaseline> Open();
  ~CublasLtBaseline();

  // Microseconds of y[m, n] = x[m, k] w[n, k]^T in bf16 with fp32 accumulation, the fastest of up
  // to 16 algorithms, each timed in a graph of `count` products; the i-th reads weights(i). 0 if
  // there is no algorithm.
  double Time(int m, int n, int k, const void* x, const std::function<const void*(int)>& weights,
              void* y, int count) const;

 private:
  struct Library;
  explicit CublasLtBaseline(std::unique_ptr<Library> library);
  std::unique_ptr<Library> library_;
};

}  // namespace palimpsest::bench

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_CUBLASLT_BASELINE_H_
