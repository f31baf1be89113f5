#include "common/cuda/context.h"

#include "absl/strings/str_cat.h"

namespace palimpsest {

absl::StatusOr<std::shared_ptr<const CudaContext>> CudaContext::Open(const CudaDriver& driver,
                                                                     int ordinal) {
  const std::string what = absl::StrCat("opening GPU ", ordinal);
  CUdevice device = 0;
  absl::Status status = driver.Check(driver.cuDeviceGet(&device, ordinal), what);
  if (!status.ok()) return status;
  char name[128] = "";
  status = driver.Check(driver.cuDeviceGetName(name, sizeof name, device), what);
  if (!status.ok()) return status;
  std::shared_ptr<CudaContext> context(new CudaContext(driver, ordinal, device, name));
  status = driver.Check(driver.cuDevicePrimaryCtxRetain(&context->context_, device), what);
  if (!status.ok()) return status;
  return context;
}

CudaContext::~CudaContext() {
  if (context_ != nullptr) driver_.cuDevicePrimaryCtxRelease(device_);
}

absl::Status CudaContext::MakeCurrent() const {
  CUcontext current = nullptr;
  if (driver_.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context_) {
    return absl::OkStatus();
  }
  return driver_.Check(driver_.cuCtxSetCurrent(context_), "making a GPU's context current");
}

absl::StatusOr<CudaContext::MemoryInfo> CudaContext::Memory() const {
  size_t free = 0;
  size_t total = 0;
  absl::Status status = driver_.Check(driver_.cuMemGetInfo(&free, &total), "reading free memory");
  if (!status.ok()) return status;
  return MemoryInfo{Bytes(static_cast<int64_t>(free)), Bytes(static_cast<int64_t>(total))};
}

absl::StatusOr<CudaStream> CudaStream::Create(CudaContextPtr context) {
  CudaStream stream;
  const CudaDriver& driver = context->driver();
  absl::Status status =
      driver.Check(driver.cuStreamCreateWithPriority(&stream.stream_, CU_STREAM_NON_BLOCKING, 0),
                   "creating a stream");
  if (!status.ok()) return status;
  stream.context_ = std::move(context);
  return stream;
}

CudaStream& CudaStream::operator=(CudaStream&& other) noexcept {
  std::swap(context_, other.context_);
  std::swap(stream_, other.stream_);
  return *this;
}

CudaStream::~CudaStream() {
  if (stream_ == nullptr) return;
  (void)context_->MakeCurrent();
  context_->driver().cuStreamDestroy(stream_);
}

absl::Status CudaStream::Synchronize() const {
  return context_->driver().Check(context_->driver().cuStreamSynchronize(stream_),
                                  "waiting for a stream");
}

absl::StatusOr<CudaEvent> CudaEvent::Create(CudaContextPtr context) {
  CudaEvent event;
  const CudaDriver& driver = context->driver();
  absl::Status status = driver.Check(
      driver.cuEventCreate(&event.event_, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC),
      "creating an event");
  if (!status.ok()) return status;
  event.context_ = std::move(context);
  return event;
}

CudaEvent& CudaEvent::operator=(CudaEvent&& other) noexcept {
  std::swap(context_, other.context_);
  std::swap(event_, other.event_);
  return *this;
}

CudaEvent::~CudaEvent() {
  if (event_ == nullptr) return;
  (void)context_->MakeCurrent();
  context_->driver().cuEventDestroy(event_);
}

absl::Status CudaEvent::Record(CUstream stream) const {
  return context_->driver().Check(context_->driver().cuEventRecord(event_, stream),
                                  "recording an event");
}

absl::Status CudaEvent::MakeWait(CUstream stream) const {
  return context_->driver().Check(context_->driver().cuStreamWaitEvent(stream, event_, 0),
                                  "making a stream wait");
}

absl::Status CudaEvent::Synchronize() const {
  return context_->driver().Check(context_->driver().cuEventSynchronize(event_),
                                  "waiting for an event");
}

}  // namespace palimpsest
