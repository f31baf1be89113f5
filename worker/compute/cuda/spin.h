// Waiting for another thread that is about to act, without the cost of a sleep and a wake-up.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_SPIN_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_SPIN_H_

#include "absl/functional/function_ref.h"

namespace palimpsest::cuda {

// Returns when `done` is true, or after some microseconds.
inline void SpinUntil(absl::FunctionRef<bool()> done) {
  constexpr int kSpins = 2000;
  for (int i = 0; i < kSpins && !done(); ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_SPIN_H_
