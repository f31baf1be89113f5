// Tier 3: blocks on a disk. One preallocated file or block device, written past the page cache;
// nvme_format.h says what lies in it, metadata_log.h in which order it is written.
//
// What is promised, whatever happens to power and process, as long as the disk keeps what it has
// flushed: a block that Open finds has the bytes that were written; one whose Remove was answered
// with OK, or whose tenant's Purge was, is not found; every extent is either a found block's or
// free. A Write is answered when the bytes are written, and the block can be read then. It is found
// by the next process once its record is durable, a few flushes later: before any later Purge is
// answered, and before Close returns. A flush that fails may cost the blocks that it was
// for this: they can be read, and end with this process. Flushed metadata that is damaged later is
// noticed when more was written behind it: then all blocks are forgotten, since nobody knows which
// removals are missing.
//
// A disk without room, with errors or without answers costs blocks, never their correctness. While
// metadata cannot be written, writes fail with Unavailable and reads go on; an attempt to start
// afresh with a snapshot comes with the first call after MetadataLog::kRetryAfter.
#ifndef PALIMPSEST_BROKER_TIER_NVME_NVME_BACKEND_H_
#define PALIMPSEST_BROKER_TIER_NVME_NVME_BACKEND_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "broker/tier/nvme/block_device.h"
#include "broker/tier/nvme/extent_table.h"
#include "broker/tier/nvme/metadata_log.h"
#include "broker/tier/nvme/nvme_format.h"
#include "broker/tier/tier_backend.h"
#include "common/clock.h"
#include "common/mutex.h"

namespace palimpsest {

class NvmeBackend : public TierBackend {
 public:
  using DeviceOpener = absl::AnyInvocable<absl::StatusOr<std::unique_ptr<BlockDevice>>()>;

  struct Options {
    // Of each of the two metadata areas of a device that is formatted; default: DefaultArea.
    std::optional<Bytes> area;
  };

  // What blocks can take together of a device of this size with areas of the default size.
  static Bytes CapacityOf(Bytes device);

  // Formats a device whose superblocks are zero; what else has none is refused, since it may be
  // somebody's data. `clock` outlives the back-end. If it shows an earlier time than an earlier
  // process saw, as after a correction, all expiries move along: nothing lives longer for it.
  NvmeBackend(DeviceOpener open_device, const Clock& clock, Options options);
  NvmeBackend(DeviceOpener open_device, const Clock& clock)
      : NvmeBackend(std::move(open_device), clock, Options()) {}
  ~NvmeBackend() override;

  std::string name() const override { return "nvme"; }
  Bytes Footprint(Bytes length) const override { return RoundUp(length, kIoUnit); }
  absl::StatusOr<std::vector<StoredBlock>> Open() override;
  void Close() override;
  // Buffers that are aligned to kIoUnit, of a length that is a multiple of it, are not copied.
  void Write(const BlockRecord& record, absl::Span<const std::byte> from, Written done) override;
  void Read(const BlockRecord& record, TierPlace place, absl::Span<std::byte> to,
            Done done) override;
  void Remove(const BlockRecord& record, TierPlace place, RemoveReason reason, Done done) override;
  void Purge(const std::string& tenant, Done done) override;

  ExtentUsage usage() const;
  // Internal: whether the sums are right.
  absl::Status CheckConsistency() const;

 private:
  // What has to be done after the lock was released.
  struct Effects {
    std::optional<MetadataLog::Io> io;
    std::vector<std::pair<MetadataLog::Done, absl::Status>> answers;
    absl::Status new_error;
    bool recovered = false;
  };

  struct Found {
    uint64_t generation = 0;
    int area = 1;  // the one that counts
    std::vector<StoredBlock> blocks;
  };

  absl::Status ReadLayout();
  absl::StatusOr<Found> ReadAreas();
  void Restore(Found& found) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Looks for the next step of the log.
  Effects Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Perform(Effects effects);
  void LogIoEnded(const absl::Status& status);
  void DataWritten(uint64_t place, absl::Status status, Written done);
  void OperationBegins() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { ++operations_; }
  void OperationEnds();
  Bytes OffsetOf(uint64_t place) const { return layout_.data_offset() + kIoUnit * place; }

  const Clock& clock_;
  const Options options_;
  DeviceOpener open_device_;
  std::unique_ptr<BlockDevice> device_;
  NvmeLayout layout_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::optional<ExtentTable> table_ ABSL_GUARDED_BY(mutex_);
  std::optional<MetadataLog> log_ ABSL_GUARDED_BY(mutex_);
  bool error_reported_ ABSL_GUARDED_BY(mutex_) = false;
  int operations_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_NVME_NVME_BACKEND_H_
