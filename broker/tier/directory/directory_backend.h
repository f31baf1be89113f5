// Tier 5: a folder of a file system that several nodes share (NFS, Lustre, CephFS, or a disk). Each
// block is one file, which carries all that is known of it (block_file.h).
//
//   FOLDER/palimpsest-tier         says that this is such a folder, and mounted
//   FOLDER/blocks/abc/<key>        32 hexadecimal digits, of which abc are the first
//   FOLDER/temporary/<node>.<...>  files being written
//   FOLDER/purged/<tenant>         hash of the name; the generation that its last purge began
//
// A file appears whole or not at all: it is written elsewhere, flushed, renamed, and its folder
// flushed. Every node may read it; only its writer removes it and accounts for it. Renaming over
// another node's file of the same block makes it ours: its old owner notices when it looks. A file
// that vanished (ENOENT, ESTALE) is a miss.
//
// Temporaries of earlier processes of this node are swept by Open; those of other nodes when they
// are older, by the file system's clock, than `orphan_age`, and so are blocks that expired that
// long ago: their writer is gone.
//
// A purge is one small file with a random number, the tenant's generation: blocks of another one
// are misses for every node, at the latest after `generation_life`.
//
// What other nodes have is found by listing the folders, a few at a time, over and over, and
// reading the header of each file that was not there before (SeenFiles). Open, which reads them all
// anyway, begins with that.
//
// A medium for ThreadedBackend. Thread-safe.
#ifndef PALIMPSEST_BROKER_TIER_DIRECTORY_DIRECTORY_BACKEND_H_
#define PALIMPSEST_BROKER_TIER_DIRECTORY_DIRECTORY_BACKEND_H_

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "broker/tier/directory/block_file.h"
#include "broker/tier/directory/file_operations.h"
#include "broker/tier/directory/seen_files.h"
#include "broker/tier/threaded_backend.h"
#include "common/clock.h"
#include "common/fd.h"
#include "common/mutex.h"

namespace palimpsest {

class DirectoryBackend : public BlockingBackend {
 public:
  struct Options {
    // Must exist: a folder below a mount point that is made by hand, so that nothing is written to
    // the disk below when the file system is not mounted.
    std::string folder;
    // This node, and no other: 1 .. kMaxNodeName letters, digits, '-' and '_'.
    std::string node;
    absl::Duration orphan_age = absl::Hours(24);
    absl::Duration generation_life = absl::Seconds(2);
    // That read the headers of blocks when the tier is opened.
    int scanning_threads = 8;
    // Blocks of other nodes that somebody wants to know of; eight times as many files are
    // remembered.
    size_t foreign_blocks = 0;
    // Whose; empty: everybody's.
    std::vector<std::string> tenants;
  };

  // `files` and `clock` outlive it.
  DirectoryBackend(const Options& options, FileOperations& files, const Clock& clock);

  std::string name() const override { return "file-system"; }
  // With one page of header: exact up to about 900 tokens.
  Bytes Footprint(Bytes length) const override;
  // Reads the header of every file, and removes what this node should: expired and purged blocks of
  // its own and what orphan_age says. InvalidArgument for wrong options; FailedPrecondition if the
  // folder is missing, or has content but not the mark of a tier.
  absl::StatusOr<std::vector<StoredBlock>> Open() override;
  absl::StatusOr<TierPlace> Write(const BlockRecord& record,
                                  absl::Span<const std::byte> from) override;
  absl::Status Read(const BlockRecord& record, TierPlace place, absl::Span<std::byte> to) override;
  absl::Status Remove(const BlockRecord& record, TierPlace place,
                      TierBackend::RemoveReason reason) override;
  absl::Status Purge(const std::string& tenant) override;
  bool shared() const override { return true; }
  absl::StatusOr<StoredBlock> Find(const BlockIdentity& id) override;
  absl::StatusOr<Discovery> Discover() override;

 private:
  static constexpr char kBlocks[] = "blocks";
  static constexpr char kTemporary[] = "temporary";
  static constexpr char kPurged[] = "purged";

  struct OpenFile {
    UniqueFd fd;
    BlockFileHeader header;
    size_t header_bytes = 0;
  };
  struct Generation {
    uint64_t number = 0;
    absl::Time read_at;
  };
  // What a file in a folder of blocks is to this node.
  struct Examined {
    enum class Kind { kVanished, kDamaged, kUnreadable, kOwn, kForeign };
    Kind kind = Kind::kUnreadable;
    // Of kOwn and kForeign: whether it is to be served. Nothing: that cannot be told now.
    std::optional<bool> serves;
    BlockFileHeader header;
  };
  // A round of looks at other nodes' files.
  struct Round {
    bool begun = false;
    SeenFiles::Generations generations;
    std::vector<size_t> folders;  // to be listed
    std::vector<BlockKey> due;    // files to be looked at
  };

  std::string Part(absl::string_view part) const;
  std::string PathOf(const BlockKey& key) const;
  std::string FolderOf(const BlockKey& key) const;
  std::string PurgedPath(const std::string& tenant) const;
  // Of a call that failed with `error`: what TierBackend says of errors.
  absl::Status Failure(absl::string_view what, const std::string& path, int error);

  absl::Status CheckOptions() const;
  absl::Status PrepareFolder();
  absl::Status WriteMark();
  bool Mounted();

  absl::StatusOr<OpenFile> OpenBlock(const std::string& path);
  absl::Status ReadBlock(const BlockRecord& record, absl::Span<std::byte> to);
  absl::Status ReadExactly(int fd, const std::string& path, absl::Span<std::byte> to, off_t from);
  absl::Status WriteAll(int fd, const std::string& path, absl::Span<const std::byte> from);
  absl::Status FlushFolder(const std::string& path);
  // A new file of these parts that is on the medium; its path.
  absl::StatusOr<std::string> WriteTemporary(
      std::initializer_list<absl::Span<const std::byte>> parts);
  // Renames a temporary to `path` in `folder`, which is made if it is missing. After an error the
  // temporary is gone. The folder is not flushed.
  absl::Status Install(const std::string& temporary, const std::string& folder,
                       const std::string& path);

  absl::StatusOr<uint64_t> GenerationOf(const std::string& tenant);
  absl::StatusOr<uint64_t> ReadGeneration(const std::string& tenant);
  void Remember(const std::string& tenant, uint64_t generation);

  // Opening (directory_scan.cc).
  absl::Time TimeOfFileSystem();
  // Older than orphan_age.
  bool IsOld(const std::string& path);
  void SweepTemporaries();
  Examined Examine(const std::string& path);
  // Its files that are blocks of this node to be served; removes what is to be removed.
  void ScanFolder(const std::string& folder, std::vector<StoredBlock>* found);

  // Blocks of other nodes (directory_scan.cc).
  void NoteOwn(const BlockKey& key);
  // Its header is read again.
  void ForgetSeen(const BlockKey& key);
  bool Wants(const BlockFileHeader& header) const;
  void KeepForDiscover(BlockFileHeader header);
  absl::Status BeginRound();
  absl::Status ListNext(Discovery* told);
  void LookAt(const BlockKey& key, Discovery* told);

  const Options options_;
  FileOperations& files_;
  const Clock& clock_;
  // Tells this process's temporaries from those of an earlier one.
  const std::string instance_;
  std::atomic<uint64_t> temporaries_ = 0;
  // By the file system's clock; set by Open alone.
  absl::Time opened_at_ = absl::InfinitePast();

  Mutex mu_;
  absl::flat_hash_map<std::string, Generation> generations_ ABSL_GUARDED_BY(mu_);
  SeenFiles seen_ ABSL_GUARDED_BY(mu_);
  // What Open has read of other nodes, and Discover has not told yet.
  std::vector<StoredBlock> opened_ ABSL_GUARDED_BY(mu_);

  Round round_;  // of Discover alone
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_DIRECTORY_DIRECTORY_BACKEND_H_
