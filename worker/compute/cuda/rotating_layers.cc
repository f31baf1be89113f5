#include "worker/compute/cuda/rotating_layers.h"

#include <algorithm>
#include <iterator>

#include "common/cuda/status.h"
#include "worker/compute/cuda/kernels.h"

namespace palimpsest::cuda {
namespace {

absl::Status MakeStream(cudaStream_t& stream) {
  return CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "copy stream");
}

absl::Status MakeEvent(cudaEvent_t& event) {
  return CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
}

absl::Status Record(cudaEvent_t event, unsigned flags, cudaStream_t stream) {
  return CudaStatus(cudaEventRecordWithFlags(event, stream, flags), "record a rotating layer");
}

absl::Status WaitFor(cudaEvent_t event, unsigned flags, cudaStream_t stream) {
  return CudaStatus(cudaStreamWaitEvent(stream, event, flags), "wait for a rotating layer");
}

}  // namespace

absl::StatusOr<std::unique_ptr<RotatingLayers>> RotatingLayers::Create(const ImageLayout& layout,
                                                                       const ModelMemory& memory,
                                                                       const WaitClock& clock) {
  std::unique_ptr<RotatingLayers> made(new RotatingLayers(layout, memory, clock));
  absl::Status status = MakeStream(made->copies_);
  status.Update(MakeEvent(made->used_));
  for (cudaEvent_t& event : made->copied_) status.Update(MakeEvent(event));
  for (cudaEvent_t& event : made->last_used_) status.Update(MakeEvent(event));
  if (!status.ok()) return status;
  return made;
}

RotatingLayers::~RotatingLayers() {
  if (copies_ != nullptr) cudaStreamSynchronize(copies_);
  for (cudaEvent_t event : {used_, copied_[0], copied_[1], last_used_[0], last_used_[1]}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  if (copies_ != nullptr) cudaStreamDestroy(copies_);
}

absl::Status RotatingLayers::Set(const Rotation& rotation) {
  rotation_ = Rotation();
  absl::Status status =
      CudaStatus(cudaStreamSynchronize(copies_), "end the copies of rotating layers");
  ModelMemory memory = memory_;
  if (memory.image_now) memory.image = memory.image_now();
  status.Update(CheckRotation(layout_, memory, rotation));
  if (!status.ok()) return status;
  rotation_ = rotation;
  layer_copies_.clear();
  for (const int32_t stage : rotation_.stages) {
    layer_copies_.push_back(LayerCopies(layout_, memory, stage));
  }
  holds_.fill(-1);
  for (int32_t slot = 0; status.ok() && slot < rotation_.slots; ++slot) status = CopyToSlot(slot);
  return status;
}

Bytes RotatingLayers::step_bytes() const {
  Bytes bytes;
  for (int32_t index = 0; index < count(); ++index) {
    if (Next(index) == index) continue;  // has its slot for itself
    for (const LayerCopy& copy : layer_copies_[static_cast<size_t>(index)]) {
      bytes += Bytes(static_cast<int64_t>(copy.bytes));
    }
  }
  return bytes;
}

int32_t RotatingLayers::IndexOf(int stage) const {
  const auto found = std::lower_bound(rotation_.stages.begin(), rotation_.stages.end(), stage);
  if (found == rotation_.stages.end() || *found != stage) return -1;
  return static_cast<int32_t>(std::distance(rotation_.stages.begin(), found));
}

int32_t RotatingLayers::Next(int32_t index) const {
  return IsLast(index) ? SlotOf(index) : index + rotation_.slots;
}

absl::Status RotatingLayers::Copy(int32_t index, cudaStream_t stream) const {
  absl::Status status;
  for (const LayerCopy& copy : layer_copies_[static_cast<size_t>(index)]) {
    status.Update(
        CudaStatus(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDefault, stream),
                   "copy a rotating layer"));
  }
  return status;
}

absl::Status RotatingLayers::CopyToSlot(int32_t index) {
  const auto slot = static_cast<size_t>(SlotOf(index));
  if (holds_[slot] == index) return absl::OkStatus();
  absl::Status status = Copy(index, copies_);
  if (status.ok()) status = Record(copied_[slot], cudaEventRecordDefault, copies_);
  if (status.ok()) holds_[slot] = index;
  return status;
}

absl::Status RotatingLayers::Await(cudaEvent_t copied, unsigned flags, cudaStream_t stream) const {
  absl::Status status = CudaStatus(BeginWait(clock_.since, stream), "begin a wait");
  if (status.ok()) status = WaitFor(copied, flags, stream);
  if (!status.ok()) return status;
  return CudaStatus(EndWait(clock_.since, clock_.total, stream), "end a wait");
}

absl::Status RotatingLayers::Begin(int stage, cudaStream_t stream) {
  const int32_t index = IndexOf(stage);
  if (index < 0) return absl::OkStatus();
  return Await(copied_[static_cast<size_t>(SlotOf(index))], cudaEventWaitDefault, stream);
}

absl::Status RotatingLayers::End(int stage, cudaStream_t stream) {
  const int32_t index = IndexOf(stage);
  if (index < 0) return absl::OkStatus();
  absl::Status status = Record(used_, cudaEventRecordDefault, stream);
  if (status.ok()) status = WaitFor(used_, cudaEventWaitDefault, copies_);
  return status.ok() ? CopyToSlot(Next(index)) : status;
}

absl::Status RotatingLayers::Abandon(cudaStream_t stream) {
  if (rotation_.none()) return absl::OkStatus();
  absl::Status status = Record(used_, cudaEventRecordDefault, stream);
  if (status.ok()) status = WaitFor(used_, cudaEventWaitDefault, copies_);
  for (int32_t slot = 0; status.ok() && slot < rotation_.slots; ++slot) status = CopyToSlot(slot);
  return status;
}

absl::Status RotatingLayers::GraphLaunched() {
  absl::Status status;
  for (int32_t index = count() - rotation_.slots; index < count(); ++index) {
    if (!status.ok()) break;
    const auto slot = static_cast<size_t>(SlotOf(index));
    holds_[slot] = index;
    if (Next(index) == index) continue;
    status = WaitFor(last_used_[slot], cudaEventWaitDefault, copies_);
    if (status.ok()) status = CopyToSlot(Next(index));
  }
  return status;
}

absl::StatusOr<std::unique_ptr<RotatingLayers::Capture>> RotatingLayers::NewCapture() const {
  std::unique_ptr<Capture> capture(new Capture(*this));
  absl::Status status = MakeStream(capture->copies_);
  status.Update(MakeEvent(capture->used_));
  for (cudaEvent_t& event : capture->copied_) status.Update(MakeEvent(event));
  if (!status.ok()) return status;
  return capture;
}

RotatingLayers::Capture::~Capture() {
  for (cudaEvent_t event : {used_, copied_[0], copied_[1]}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  if (copies_ != nullptr) cudaStreamDestroy(copies_);
}

absl::Status RotatingLayers::Capture::Begin(int stage, cudaStream_t stream) {
  const int32_t index = layers_.IndexOf(stage);
  if (index < 0) return absl::OkStatus();
  const auto slot = static_cast<size_t>(layers_.SlotOf(index));
  const bool first = index < layers_.rotation_.slots;
  return layers_.Await(first ? layers_.copied_[slot] : copied_[slot],
                       first ? cudaEventWaitExternal : cudaEventWaitDefault, stream);
}

absl::Status RotatingLayers::Capture::End(int stage, cudaStream_t stream) {
  const int32_t index = layers_.IndexOf(stage);
  if (index < 0) return absl::OkStatus();
  const auto slot = static_cast<size_t>(layers_.SlotOf(index));
  if (layers_.IsLast(index)) {
    if (layers_.Next(index) == index) return absl::OkStatus();
    return Record(layers_.last_used_[slot], cudaEventRecordExternal, stream);
  }
  absl::Status status = Record(used_, cudaEventRecordDefault, stream);
  if (status.ok()) status = WaitFor(used_, cudaEventWaitDefault, copies_);
  // Copies for the step's first layers come first.
  if (status.ok() && index == 0 && layers_.rotation_.slots > 1) {
    status = WaitFor(layers_.copied_[1], cudaEventWaitExternal, copies_);
  }
  if (status.ok()) status = layers_.Copy(layers_.Next(index), copies_);
  return status.ok() ? Record(copied_[slot], cudaEventRecordDefault, copies_) : status;
}

}  // namespace palimpsest::cuda
