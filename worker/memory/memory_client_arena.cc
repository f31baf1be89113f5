// The part of GrpcMemoryClient that serves the client of the block store.
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/memory/grpc_memory_client.h"

namespace palimpsest {
namespace {

// ChunksUnmapped in broker.proto.
constexpr int kMaxChunks = 1 << 16;

}  // namespace

void GrpcMemoryClient::SetArenaListener(ArenaListener* listener) {
  {
    MutexLock lock(&mu_);
    arena_listener_ = listener;
    if (!connected_) return;
  }
  TellArena();
}

// Of the session that there is; its end may be told before.
void GrpcMemoryClient::TellArena() {
  ArenaListener* listener = nullptr;
  ArenaSession session;
  {
    MutexLock lock(&mu_);
    listener = arena_listener_;
    session = {session_epoch_, session_, block_token_};
  }
  if (listener != nullptr) listener->OnSession(session);
}

void GrpcMemoryClient::TellArenaLost() {
  ArenaListener* listener = nullptr;
  uint64_t epoch = 0;
  {
    MutexLock lock(&mu_);
    listener = arena_listener_;
    epoch = session_epoch_;
  }
  if (listener != nullptr) listener->OnSessionLost(epoch);
}

absl::Status GrpcMemoryClient::HandleUnmapChunks(const v1::UnmapChunks& message) {
  if (message.chunk_ids_size() < 1 || message.chunk_ids_size() > kMaxChunks) {
    return absl::InvalidArgumentError(absl::StrCat("UnmapChunks names ", message.chunk_ids_size(),
                                                   " chunks, expected 1 to ", kMaxChunks));
  }
  std::vector<uint32_t> chunks(message.chunk_ids().begin(), message.chunk_ids().end());
  ArenaListener* listener = nullptr;
  uint64_t epoch = 0;
  {
    MutexLock lock(&mu_);
    listener = arena_listener_;
    epoch = session_epoch_;
  }
  if (listener != nullptr) {
    listener->OnUnmapChunks(epoch, std::move(chunks));
  } else {
    ChunksUnmapped(epoch, std::move(chunks));  // none is mapped
  }
  return absl::OkStatus();
}

void GrpcMemoryClient::FetchChunk(uint64_t epoch, uint32_t chunk, std::string token) {
  MutexLock lock(&mu_);
  map_tasks_.push_back(ChunkFetch{epoch, chunk, std::move(token)});
  changed_.SignalAll();
}

void GrpcMemoryClient::Perform(ChunkFetch& task) {
  std::shared_ptr<BrokerConnection> connection;
  ArenaListener* listener = nullptr;
  {
    MutexLock lock(&mu_);
    listener = arena_listener_;
    if (task.session_epoch == session_epoch_ && connected_) connection = connection_;
  }
  if (connection == nullptr) {
    return listener->OnChunk(task.session_epoch, task.chunk,
                             absl::UnavailableError("the session that named the chunk is over"));
  }
  const SlabEntry expected{SlabId(task.chunk), Epoch(0)};
  auto memory = connection->FetchSlabs(task.token, {&expected, 1}, /*pieces=*/1);
  if (!memory.ok()) {
    return listener->OnChunk(task.session_epoch, task.chunk, memory.status());
  }
  listener->OnChunk(task.session_epoch, task.chunk, std::move(memory->front().front()));
}

void GrpcMemoryClient::ChunksUnmapped(uint64_t epoch, std::vector<uint32_t> chunks) {
  v1::WorkerMessage message;
  for (const uint32_t chunk : chunks) message.mutable_chunks_unmapped()->add_chunk_ids(chunk);
  MutexLock lock(&mu_);
  if (epoch == session_epoch_) Send(std::move(message));
}

}  // namespace palimpsest
