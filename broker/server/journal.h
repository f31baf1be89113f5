// The broker's memory of who holds what, kept in its state directory so that the next broker
// process can recognise the slabs and images that workers bring back.
//
// Durability: an entry must outlive the broker's process, not the machine (when the machine goes,
// so do all workers and every memfd). Append therefore returns once write(2) has handed the records
// to the kernel; fdatasync is paid only where a file replaces another (start, compaction), so that
// a power cut leaves the old or the new file, and a generation is never used twice. Entries of an
// earlier boot are dropped at Open, damaged or not.
//
// The directory holds `lock` (flock'ed for the life of the object; two brokers cannot share it),
// `journal` and, while it is being rewritten, `journal.new`. It is rewritten from a snapshot at
// Open and when it has grown beyond Options::compact_above and to twice the snapshot's size.
//
// Threads: all methods are thread-safe. Append blocks on a write; concurrent callers are written
// together, by one of them.
#ifndef PALIMPSEST_BROKER_SERVER_JOURNAL_H_
#define PALIMPSEST_BROKER_SERVER_JOURNAL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "broker/server/journal_replay.h"
#include "common/bytes.h"
#include "common/mutex.h"

namespace palimpsest {

class Journal {
 public:
  struct Options {
    std::string directory;  // created (mode 0700) if missing
    std::string boot_id;    // of the running kernel
    Bytes slab_bytes;
    uint32_t pool_slabs = 0;
    Bytes compact_above = MiB(4);
  };

  // Locks the directory, replays what is there and starts the next generation. FailedPrecondition:
  // another broker holds the lock. DataLoss: the file is damaged in the middle; the message says
  // what an operator should do.
  static absl::StatusOr<std::unique_ptr<Journal>> Open(Options options);
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // What earlier generations left behind (with their generation, 0 if none).
  const JournalState& recovered() const { return recovered_; }
  // This process's generation.
  uint32_t generation() const { return generation_; }

  // Writes the records, in order and without others between them. After an error nothing of them is
  // in the file and the next Append may succeed, unless the file could not be cut back: then all
  // further calls fail with Internal.
  absl::Status Append(absl::Span<const journal::Record> records);

 private:
  struct Batch;

  Journal(Options options, int lock_fd, JournalState recovered);

  // Replaces the file by a snapshot of `state`.
  absl::Status WriteSnapshot(const JournalState& state);
  // Called by the one thread that writes (`writing_`), without the lock.
  absl::Status WriteBatch(Batch& batch);

  const Options options_;
  const int lock_fd_;
  const JournalState recovered_;
  uint32_t generation_ = 0;

  Mutex mu_;
  CondVar written_;
  std::shared_ptr<Batch> open_batch_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;

  // Owned by whoever set `writing_`.
  JournalState state_;
  absl::Status broken_;
  int fd_ = -1;
  uint32_t next_sequence_ = 0;
  size_t file_bytes_ = 0;
  size_t snapshot_bytes_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_JOURNAL_H_
