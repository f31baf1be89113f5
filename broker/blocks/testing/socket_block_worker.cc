#include "broker/blocks/testing/socket_block_worker.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/block_checksum.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "common/memory_file.h"

namespace palimpsest {
namespace {

constexpr absl::Duration kPatience = WorkerLink::kPatience;
constexpr uint32_t kBlockTokens = 16;
// No request's number.
constexpr uint64_t kWriting = 0;

BlockKey KeyOf(uint64_t sequence, uint64_t index) { return {sequence, index + 1}; }

void SetKey(const BlockKey& key, v1::BlockKey* out) {
  out->set_high(key.high);
  out->set_low(key.low);
}

// One call, with patience for its answer.
template <typename Request, typename Response>
absl::Status Call(v1::BlockStore::Stub& stub,
                  grpc::Status (v1::BlockStore::Stub::*method)(grpc::ClientContext*, const Request&,
                                                               Response*),
                  const Request& request, Response* response, absl::Duration patience = kPatience) {
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(patience));
  return FromGrpcStatus((stub.*method)(&context, request, response));
}

}  // namespace

void SocketBlockWorker::Fill(const BlockKey& key, absl::Span<std::byte> bytes) const {
  uint64_t seed = key.low * 1000 + key.high;
  for (const char c : tenant_) seed = seed * 131 + static_cast<unsigned char>(c);
  std::mt19937_64 random(seed);
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
    const uint64_t next = random();
    std::memcpy(bytes.data() + at, &next, std::min(sizeof next, bytes.size() - at));
  }
}

absl::Status SocketBlockWorker::Hello(const std::string& socket, const std::string& tenant,
                                      const std::string& secret) {
  Drop();
  tenant_ = tenant;
  return link_.Hello(socket, tenant, secret);
}

absl::Status SocketBlockWorker::Attach(const std::string& socket) {
  v1::Attach attach;
  attach.set_nonce(link_.nonce());
  const absl::StatusOr<v1::Attached> attached = link_.Open(socket, attach);
  if (!attached.ok()) return attached.status();
  blocks_ = v1::BlockStore::NewStub(link_.channel());
  session_.set_session_id(attached->session_id());
  session_.set_block_token(attached->block_token());
  reader_ = std::thread([this] { Read(); });
  // So long that every tier is worth its while.
  v1::SetRecomputeRequest recompute;
  *recompute.mutable_session() = session_;
  recompute.set_first_seconds(10);
  v1::SetRecomputeResponse ignored;
  (void)Call(*blocks_, &v1::BlockStore::Stub::SetRecompute, recompute, &ignored);
  return absl::OkStatus();
}

void SocketBlockWorker::Drop() {
  link_.Cancel();
  if (reader_.joinable()) reader_.join();
  {
    MutexLock lock(&mu_);
    chunks_.clear();
    owed_.clear();
  }
  LetGo(std::exchange(written_, {}), kWriting);
  for (const auto& [request, blocks] : std::exchange(requests_, {})) LetGo(blocks, request);
}

void SocketBlockWorker::Read() {
  v1::BrokerMessage message;
  while (link_.Read(&message)) {
    if (!message.has_unmap_chunks() || !answers_) continue;
    std::set<uint32_t> unmapped;
    {
      MutexLock lock(&mu_);
      for (const uint32_t id : message.unmap_chunks().chunk_ids()) {
        const auto found = chunks_.find(id);
        if (found != chunks_.end()) found->second->leaving = true;
        if (found != chunks_.end() && found->second->places > 0) continue;
        if (found != chunks_.end()) chunks_.erase(found);
        unmapped.insert(id);
      }
    }
    SayUnmapped(unmapped);
  }
}

void SocketBlockWorker::SayUnmapped(const std::set<uint32_t>& chunks) {
  if (chunks.empty()) return;
  v1::WorkerMessage answer;
  for (const uint32_t id : chunks) answer.mutable_chunks_unmapped()->add_chunk_ids(id);
  // If the stream has ended the broker knows that nothing is mapped.
  (void)link_.Send(answer);
}

v1::BlockChain SocketBlockWorker::Chain(uint64_t sequence, uint32_t count) const {
  v1::BlockChain chain;
  chain.set_block_tokens(kBlockTokens);
  std::vector<uint64_t> keys;
  std::vector<int32_t> tokens;
  for (uint32_t i = 0; i < count; ++i) {
    const BlockKey key = KeyOf(sequence, i);
    keys.insert(keys.end(), {key.high, key.low});
    for (uint32_t t = 0; t < kBlockTokens; ++t) {
      tokens.push_back(static_cast<int32_t>(sequence * 7 + uint64_t{i} * kBlockTokens + t));
    }
  }
  chain.mutable_keys()->Add(keys.begin(), keys.end());
  chain.mutable_tokens()->Add(tokens.begin(), tokens.end());
  return chain;
}

absl::Status SocketBlockWorker::MapChunk(uint32_t chunk) {
  v1::MapChunksRequest request;
  *request.mutable_session() = session_;
  request.add_chunk_ids(chunk);
  v1::MapChunksResponse response;
  absl::Status status = Call(*blocks_, &v1::BlockStore::Stub::MapChunks, request, &response);
  if (!status.ok()) return status;
  std::vector<SlabEntry> entries;
  const auto memory = link_.Fetch(response.token(), &entries);
  if (!memory.ok()) return memory.status();
  if (memory->size() != 1 || entries.size() != 1 ||
      entries[0] != SlabEntry{SlabId(chunk), Epoch(0)}) {
    return absl::InternalError("another descriptor came than was asked for");
  }
  const Bytes size(static_cast<int64_t>(response.chunk_bytes()));
  // One that was revoked meanwhile has lost its memory.
  if (absl::Status whole = CheckSlabFile(memory->front().get(), size); !whole.ok()) return whole;
  auto mapping = Mapping::Map(memory->front().get(), size, MapAccess::kReadWrite);
  if (!mapping.ok()) return mapping.status();
  auto mapped = std::make_shared<Chunk>();
  mapped->mapping = *std::move(mapping);
  chunks_[chunk] = std::move(mapped);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<SocketBlockWorker::Chunk>> SocketBlockWorker::Hold(
    const v1::BlockExtent& extent, uint64_t request) {
  const uint32_t id = extent.chunk_id();
  MutexLock lock(&mu_);
  absl::Status mapped;
  if (!chunks_.contains(id)) mapped = MapChunk(id);
  if (mapped.ok() && chunks_.at(id)->leaving) {
    mapped = absl::UnavailableError(absl::StrCat("chunk ", id, " is about to go"));
  }
  if (!mapped.ok()) {
    owed_[request].insert(id);
    return mapped;
  }
  const std::shared_ptr<Chunk>& chunk = chunks_.at(id);
  if (extent.length_bytes() != block_bytes_ ||
      extent.offset_bytes() + block_bytes_ > chunk->mapping.size()) {
    return absl::InternalError(absl::StrCat("no place in a chunk: ", extent.ShortDebugString()));
  }
  ++chunk->places;
  return chunk;
}

void SocketBlockWorker::LetGo(const std::vector<Placed>& blocks, uint64_t request) {
  std::set<uint32_t> unmapped;
  {
    MutexLock lock(&mu_);
    for (const Placed& block : blocks) {
      if (--block.chunk->places > 0 || !block.chunk->leaving) continue;
      const auto found = chunks_.find(block.extent.chunk_id());
      // None of an earlier session.
      if (found == chunks_.end() || found->second != block.chunk) continue;
      chunks_.erase(found);
      unmapped.insert(block.extent.chunk_id());
    }
    const auto owed = owed_.extract(request);
    for (const uint32_t chunk : owed.empty() ? std::set<uint32_t>() : owed.mapped()) {
      // One where places are still held is answered for when they are not.
      if (!chunks_.contains(chunk)) unmapped.insert(chunk);
    }
  }
  if (answers_) SayUnmapped(unmapped);
}

absl::StatusOr<v1::ReserveResponse> SocketBlockWorker::CallReserve(uint64_t sequence,
                                                                   uint32_t count,
                                                                   uint64_t request) {
  v1::ReserveRequest reserve;
  *reserve.mutable_session() = session_;
  *reserve.mutable_chain() = Chain(sequence, count);
  reserve.set_block_bytes(block_bytes_);
  reserve.set_request_id(request);
  v1::ReserveResponse reserved;
  absl::Status status = Call(*blocks_, &v1::BlockStore::Stub::Reserve, reserve, &reserved);
  if (!status.ok()) return status;
  v1::AbortRequest abort;
  for (int i = 0; i < reserved.blocks_size(); ++i) {
    const v1::ReservedBlock& block = reserved.blocks(i);
    if (block.result() != v1::ReservedBlock::RESULT_RESERVED) continue;
    const BlockKey key = KeyOf(sequence, static_cast<uint64_t>(i));
    const auto chunk = Hold(block.extent(), kWriting);
    if (!chunk.ok()) {
      SetKey(key, abort.add_keys());
      continue;
    }
    Placed& placed = written_.emplace_back(Placed{key, 0, block.extent(), *chunk});
    Fill(key, BytesOf(placed));
    placed.checksum = BlockChecksum(key, BytesOf(placed));
  }
  if (!abort.keys().empty()) {
    *abort.mutable_session() = session_;
    v1::AbortResponse ignored;
    status = Call(*blocks_, &v1::BlockStore::Stub::Abort, abort, &ignored);
    LetGo({}, kWriting);
    if (!status.ok()) return status;
  }
  return reserved;
}

absl::StatusOr<uint32_t> SocketBlockWorker::Reserve(uint64_t sequence, uint32_t count,
                                                    uint64_t request) {
  const size_t before = written_.size();
  const auto reserved = CallReserve(sequence, count, request);
  if (!reserved.ok()) return reserved.status();
  return static_cast<uint32_t>(written_.size() - before);
}

absl::StatusOr<uint32_t> SocketBlockWorker::Put(uint64_t sequence, uint32_t count) {
  const size_t before = written_.size();
  const auto reserved = CallReserve(sequence, count, 0);
  if (!reserved.ok()) return reserved.status();
  auto there = static_cast<uint32_t>(written_.size() - before);
  for (const v1::ReservedBlock& block : reserved->blocks()) {
    if (block.result() == v1::ReservedBlock::RESULT_PRESENT) ++there;
  }
  if (absl::Status status = Commit(); !status.ok()) return status;
  return there;
}

absl::Status SocketBlockWorker::Commit() {
  const std::vector<Placed> blocks = std::exchange(written_, {});
  if (blocks.empty()) return absl::OkStatus();
  v1::CommitRequest commit;
  *commit.mutable_session() = session_;
  for (const Placed& block : blocks) {
    v1::CommittedBlock& committed = *commit.add_blocks();
    SetKey(block.key, committed.mutable_key());
    committed.set_checksum(block.checksum);
  }
  v1::CommitResponse ignored;
  absl::Status status = Call(*blocks_, &v1::BlockStore::Stub::Commit, commit, &ignored);
  LetGo(blocks, kWriting);
  return status;
}

absl::Status SocketBlockWorker::Abort() {
  const std::vector<Placed> blocks = std::exchange(written_, {});
  if (blocks.empty()) return absl::OkStatus();
  v1::AbortRequest abort;
  *abort.mutable_session() = session_;
  for (const Placed& block : blocks) SetKey(block.key, abort.add_keys());
  v1::AbortResponse ignored;
  absl::Status status = Call(*blocks_, &v1::BlockStore::Stub::Abort, abort, &ignored);
  LetGo(blocks, kWriting);
  return status;
}

absl::StatusOr<v1::AcquireResponse> SocketBlockWorker::Acquire(uint64_t sequence, uint32_t count,
                                                               uint64_t request,
                                                               absl::Duration wait) {
  v1::AcquireRequest acquire;
  *acquire.mutable_session() = session_;
  *acquire.mutable_chain() = Chain(sequence, count);
  acquire.set_request_id(request);
  acquire.set_promote(wait > absl::ZeroDuration());
  acquire.set_wait_seconds(absl::ToDoubleSeconds(wait));
  v1::AcquireResponse response;
  const absl::Status status =
      Call(*blocks_, &v1::BlockStore::Stub::Acquire, acquire, &response, wait + kPatience);
  if (!status.ok()) return status;
  std::vector<Placed>& held = requests_[request];
  for (int i = 0; i < response.blocks_size(); ++i) {
    const v1::PinnedBlock& block = response.blocks(i);
    const auto chunk = Hold(block.extent(), request);
    if (!chunk.ok()) break;
    held.push_back(
        {KeyOf(sequence, static_cast<uint64_t>(i)), block.checksum(), block.extent(), *chunk});
  }
  return response;
}

absl::StatusOr<uint32_t> SocketBlockWorker::Verify(uint64_t request) {
  uint32_t good = 0;
  std::vector<std::byte> expected(block_bytes_);
  for (const Placed& block : requests_[request]) {
    const absl::Span<std::byte> bytes = BytesOf(block);
    // As a worker: what it has copied is what it compares.
    const std::vector<std::byte> copy(bytes.begin(), bytes.end());
    if (BlockChecksum(block.key, copy) != block.checksum) break;
    Fill(block.key, absl::MakeSpan(expected));
    if (copy != expected) {
      return absl::DataLossError(absl::StrCat("block ", block.key.low - 1, " of sequence ",
                                              block.key.high, " of ", tenant_, " in chunk ",
                                              block.extent.chunk_id(), " at ",
                                              block.extent.offset_bytes(), " has other bytes"));
    }
    ++good;
  }
  return good;
}

bool SocketBlockWorker::Damage(uint64_t request) {
  const std::vector<Placed>& blocks = requests_[request];
  if (blocks.empty()) return false;
  BytesOf(blocks.back())[block_bytes_ / 2] ^= std::byte{1};
  return true;
}

absl::Status SocketBlockWorker::Release(uint64_t request) {
  const std::vector<Placed> blocks = std::exchange(requests_[request], {});
  if (blocks.empty()) return absl::OkStatus();
  v1::ReleaseRequest release;
  *release.mutable_session() = session_;
  release.set_request_id(request);
  for (const Placed& block : blocks) *release.add_extents() = block.extent;
  v1::ReleaseResponse ignored;
  absl::Status status = Call(*blocks_, &v1::BlockStore::Stub::Release, release, &ignored);
  // What it pins besides, unread, it keeps until it ends.
  LetGo(blocks, kWriting);
  return status;
}

absl::Status SocketBlockWorker::EndRequest(uint64_t request) {
  v1::EndRequestRequest end;
  *end.mutable_session() = session_;
  end.set_request_id(request);
  v1::EndRequestResponse ignored;
  absl::Status status = Call(*blocks_, &v1::BlockStore::Stub::EndRequest, end, &ignored);
  const auto ended = requests_.extract(request);
  LetGo(ended.empty() ? std::vector<Placed>() : ended.mapped(), request);
  return status;
}

absl::StatusOr<uint32_t> SocketBlockWorker::Get(uint64_t sequence, uint32_t count, uint64_t request,
                                                absl::Duration wait) {
  const absl::StatusOr<v1::AcquireResponse> acquired = Acquire(sequence, count, request, wait);
  if (!acquired.ok()) return acquired.status();
  absl::StatusOr<uint32_t> good = Verify(request);
  if (absl::Status status = EndRequest(request); good.ok() && !status.ok()) return status;
  return good;
}

absl::StatusOr<uint64_t> SocketBlockWorker::Hint(const v1::CacheAction& action, uint64_t sequence,
                                                 uint32_t count, uint32_t first) {
  v1::HintRequest hint;
  *hint.mutable_session() = session_;
  *hint.mutable_chain() = Chain(sequence, count);
  *hint.mutable_action() = action;
  hint.set_first_block(first);
  v1::HintResponse response;
  const absl::Status status = Call(*blocks_, &v1::BlockStore::Stub::Hint, hint, &response);
  if (!status.ok()) return status;
  return response.blocks();
}

}  // namespace palimpsest
