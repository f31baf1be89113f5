#include "broker/blocks/testing/socket_block_worker.h"

#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/block_checksum.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"

namespace palimpsest {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);
constexpr uint32_t kBlockTokens = 16;

BlockKey KeyOf(uint64_t sequence, uint64_t index) { return {sequence, index + 1}; }

// The bytes of a block, told by its key.
void Fill(const BlockKey& key, absl::Span<std::byte> bytes) {
  std::mt19937_64 random(key.low * 1000 + key.high);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
}

// A context for one call.
std::unique_ptr<grpc::ClientContext> Patient(absl::Duration patience = kPatience) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(GrpcTimeout(patience));
  return context;
}

}  // namespace

absl::Status SocketBlockWorker::Hello(const std::string& socket, const std::string& tenant,
                                      const std::string& secret) {
  absl::StatusOr<DescriptorChannel> channel = DescriptorChannel::Connect(socket);
  if (!channel.ok()) return channel.status();
  descriptors_.emplace(*std::move(channel));
  const absl::Status sent = descriptors_->Send(
      palimpsest::Hello{kDescriptorProtocolVersion, tenant, secret}, {}, kPatience);
  if (!sent.ok()) return sent;
  const absl::StatusOr<Welcome> welcome = descriptors_->ReceiveA<Welcome>(kPatience);
  if (!welcome.ok()) return welcome.status();
  nonce_ = welcome->nonce;
  return absl::OkStatus();
}

absl::Status SocketBlockWorker::Attach(const std::string& socket) {
  grpc::ChannelArguments arguments;
  // A channel of its own, not one from gRPC's pool that may still back off from an earlier broker.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  channel_ =
      grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
  context_ = std::make_unique<grpc::ClientContext>();
  stream_ = v1::Broker::NewStub(channel_)->Session(context_.get());
  blocks_ = v1::BlockStore::NewStub(channel_);
  v1::WorkerMessage message;
  message.mutable_attach()->set_nonce(nonce_.ToBytes());
  stream_->Write(message);
  v1::BrokerMessage answer;
  bool read = false;
  while ((read = stream_->Read(&answer)) && answer.has_image_progress()) {
  }
  if (!read || !answer.has_attached()) {
    const absl::Status status = FromGrpcStatus(stream_->Finish());
    return status.ok() ? absl::InternalError("the session ended without an answer") : status;
  }
  session_.set_session_id(answer.attached().session_id());
  session_.set_block_token(answer.attached().block_token());
  reader_ = std::thread([this] { Read(); });
  // So long that every tier is worth its while.
  v1::SetRecomputeRequest recompute;
  *recompute.mutable_session() = session_;
  recompute.set_first_seconds(10);
  v1::SetRecomputeResponse ignored;
  (void)blocks_->SetRecompute(Patient().get(), recompute, &ignored);
  return absl::OkStatus();
}

void SocketBlockWorker::Drop() {
  if (context_ != nullptr) context_->TryCancel();
  if (reader_.joinable()) reader_.join();
  descriptors_.reset();
  stream_ = nullptr;
  context_ = nullptr;
  MutexLock lock(&mu_);
  chunks_.clear();
}

void SocketBlockWorker::Read() {
  v1::BrokerMessage message;
  while (stream_->Read(&message)) {
    if (!message.has_unmap_chunks() || !answers_) continue;
    v1::WorkerMessage answer;
    {
      MutexLock lock(&mu_);
      for (const uint32_t id : message.unmap_chunks().chunk_ids()) {
        chunks_.erase(id);
        answer.mutable_chunks_unmapped()->add_chunk_ids(id);
      }
    }
    stream_->Write(answer);
  }
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

absl::StatusOr<Mapping> SocketBlockWorker::MapChunk(uint32_t chunk) {
  v1::MapChunksRequest request;
  *request.mutable_session() = session_;
  request.add_chunk_ids(chunk);
  v1::MapChunksResponse response;
  if (auto status = FromGrpcStatus(blocks_->MapChunks(Patient().get(), request, &response));
      !status.ok()) {
    return status;
  }
  const std::optional<Token> token = Token::FromBytes(response.token());
  if (!token.has_value()) return absl::InternalError("the token has not 32 bytes");
  if (auto sent = descriptors_->Send(Fetch{*token}, {}, kPatience); !sent.ok()) return sent;
  std::vector<UniqueFd> memory;
  const auto packet = descriptors_->ReceiveA<Descriptors>(kPatience, &memory);
  if (!packet.ok()) return packet.status();
  if (memory.size() != 1 || packet->entries.size() != 1 ||
      packet->entries[0] != SlabEntry{SlabId(chunk), Epoch(0)}) {
    return absl::InternalError("another descriptor came than was asked for");
  }
  return Mapping::Map(memory[0].get(), Bytes(static_cast<int64_t>(response.chunk_bytes())),
                      MapAccess::kReadWrite);
}

absl::StatusOr<absl::Span<std::byte>> SocketBlockWorker::At(const v1::BlockExtent& extent) {
  MutexLock lock(&mu_);
  auto found = chunks_.find(extent.chunk_id());
  if (found == chunks_.end()) {
    absl::StatusOr<Mapping> mapping = MapChunk(extent.chunk_id());
    if (!mapping.ok()) return mapping.status();
    found = chunks_.emplace(extent.chunk_id(), *std::move(mapping)).first;
  }
  return absl::MakeSpan(found->second.data() + extent.offset_bytes(), extent.length_bytes());
}

absl::StatusOr<uint32_t> SocketBlockWorker::Put(uint64_t sequence, uint32_t count) {
  v1::ReserveRequest request;
  *request.mutable_session() = session_;
  *request.mutable_chain() = Chain(sequence, count);
  request.set_block_bytes(block_bytes_);
  v1::ReserveResponse reserved;
  if (auto status = FromGrpcStatus(blocks_->Reserve(Patient().get(), request, &reserved));
      !status.ok()) {
    return status;
  }
  v1::CommitRequest commit;
  *commit.mutable_session() = session_;
  uint32_t there = 0;
  for (int i = 0; i < reserved.blocks_size(); ++i) {
    const v1::ReservedBlock& block = reserved.blocks(i);
    if (block.result() == v1::ReservedBlock::RESULT_PRESENT) ++there;
    if (block.result() != v1::ReservedBlock::RESULT_RESERVED) continue;
    const auto bytes = At(block.extent());
    if (!bytes.ok()) return bytes.status();
    const BlockKey key = KeyOf(sequence, static_cast<uint64_t>(i));
    Fill(key, *bytes);
    v1::CommittedBlock& committed = *commit.add_blocks();
    committed.mutable_key()->set_high(key.high);
    committed.mutable_key()->set_low(key.low);
    committed.set_checksum(BlockChecksum(key, *bytes));
    ++there;
  }
  if (commit.blocks().empty()) return there;
  v1::CommitResponse response;
  const auto status = FromGrpcStatus(blocks_->Commit(Patient().get(), commit, &response));
  if (!status.ok()) return status;
  return there;
}

absl::StatusOr<uint32_t> SocketBlockWorker::Reserve(uint64_t sequence, uint32_t count) {
  v1::ReserveRequest request;
  *request.mutable_session() = session_;
  *request.mutable_chain() = Chain(sequence, count);
  request.set_block_bytes(block_bytes_);
  v1::ReserveResponse reserved;
  if (auto status = FromGrpcStatus(blocks_->Reserve(Patient().get(), request, &reserved));
      !status.ok()) {
    return status;
  }
  uint32_t mine = 0;
  for (int i = 0; i < reserved.blocks_size(); ++i) {
    if (reserved.blocks(i).result() != v1::ReservedBlock::RESULT_RESERVED) continue;
    const auto bytes = At(reserved.blocks(i).extent());
    if (!bytes.ok()) return bytes.status();
    Fill(KeyOf(sequence, static_cast<uint64_t>(i)), *bytes);
    ++mine;
  }
  return mine;
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
  const auto status =
      FromGrpcStatus(blocks_->Acquire(Patient(wait + kPatience).get(), acquire, &response));
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<uint32_t> SocketBlockWorker::Get(uint64_t sequence, uint32_t count, uint64_t request,
                                                absl::Duration wait) {
  const absl::StatusOr<v1::AcquireResponse> acquired = Acquire(sequence, count, request, wait);
  if (!acquired.ok()) return acquired.status();
  uint32_t good = 0;
  std::vector<std::byte> expected(block_bytes_);
  for (int i = 0; i < acquired->blocks_size(); ++i) {
    const v1::PinnedBlock& block = acquired->blocks(i);
    const auto bytes = At(block.extent());
    if (!bytes.ok()) return bytes.status();
    const BlockKey key = KeyOf(sequence, static_cast<uint64_t>(i));
    if (BlockChecksum(key, *bytes) != block.checksum()) break;
    Fill(key, absl::MakeSpan(expected));
    if (*bytes != absl::MakeSpan(expected)) {
      return absl::DataLossError(absl::StrCat("block ", i, " has other bytes"));
    }
    ++good;
  }
  if (auto status = EndRequest(request); !status.ok()) return status;
  return good;
}

absl::Status SocketBlockWorker::EndRequest(uint64_t request) {
  v1::EndRequestRequest end;
  *end.mutable_session() = session_;
  end.set_request_id(request);
  v1::EndRequestResponse response;
  return FromGrpcStatus(blocks_->EndRequest(Patient().get(), end, &response));
}

}  // namespace palimpsest
