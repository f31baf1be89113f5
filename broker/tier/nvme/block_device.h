// A disk as the NVMe tier sees it: reads, writes and flushes that complete later, in any order.
//
// What a device promises about power loss is what disks promise: a write that completed may be
// lost, whole or by sectors of 512 bytes and in any order, until a flush that was submitted after
// its completion has completed.
#ifndef PALIMPSEST_BROKER_TIER_NVME_BLOCK_DEVICE_H_
#define PALIMPSEST_BROKER_TIER_NVME_BLOCK_DEVICE_H_

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "broker/tier/aligned_buffer.h"
#include "common/bytes.h"

namespace palimpsest {

struct IoRequest {
  enum class Kind { kRead, kWrite, kFlush };
  using Done = absl::AnyInvocable<void(absl::Status)>;

  static IoRequest Read(Bytes offset, absl::Span<std::byte> to, Done done) {
    return {Kind::kRead, offset, to, std::move(done)};
  }
  static IoRequest Write(Bytes offset, absl::Span<const std::byte> from, Done done) {
    return {
        Kind::kWrite, offset, {const_cast<std::byte*>(from.data()), from.size()}, std::move(done)};
  }
  static IoRequest Flush(Done done) { return {Kind::kFlush, Bytes(0), {}, std::move(done)}; }

  Kind kind = Kind::kFlush;
  Bytes offset;
  absl::Span<std::byte> data;  // a write only reads from it
  Done done;
};

// Thread-safe. Transfers in flight at the same time must not overlap if one of them is a write.
class BlockDevice {
 public:
  // Waits until every request has completed.
  virtual ~BlockDevice() = default;

  // A multiple of kIoUnit.
  virtual Bytes size() const = 0;

  // Never waits for the disk. `done` is called exactly once, on a thread of the device or before
  // Submit returns, without locks held; it may submit, and must neither block nor destroy the
  // device. The buffer belongs to the device until then, whoever may have stopped waiting. A write
  // that failed may have changed any part of its range.
  virtual void Submit(IoRequest request) = 0;
};

// Submits and waits; not to be called on a thread of the device.
absl::Status ReadAndWait(BlockDevice& device, Bytes offset, absl::Span<std::byte> to);
absl::Status WriteAndWait(BlockDevice& device, Bytes offset, absl::Span<const std::byte> from);
absl::Status FlushAndWait(BlockDevice& device);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_NVME_BLOCK_DEVICE_H_
