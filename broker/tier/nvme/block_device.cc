#include "broker/tier/nvme/block_device.h"

#include <utility>

#include "common/mutex.h"

namespace palimpsest {
namespace {

struct Waiter {
  IoRequest::Done Done() {
    return [this](absl::Status result) {
      status = std::move(result);
      finished.Notify();
    };
  }
  absl::Status Wait() {
    finished.WaitForNotification();
    return status;
  }

  absl::Status status;
  Notification finished;
};

}  // namespace

absl::Status ReadAndWait(BlockDevice& device, Bytes offset, absl::Span<std::byte> to) {
  Waiter waiter;
  device.Submit(IoRequest::Read(offset, to, waiter.Done()));
  return waiter.Wait();
}

absl::Status WriteAndWait(BlockDevice& device, Bytes offset, absl::Span<const std::byte> from) {
  Waiter waiter;
  device.Submit(IoRequest::Write(offset, from, waiter.Done()));
  return waiter.Wait();
}

absl::Status FlushAndWait(BlockDevice& device) {
  Waiter waiter;
  device.Submit(IoRequest::Flush(waiter.Done()));
  return waiter.Wait();
}

}  // namespace palimpsest
