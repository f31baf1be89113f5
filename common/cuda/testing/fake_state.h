// What the parts of the driver's double share: the process's "GPU memory" and who may use it.
#ifndef PALIMPSEST_COMMON_CUDA_TESTING_FAKE_STATE_H_
#define PALIMPSEST_COMMON_CUDA_TESTING_FAKE_STATE_H_

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "common/bytes.h"
#include "common/cuda/testing/fake_driver.h"
#include "common/fd.h"
#include "common/mutex.h"

namespace palimpsest::fake_cuda {

// Counts as used while anything of this process refers to it.
struct Memory {
  UniqueFd file;
  size_t size = 0;
  ino_t inode = 0;
  int device = 0;
  bool imported = false;
};
using MemoryPtr = std::shared_ptr<Memory>;

struct Mapped {
  MemoryPtr memory;
  int open_to = -1;  // device that has access
};

struct State {
  Mutex mu;
  CondVar changed;
  std::array<Bytes, FakeCuda::kDevices> total ABSL_GUARDED_BY(mu);
  std::map<CUmemGenericAllocationHandle, MemoryPtr> handles ABSL_GUARDED_BY(mu);
  CUmemGenericAllocationHandle next_handle ABSL_GUARDED_BY(mu) = 1;
  std::set<ino_t> created ABSL_GUARDED_BY(mu);  // by this process
  std::map<CUdeviceptr, size_t> ranges ABSL_GUARDED_BY(mu);
  std::map<CUdeviceptr, Mapped> mappings ABSL_GUARDED_BY(mu);
  std::map<const void*, size_t> registered ABSL_GUARDED_BY(mu);
  bool refuse_registrations ABSL_GUARDED_BY(mu) = false;
  bool refuse_batches ABSL_GUARDED_BY(mu) = false;
  int64_t batched_copies ABSL_GUARDED_BY(mu) = 0;
  bool paused ABSL_GUARDED_BY(mu) = false;
  bool peer_access ABSL_GUARDED_BY(mu) = true;
  int corrupt ABSL_GUARDED_BY(mu) = 0;
  std::map<std::string, FakeCuda::Kernel> kernels ABSL_GUARDED_BY(mu);
};

State& TheState();

inline bool IsDevice(int device) { return device >= 0 && device < FakeCuda::kDevices; }
inline void* Pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// The calling thread's context.
CUcontext ContextOf(int device);
CUcontext& CurrentContext();
inline bool NoContext() { return CurrentContext() == nullptr; }
int CurrentDevice();

// Whether one of the ranges contains the address.
bool RangeAround(const std::map<const void*, size_t>& ranges, const void* address);

// Created by this process and reachable from it.
size_t InUse(State& state, int device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mu);

// Fill their entries of the table: allocations, mappings and host memory; streams, events, copies
// and kernels.
void AddMemory(CudaDriver& table);
void AddStreams(CudaDriver& table);

}  // namespace palimpsest::fake_cuda

#endif  // PALIMPSEST_COMMON_CUDA_TESTING_FAKE_STATE_H_
