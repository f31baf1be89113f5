#include "broker/server/journal.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

absl::Status Failed(absl::string_view what, const std::string& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat(what, " ", path));
}

absl::Status WriteAll(int fd, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return absl::ErrnoToStatus(errno, "write");
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

// An absent file reads as an empty one.
absl::StatusOr<std::string> ReadFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) return std::string();
  if (fd < 0) return Failed("open", path);
  std::string content;
  char chunk[1 << 16];
  ssize_t n = 0;
  while ((n = read(fd, chunk, sizeof chunk)) != 0) {
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) break;
    content.append(chunk, static_cast<size_t>(n));
  }
  const absl::Status status = n < 0 ? Failed("read", path) : absl::OkStatus();
  close(fd);
  if (!status.ok()) return status;
  return content;
}

absl::StatusOr<int> LockDirectory(const std::string& directory) {
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return Failed("create the state directory", directory);
  }
  const std::string path = directory + "/lock";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return Failed("open", path);
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
  const absl::Status status =
      errno == EWOULDBLOCK
          ? absl::FailedPreconditionError(absl::StrCat(
                "another broker uses the state directory ", directory,
                ": stop it, or give this one its own state_dir (to find it: fuser ", path, ")"))
          : Failed("lock", path);
  close(fd);
  return status;
}

}  // namespace

struct Journal::Batch {
  std::vector<journal::Record> records;
  bool done = false;
  absl::Status result;
};

absl::StatusOr<std::unique_ptr<Journal>> Journal::Open(Options options) {
  const absl::StatusOr<int> lock = LockDirectory(options.directory);
  if (!lock.ok()) return lock.status();
  const std::string path = options.directory + "/journal";
  JournalState state;
  absl::StatusOr<std::string> content = ReadFile(path);
  absl::Status status = content.status();
  if (status.ok()) {
    JournalReplay replay = ReplayJournal(*content);
    const std::string& boot_id = replay.state.generation.boot_id();
    // A machine that went down in between may have lost any record but the snapshot.
    if (!replay.damage.ok() && (boot_id.empty() || boot_id == options.boot_id)) {
      status = absl::DataLossError(absl::StrCat(
          path, ": ", replay.damage.message(),
          ". The broker cannot tell which slabs its workers still hold: stop all workers of this "
          "node, remove the file, start the broker again"));
    }
    state = std::move(replay.state);
  }
  if (!status.ok()) {
    close(*lock);
    return status;
  }
  if (state.generation.boot_id() != options.boot_id) {
    state.sessions.clear();
    state.slabs.clear();
    state.images.clear();
  }
  std::unique_ptr<Journal> journal(new Journal(std::move(options), *lock, std::move(state)));
  JournalState next = journal->recovered_;
  journal::Generation& generation = next.generation;
  generation.set_generation(journal->generation_);
  generation.set_boot_id(journal->options_.boot_id);
  generation.set_slab_bytes(static_cast<uint64_t>(journal->options_.slab_bytes.count()));
  generation.set_pool_slabs(journal->options_.pool_slabs);
  if (status = journal->WriteSnapshot(next); !status.ok()) return status;
  journal->state_ = std::move(next);
  return journal;
}

Journal::Journal(Options options, int lock_fd, JournalState recovered)
    : options_(std::move(options)),
      lock_fd_(lock_fd),
      recovered_(std::move(recovered)),
      generation_(recovered_.generation.generation() + 1) {}

Journal::~Journal() {
  if (fd_ >= 0) close(fd_);
  close(lock_fd_);
}

absl::Status Journal::WriteSnapshot(const JournalState& state) {
  const std::string path = options_.directory + "/journal";
  const std::string fresh = path + ".new";
  std::string bytes(kJournalMagic);
  uint32_t sequence = 0;
  for (const journal::Record& record : state.Snapshot()) {
    AppendJournalFrame(record, sequence++, bytes);
  }
  const int fd = open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return Failed("create", fresh);
  absl::Status status = WriteAll(fd, bytes);
  if (status.ok() && fsync(fd) != 0) status = Failed("fsync", fresh);
  if (status.ok() && rename(fresh.c_str(), path.c_str()) != 0) status = Failed("rename", fresh);
  if (!status.ok()) {
    close(fd);
    unlink(fresh.c_str());
    return status;
  }
  if (fd_ >= 0) close(fd_);
  fd_ = fd;
  next_sequence_ = sequence;
  file_bytes_ = snapshot_bytes_ = bytes.size();
  const int directory = open(options_.directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return Failed("open", options_.directory);
  if (fsync(directory) != 0) status = Failed("fsync", options_.directory);
  close(directory);
  return status;
}

absl::Status Journal::Append(absl::Span<const journal::Record> records) {
  if (records.empty()) return absl::OkStatus();
  std::shared_ptr<Batch> mine;
  {
    MutexLock lock(&mu_);
    if (open_batch_ == nullptr) open_batch_ = std::make_shared<Batch>();
    mine = open_batch_;
    mine->records.insert(mine->records.end(), records.begin(), records.end());
    while (!mine->done && writing_) written_.Wait(&mu_);
    if (mine->done) return mine->result;
    // Nobody writes and this batch is not done, so it is still the open one.
    writing_ = true;
    open_batch_ = nullptr;
  }
  const absl::Status result = WriteBatch(*mine);
  MutexLock lock(&mu_);
  mine->result = result;
  mine->done = true;
  writing_ = false;
  written_.SignalAll();
  return result;
}

absl::Status Journal::WriteBatch(Batch& batch) {
  if (!broken_.ok()) return broken_;
  std::string bytes;
  uint32_t sequence = next_sequence_;
  for (const journal::Record& record : batch.records) {
    AppendJournalFrame(record, sequence++, bytes);
  }
  if (absl::Status status = WriteAll(fd_, bytes); !status.ok()) {
    const std::string path = options_.directory + "/journal";
    const off_t length = static_cast<off_t>(file_bytes_);
    if (ftruncate(fd_, length) != 0 || lseek(fd_, length, SEEK_SET) != length) {
      broken_ = absl::InternalError(absl::StrCat(
          path, " holds a half-written record that could not be cut off; restart the broker"));
    }
    return absl::Status(status.code(),
                        absl::StrCat(path, ": ", status.message(), "; nothing was recorded"));
  }
  next_sequence_ = sequence;
  file_bytes_ += bytes.size();
  for (const journal::Record& record : batch.records) {
    if (const absl::Status applied = state_.Apply(record); !applied.ok()) {
      fprintf(stderr, "journal: a record that contradicts the earlier ones: %s\n",
              std::string(applied.message()).c_str());
      abort();
    }
  }
  if (file_bytes_ > static_cast<size_t>(options_.compact_above.count()) &&
      file_bytes_ > 2 * snapshot_bytes_) {
    // The records are in the old file already: a failed compaction is tried again by a later batch.
    (void)WriteSnapshot(state_);
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
