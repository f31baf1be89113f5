// A GPU's primary context, streams and events, with RAII. The primary context is shared with
// everything else in the process (the CUDA runtime uses the same one).
//
// Threads: thread-safe. A context must be current on the thread that makes, uses or destroys a
// stream or event: MakeCurrent, once per thread, which costs nothing when repeated.
#ifndef PALIMPSEST_COMMON_CUDA_CONTEXT_H_
#define PALIMPSEST_COMMON_CUDA_CONTEXT_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "common/cuda/driver.h"

namespace palimpsest {

class CudaContext {
 public:
  struct MemoryInfo {
    Bytes free;
    Bytes total;
  };

  // Retains the primary context of GPU `ordinal`. FailedPrecondition for a GPU that is not there.
  static absl::StatusOr<std::shared_ptr<const CudaContext>> Open(const CudaDriver& driver,
                                                                 int ordinal);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  absl::Status MakeCurrent() const;

  const CudaDriver& driver() const { return driver_; }
  int ordinal() const { return ordinal_; }
  // "NVIDIA H200".
  const std::string& name() const { return name_; }
  // Current on the calling thread.
  absl::StatusOr<MemoryInfo> Memory() const;

 private:
  CudaContext(const CudaDriver& driver, int ordinal, CUdevice device, std::string name)
      : driver_(driver), ordinal_(ordinal), device_(device), name_(std::move(name)) {}

  const CudaDriver& driver_;
  const int ordinal_;
  const CUdevice device_;
  const std::string name_;
  CUcontext context_ = nullptr;
};

using CudaContextPtr = std::shared_ptr<const CudaContext>;

class CudaStream {
 public:
  // Runs beside the default stream. The context must be current.
  static absl::StatusOr<CudaStream> Create(CudaContextPtr context);

  CudaStream() = default;
  CudaStream(CudaStream&& other) noexcept { *this = std::move(other); }
  CudaStream& operator=(CudaStream&& other) noexcept;
  // Work that was submitted still runs.
  ~CudaStream();

  CUstream get() const { return stream_; }
  absl::Status Synchronize() const;

 private:
  CudaContextPtr context_;
  CUstream stream_ = nullptr;
};

class CudaEvent {
 public:
  static absl::StatusOr<CudaEvent> Create(CudaContextPtr context);

  CudaEvent() = default;
  CudaEvent(CudaEvent&& other) noexcept { *this = std::move(other); }
  CudaEvent& operator=(CudaEvent&& other) noexcept;
  ~CudaEvent();

  CUevent get() const { return event_; }
  // Completes when everything submitted to the stream so far has.
  absl::Status Record(CUstream stream) const;
  // What is submitted to the stream from now on waits for the last Record before this call.
  absl::Status MakeWait(CUstream stream) const;
  // Blocks the thread.
  absl::Status Synchronize() const;

 private:
  CudaContextPtr context_;
  CUevent event_ = nullptr;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_CUDA_CONTEXT_H_
