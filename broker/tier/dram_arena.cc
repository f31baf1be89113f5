#include "broker/tier/dram_arena.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "broker/device/host_memory.h"
#include "broker/device/memory_limit.h"
#include "common/descriptor_limit.h"
#include "common/mapping.h"

namespace palimpsest {
namespace {

absl::Status Truncated(const ArenaExtent& extent) {
  return absl::DataLossError(
      absl::StrCat("chunk ", extent.chunk.ToString(), " was truncated by a worker that maps it"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DramArena>> DramArena::Open(const Options& options) {
  if (options.max_chunks == 0 || options.chunk_bytes <= Bytes(0) ||
      options.chunk_bytes.count() % kHugePage.count() != 0) {
    return absl::InvalidArgumentError(absl::StrCat("an arena of ", options.max_chunks,
                                                   " chunks of ", options.chunk_bytes.count(),
                                                   " bytes; expected at least one chunk of a "
                                                   "multiple of ",
                                                   kHugePage.ToString()));
  }
  // Twice: an old descriptor may still be on its way to a worker when its chunk is retired.
  const absl::Status limit =
      ReserveDescriptors(uint64_t{options.max_chunks} * 2 + options.other_descriptors);
  if (!limit.ok()) return limit;
  auto arena = std::unique_ptr<DramArena>(new DramArena(options));
  return arena;
}

absl::Status DramArena::CheckId(ArenaChunkId chunk) const {
  if (chunk.value() < options_.max_chunks) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("chunk ", chunk.ToString(), " of an arena of ", options_.max_chunks));
}

absl::Status DramArena::Create(ArenaChunkId chunk) {
  if (absl::Status status = CheckId(chunk); !status.ok()) return status;
  if (Descriptor(chunk) != nullptr) {
    return absl::AlreadyExistsError(absl::StrCat("chunk ", chunk.ToString(), " has memory"));
  }
  absl::Status limit = CheckMemoryLimit(options_.chunk_bytes, options_.system_root);
  if (!limit.ok()) return limit;
  absl::StatusOr<UniqueFd> memory =
      options_.maker != nullptr
          ? options_.maker(options_.chunk_bytes)
          : NewHostMemory("palimpsest-arena", options_.chunk_bytes, HostPages::kTransparent);
  if (!memory.ok()) return memory.status();
  auto shared = std::make_shared<const UniqueFd>(*std::move(memory));
  MutexLock lock(&mu_);
  chunks_[chunk.value()] = std::move(shared);
  return absl::OkStatus();
}

absl::Status DramArena::Retire(ArenaChunkId chunk) {
  if (absl::Status status = CheckId(chunk); !status.ok()) return status;
  std::shared_ptr<const UniqueFd> memory = Descriptor(chunk);
  if (memory == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("chunk ", chunk.ToString(), " has no memory"));
  }
  if (::ftruncate(memory->get(), 0) != 0) return ErrnoStatus("cannot truncate a chunk");
  MutexLock lock(&mu_);
  chunks_[chunk.value()] = nullptr;
  return absl::OkStatus();
}

std::shared_ptr<const UniqueFd> DramArena::Descriptor(ArenaChunkId chunk) const {
  if (!CheckId(chunk).ok()) return nullptr;
  MutexLock lock(&mu_);
  return chunks_[chunk.value()];
}

uint32_t DramArena::chunks() const {
  MutexLock lock(&mu_);
  return static_cast<uint32_t>(
      std::count_if(chunks_.begin(), chunks_.end(), [](const auto& c) { return c != nullptr; }));
}

absl::StatusOr<std::shared_ptr<const UniqueFd>> DramArena::Find(const ArenaExtent& extent,
                                                                size_t size) const {
  if (extent.offset < Bytes(0) || extent.length.count() != static_cast<int64_t>(size) ||
      extent.length > options_.chunk_bytes - extent.offset) {
    return absl::InvalidArgumentError(
        absl::StrCat(size, " bytes for an extent of ", extent.length.count(), " bytes at ",
                     extent.offset.count(), " of a chunk of ", options_.chunk_bytes.count()));
  }
  std::shared_ptr<const UniqueFd> memory = Descriptor(extent.chunk);
  if (memory != nullptr) return memory;
  return absl::FailedPreconditionError(
      absl::StrCat("chunk ", extent.chunk.ToString(), " has no memory"));
}

absl::Status DramArena::Read(const ArenaExtent& extent, absl::Span<std::byte> to) const {
  const auto memory = Find(extent, to.size());
  if (!memory.ok()) return memory.status();
  off_t offset = extent.offset.count();
  while (!to.empty()) {
    const ssize_t got = ::pread((*memory)->get(), to.data(), to.size(), offset);
    if (got < 0 && errno != EINTR) return ErrnoStatus("cannot read a chunk");
    if (got == 0) return Truncated(extent);
    to.remove_prefix(std::max<ssize_t>(got, 0));
    offset += std::max<ssize_t>(got, 0);
  }
  return absl::OkStatus();
}

absl::Status DramArena::Write(const ArenaExtent& extent, absl::Span<const std::byte> from) {
  const auto memory = Find(extent, from.size());
  if (!memory.ok()) return memory.status();
  off_t offset = extent.offset.count();
  while (!from.empty()) {
    const ssize_t written = ::pwrite((*memory)->get(), from.data(), from.size(), offset);
    // Growing is sealed.
    if (written == 0 || (written < 0 && errno == EPERM)) return Truncated(extent);
    if (written < 0 && errno != EINTR) return ErrnoStatus("cannot write a chunk");
    from.remove_prefix(std::max<ssize_t>(written, 0));
    offset += std::max<ssize_t>(written, 0);
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
