#include "worker/blocks/arena_map.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/core/check.h"

namespace palimpsest {
namespace {

constexpr uint64_t kAlignment = 4096;

}  // namespace

void ArenaMap::Reset(Gone& gone) {
  for (auto& [id, chunk] : chunks_) {
    chunk->forgotten = true;
    if (chunk->places == 0) gone.push_back(std::move(chunk->memory));
  }
  chunks_.clear();
}

void ArenaMap::Insert(uint32_t chunk, ChunkMemory memory) {
  auto& slot = chunks_[chunk];
  PALIMPSEST_CHECK(slot == nullptr);
  slot = std::make_shared<Chunk>(std::move(memory));
}

absl::StatusOr<StorePlace> ArenaMap::Hold(const ChunkExtent& extent, uint64_t request) {
  const auto found = chunks_.find(extent.chunk);
  if (found == chunks_.end() || found->second->leaving) {
    return absl::UnavailableError(absl::StrCat("chunk ", extent.chunk, " is gone or about to go"));
  }
  const std::shared_ptr<Chunk>& chunk = found->second;
  const uint64_t size = chunk->memory.size();
  if (extent.length_bytes != static_cast<uint64_t>(block_bytes_.count()) ||
      extent.offset_bytes % kAlignment != 0 || extent.offset_bytes > size ||
      extent.length_bytes > size - extent.offset_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a place for ", block_bytes_.ToString(), " in a chunk of ", size,
                     " bytes; got ", extent.length_bytes, " bytes at ", extent.offset_bytes));
  }
  ++chunk->places;
  const uint64_t id = next_place_++;
  places_.emplace(id, Place{chunk, {extent, request}});
  return StorePlace{chunk->memory.data() + extent.offset_bytes, id};
}

std::optional<ArenaMap::Held> ArenaMap::Find(uint64_t place) const {
  const Place& found = places_.at(place);
  if (found.chunk->forgotten) return std::nullopt;
  return found.held;
}

std::optional<uint32_t> ArenaMap::Drop(uint64_t place, Gone& gone) {
  const auto found = places_.find(place);
  PALIMPSEST_CHECK(found != places_.end());
  const std::shared_ptr<Chunk> chunk = std::move(found->second.chunk);
  const uint32_t id = found->second.held.extent.chunk;
  places_.erase(found);
  if (--chunk->places > 0 || (!chunk->leaving && !chunk->forgotten)) return std::nullopt;
  gone.push_back(std::move(chunk->memory));
  if (chunk->forgotten) return std::nullopt;
  chunks_.erase(id);
  return id;
}

std::vector<uint32_t> ArenaMap::Unmap(absl::Span<const uint32_t> chunks, Gone& gone) {
  std::vector<uint32_t> unmapped;
  for (const uint32_t id : chunks) {
    const auto found = chunks_.find(id);
    if (found == chunks_.end()) {
      unmapped.push_back(id);
      continue;
    }
    Chunk& chunk = *found->second;
    chunk.leaving = true;
    if (chunk.places > 0) continue;
    gone.push_back(std::move(chunk.memory));
    chunks_.erase(found);
    unmapped.push_back(id);
  }
  return unmapped;
}

}  // namespace palimpsest
