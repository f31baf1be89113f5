// A chunk of the arena as this process has it: mapped, and pinned where a device copies from and to
// it. Ends in the reverse order.
#ifndef PALIMPSEST_WORKER_BLOCKS_CHUNK_MEMORY_H_
#define PALIMPSEST_WORKER_BLOCKS_CHUNK_MEMORY_H_

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "common/mapping.h"
#include "worker/memory/region_memory.h"

namespace palimpsest {

class ChunkMemory {
 public:
  ChunkMemory(ChunkMemory&&) = default;
  // It would unmap what is still pinned.
  ChunkMemory& operator=(ChunkMemory&&) = delete;

  // Checks that `fd` is a chunk's file of exactly this size, maps it, and has `backend` pin it, if
  // there is one; it must outlive the chunk. What cannot be pinned is used as it is, which is said
  // in the log: copies are slower, and whoever measures them finds out. Blocks.
  static absl::StatusOr<ChunkMemory> Map(int fd, Bytes size, MemoryBackend* backend = nullptr);

  std::byte* data() const { return mapping_.data(); }
  size_t size() const { return mapping_.size(); }

 private:
  ChunkMemory(Mapping mapping, std::unique_ptr<HostPin> pin)
      : mapping_(std::move(mapping)), pin_(std::move(pin)) {}

  Mapping mapping_;
  std::unique_ptr<HostPin> pin_;  // gone before the mapping
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_BLOCKS_CHUNK_MEMORY_H_
