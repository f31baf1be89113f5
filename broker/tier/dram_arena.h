// Tier 1's memory: the chunks that the arena ledger (broker/core/arena) speaks of, one memfd each,
// which the sessions of one tenant map and write to.
//
// The broker itself never maps them: a worker may truncate its chunks, and whoever reads a mapping
// then dies by SIGBUS. It copies by pread and pwrite, which report that as an error. The copy is
// also what is verified and sent on: nobody can change it meanwhile.
//
// Thread-safe. Create, Retire, Read and Write block.
#ifndef PALIMPSEST_BROKER_TIER_DRAM_ARENA_H_
#define PALIMPSEST_BROKER_TIER_DRAM_ARENA_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "broker/core/arena/arena_ledger.h"
#include "common/bytes.h"
#include "common/fd.h"
#include "common/mutex.h"

namespace palimpsest {

class DramArena {
 public:
  using Maker = std::function<absl::StatusOr<UniqueFd>(Bytes)>;

  struct Options {
    uint32_t max_chunks = 0;
    // A multiple of 2 MiB.
    Bytes chunk_bytes;
    // Descriptors that this process needs for everything else.
    uint32_t other_descriptors = 4096;
    // Before the paths of /proc and /sys, where limits of memory are read.
    std::string system_root;
    // Makes a chunk's memory; by default NewHostMemory of transparent huge pages.
    Maker maker;
  };

  // Makes no memory yet. InvalidArgument; FailedPrecondition if so many descriptors are not
  // allowed.
  static absl::StatusOr<std::unique_ptr<DramArena>> Open(const Options& options);

  // Gives a chunk zeroed memory. ResourceExhausted, with what is short of what, if the machine, a
  // control group or the kernel has not enough; then the chunk has none.
  absl::Status Create(ArenaChunkId chunk);

  // Gives its memory up: truncates it, so that a session that still maps it dies when it touches
  // it.
  absl::Status Retire(ArenaChunkId chunk);

  // For workers; null if the chunk has no memory. What is held survives Retire, empty.
  std::shared_ptr<const UniqueFd> Descriptor(ArenaChunkId chunk) const;

  // Copies a block out of or into its extent, as long as `to` or `from`. DataLoss if a worker has
  // truncated the chunk.
  absl::Status Read(const ArenaExtent& extent, absl::Span<std::byte> to) const;
  absl::Status Write(const ArenaExtent& extent, absl::Span<const std::byte> from);

  // Chunks that have memory.
  uint32_t chunks() const;

 private:
  explicit DramArena(const Options& options) : options_(options), chunks_(options.max_chunks) {}

  absl::Status CheckId(ArenaChunkId chunk) const;
  absl::StatusOr<std::shared_ptr<const UniqueFd>> Find(const ArenaExtent& extent,
                                                       size_t size) const;

  const Options options_;
  mutable Mutex mu_;
  std::vector<std::shared_ptr<const UniqueFd>> chunks_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_DRAM_ARENA_H_
