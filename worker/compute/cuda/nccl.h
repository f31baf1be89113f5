// NCCL, loaded at run time: the few functions that tensor parallelism needs, as a table of
// pointers. The declarations are our own, so that NCCL's header is not needed to build; those of
// its version 2 have not changed since 2017.
//
// Threads: the table is constant. A communicator belongs to one thread at a time, except for Abort.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_NCCL_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_NCCL_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace palimpsest::cuda {

struct NcclLibrary {
  using Comm = void*;  // ncclComm_t

  static constexpr int kFloat32 = 7;   // ncclFloat32
  static constexpr int kBfloat16 = 9;  // ncclBfloat16
  static constexpr int kSum = 0;       // ncclSum

  int (*ncclGetVersion)(int* version) = nullptr;
  const char* (*ncclGetErrorString)(int result) = nullptr;
  // One communicator for each device, made by one thread.
  int (*ncclCommInitAll)(Comm* comms, int count, const int* devices) = nullptr;
  int (*ncclCommDestroy)(Comm comm) = nullptr;
  int (*ncclCommAbort)(Comm comm) = nullptr;
  int (*ncclGroupStart)() = nullptr;
  int (*ncclGroupEnd)() = nullptr;
  int (*ncclAllReduce)(const void* send, void* receive, size_t count, int type, int operation,
                       Comm comm, cudaStream_t stream) = nullptr;
  int (*ncclAllGather)(const void* send, void* receive, size_t count, int type, Comm comm,
                       cudaStream_t stream) = nullptr;

  // Of the process, opened once. NotFound, with what to install, where there is none.
  static absl::StatusOr<const NcclLibrary*> Load();

  absl::Status Check(int result, absl::string_view what) const;
};

// One rank's communicator, which any thread may abort while its own thread is in a call: whoever of
// the two is done last ends it.
class NcclCommunicator {
 public:
  // Takes over `comm`. The library must outlive the object.
  NcclCommunicator(const NcclLibrary& library, NcclLibrary::Comm comm);
  // No work of the communicator may be running, unless it was aborted, and no graph may hold any.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // In place: `count` bfloat16 numbers become their sums over the ranks.
  absl::Status AllReduce(void* data, size_t count, cudaStream_t stream);
  // `count` floats of each rank, one rank behind the other; this rank's are in their place.
  absl::Status AllGather(float* data, size_t count, int rank, cudaStream_t stream);

  // What runs ends soon, with undefined results; calls fail from now on. Any thread.
  void Abort();

 private:
  enum class State { kIdle, kBusy, kBusyAborted, kGone };

  absl::Status Enter();
  absl::Status Leave(int result, absl::string_view what);

  const NcclLibrary& library_;
  const NcclLibrary::Comm comm_;
  std::atomic<State> state_ = State::kIdle;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_NCCL_H_
