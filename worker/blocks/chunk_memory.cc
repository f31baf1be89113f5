#include "worker/blocks/chunk_memory.h"

#include "common/log.h"
#include "common/memory_file.h"

namespace palimpsest {

absl::StatusOr<ChunkMemory> ChunkMemory::Map(int fd, Bytes size, MemoryBackend* backend) {
  if (absl::Status status = CheckSlabFile(fd, size); !status.ok()) return status;
  // The broker has given all of it memory.
  auto mapping = Mapping::Map(fd, size, MapAccess::kReadWrite, MapPopulate::kYes);
  if (!mapping.ok()) return mapping.status();
  std::unique_ptr<HostPin> pin;
  if (backend != nullptr) {
    auto pinned = backend->Pin({mapping->data(), mapping->size()});
    if (pinned.ok()) {
      pin = *std::move(pinned);
    } else {
      Log(LogLevel::kWarning,
          "a chunk of the arena is used without being pinned: its blocks are copied slower",
          {{"bytes", size}, {"status", pinned.status()}});
    }
  }
  return ChunkMemory(*std::move(mapping), std::move(pin));
}

}  // namespace palimpsest
