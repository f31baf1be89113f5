// Makes the changes of an ExtentTable durable, one batch at a time: the bytes of blocks are flushed
// before their records are written, removals are answered when their records have been flushed, and
// an extent is free again only then. When the log has filled its area, and after any error, the
// next thing written is a snapshot in the other area.
//
// A state machine without I/O of its own: Next says what to do, Completed how it ended. Not
// thread-safe.
#ifndef PALIMPSEST_BROKER_TIER_NVME_METADATA_LOG_H_
#define PALIMPSEST_BROKER_TIER_NVME_METADATA_LOG_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/tier/nvme/block_device.h"
#include "broker/tier/nvme/extent_table.h"
#include "broker/tier/nvme/nvme_format.h"

namespace palimpsest {

class MetadataLog {
 public:
  using Done = absl::AnyInvocable<void(absl::Status)>;

  struct Io {
    IoRequest::Kind kind = IoRequest::Kind::kFlush;
    Bytes offset;
    absl::Span<const std::byte> data;  // until Completed
  };

  // How long after an error the next attempt waits.
  static constexpr absl::Duration kRetryAfter = absl::Seconds(1);

  // What the records of a table may take together so that its snapshot leaves a third of the area.
  static Bytes MetadataLimit(const NvmeLayout& layout) { return layout.area / 2; }

  // `generation` is higher than that of any area, `target` the area that holds nothing of worth.
  // The first thing written is a snapshot of the table. `table` must outlive it.
  MetadataLog(const NvmeLayout& layout, uint64_t generation, int target, ExtentTable& table);

  // The bytes of a block that is kWriting have been written: its record follows as soon as they
  // have been flushed, in any case before a later Purge is answered. After an error,
  // which refuses_puts() announces, the block is gone.
  absl::Status Put(uint64_t place);

  // Of a block that Put was called for. OK: it will not come back, and its extent is free, or lost
  // with `quarantine`. After an error it stays in the queue: when metadata can be written again, it
  // is.
  void Remove(uint64_t place, bool quarantine, Done done);

  // OK: no block that the tenant has in the table now will come back after a restart. After an
  // error it stays in the queue like a removal.
  void Purge(const std::string& tenant, Done done);

  // The next transfer, if none is under way and there is something to do.
  std::optional<Io> Next(absl::Time now);
  void Completed(const absl::Status& status, absl::Time now);

  // What Remove and Purge have to be told, in order; call it without locks.
  std::vector<std::pair<Done, absl::Status>> TakeAnswers() { return std::exchange(answers_, {}); }

  bool io_in_flight() const { return in_flight_; }
  // Everything is durable, or cannot be made so for now.
  bool settled() const {
    return !in_flight_ && (!error_.ok() || (queue_.empty() && step_ == Step::kIdle));
  }
  // The first snapshot is durable.
  bool started() const { return active_ >= 0; }
  // Why nothing can be made durable for now; OK when it can.
  const absl::Status& error() const { return error_; }
  // Whether a Put would fail at once.
  bool refuses_puts() const { return !error_.ok() && step_ == Step::kIdle; }

 private:
  enum class Step {
    kIdle,
    kFlushData,
    kWriteBatch,
    kFlushBatch,
    kClearTarget,
    kFlushClear,
    kWriteSnapshot,
    kFlushSnapshot,
    kWriteHeader,
    kFlushHeader,
    kClearOld,
  };

  struct Entry {
    Change::Kind kind = Change::Kind::kPut;
    std::string record;  // empty for kPut: the table has it
    uint64_t place = 0;
    bool quarantine = false;
    uint64_t flushes_before = 0;  // kPut: flushes begun before its bytes had been written
    Done done;
  };

  static bool IsFlush(Step step);
  void Answer(Done& done, absl::Status status);
  void Choose(absl::Time now);
  bool IsPutIn(const Entry& entry, ExtentState state) const;
  // Whether the bytes that the record speaks of have been flushed.
  bool IsCovered(const Entry& entry) const;
  // What is covered at the front of the queue. False if it does not fit the area.
  bool TakeBatch(absl::Time now);
  void CommitBatch();
  void BeginSnapshot();
  void FillSnapshotBuffer(absl::Time now);
  void FinishSnapshot();
  void Fail(const absl::Status& status, absl::Time now);
  void SetBuffer(const std::string& bytes, Bytes offset);
  Bytes OffsetOf(int area, uint64_t position) const {
    return layout_.area_offset(area) + kIoUnit * position;
  }

  const NvmeLayout layout_;
  ExtentTable& table_;
  uint64_t generation_;

  std::deque<Entry> queue_;
  std::vector<Entry> batch_;
  std::vector<std::pair<Done, absl::Status>> answers_;

  Step step_ = Step::kIdle;
  bool in_flight_ = false;
  AlignedBuffer buffer_;
  Bytes buffer_offset_;
  uint64_t flushes_begun_ = 0;
  uint64_t last_good_flush_ = 0;  // counted as begun

  int active_ = -1;
  uint64_t nonce_ = 0;
  uint64_t position_ = 0;  // of the next batch

  bool needs_snapshot_ = true;
  int target_;
  AreaHeader target_header_;
  uint64_t target_position_ = 0;
  uint64_t snapshot_next_ = 0;
  bool snapshot_complete_ = false;

  absl::Status error_;
  absl::Time retry_at_ = absl::InfinitePast();
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_NVME_METADATA_LOG_H_
