// The part of BlockStoreClient that has chunks come and go.
#include <utility>

#include "common/log.h"
#include "worker/blocks/block_store_client.h"
#include "worker/blocks/block_store_messages.h"

namespace palimpsest {

void BlockStoreClient::OnMapOffered(const SessionPtr& session, uint32_t chunk,
                                    const absl::Status& status,
                                    const v1::MapChunksResponse& response) {
  const absl::StatusOr<Bytes> size = status.ok() ? ChunkBytesOf(response) : status;
  bool fetch = false;
  if (size.ok()) {
    MutexLock lock(&mu_);
    fetch = session_ == session;
    if (fetch) mapping_[chunk] = *size;
  }
  if (fetch) return link_->FetchChunk(session->epoch, chunk, response.token());
  OnMapped(session->epoch, chunk, std::nullopt);
}

void BlockStoreClient::OnChunk(uint64_t epoch, uint32_t chunk, absl::StatusOr<UniqueFd> memory) {
  Bytes size;
  {
    MutexLock lock(&mu_);
    if (session_ == nullptr || session_->epoch != epoch) return;
    const auto found = mapping_.find(chunk);
    if (found == mapping_.end()) return;
    size = found->second;
  }
  chunk_tasks_.Push([this, epoch, chunk, size, memory = std::move(memory)] {
    auto mapped = memory.ok() ? ChunkMemory::Map(memory->get(), size, options_.backend)
                              : absl::StatusOr<ChunkMemory>(memory.status());
    if (mapped.ok()) return OnMapped(epoch, chunk, *std::move(mapped));
    Log(LogLevel::kWarning, "a chunk of the arena cannot be mapped",
        {{"chunk", chunk}, {"status", mapped.status()}});
    OnMapped(epoch, chunk, std::nullopt);
  });
}

bool BlockStoreClient::Waits(const Answer& answer) const {
  for (const Named& block : answer.blocks) {
    if (block.result == ReservedBlock::Result::kReserved && mapping_.contains(block.extent.chunk)) {
      return true;
    }
  }
  return false;
}

void BlockStoreClient::OnMapped(uint64_t epoch, uint32_t chunk, std::optional<ChunkMemory> memory) {
  std::vector<Answer> ready;
  ArenaMap::Gone gone;
  bool unwanted = false;
  {
    MutexLock lock(&mu_);
    if (session_ == nullptr || session_->epoch != epoch || mapping_.erase(chunk) == 0) return;
    unwanted = unwanted_.erase(chunk) > 0;
    if (memory.has_value()) {
      if (unwanted) {
        gone.push_back(*std::move(memory));
      } else {
        map_.Insert(chunk, *std::move(memory));
      }
    }
    std::vector<Answer> waiting;
    for (Answer& answer : unsettled_) {
      (Waits(answer) ? waiting : ready).push_back(std::move(answer));
    }
    unsettled_ = std::move(waiting);
  }
  if (unwanted) Discard(std::move(gone), epoch, {chunk});
  for (Answer& answer : ready) PassOn(std::move(answer));
}

void BlockStoreClient::Discard(ArenaMap::Gone gone, uint64_t epoch,
                               std::vector<uint32_t> unmapped) {
  if (gone.empty() && unmapped.empty()) return;
  // In order, also with nothing to end: the chunk may be one whose memory is about to.
  chunk_tasks_.Push(
      [this, gone = std::move(gone), epoch, unmapped = std::move(unmapped)]() mutable {
        gone.clear();
        if (!unmapped.empty()) link_->ChunksUnmapped(epoch, std::move(unmapped));
      });
}

void BlockStoreClient::Drop(const Given& given) {
  ArenaMap::Gone gone;
  std::vector<uint32_t> unmapped;
  SessionPtr session;
  {
    MutexLock lock(&mu_);
    for (const uint64_t place : given.places) {
      if (const auto chunk = map_.Drop(place, gone)) unmapped.push_back(*chunk);
    }
    for (const uint32_t chunk : given.chunks) {
      if (!map_.mapped(chunk) && !mapping_.contains(chunk)) unmapped.push_back(chunk);
    }
    session = session_;
  }
  if (session == nullptr) unmapped.clear();
  Discard(std::move(gone), session == nullptr ? 0 : session->epoch, std::move(unmapped));
}

void BlockStoreClient::OnUnmapChunks(uint64_t epoch, std::vector<uint32_t> chunks) {
  ArenaMap::Gone gone;
  std::vector<uint32_t> unmapped;
  bool held = false;
  {
    MutexLock lock(&mu_);
    std::vector<uint32_t> known;
    for (const uint32_t chunk : chunks) {
      if (mapping_.contains(chunk)) {
        unwanted_.insert(chunk);
      } else {
        known.push_back(chunk);
      }
    }
    unmapped = map_.Unmap(known, gone);
    held = unmapped.size() < known.size();
    if (held) events_.push_back(PlacesWanted{});
  }
  Discard(std::move(gone), epoch, std::move(unmapped));
  if (held) Wake();
}

}  // namespace palimpsest
