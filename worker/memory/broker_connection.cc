#include "worker/memory/broker_connection.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/grpc_keepalive.h"
#include "common/grpc_status.h"

namespace palimpsest {
namespace {

absl::Status EndedError() {
  return absl::UnavailableError("the connection to the broker was shut down");
}

void AddHeld(const std::vector<SlabRegion::Held>& slabs, v1::SlabRole role, v1::Reattach& out) {
  for (const SlabRegion::Held& held : slabs) {
    v1::HeldSlab& slab = *out.add_slabs();
    slab.set_slab_id(held.slab.value());
    slab.set_epoch(held.epoch.value());
    slab.set_role(role);
    slab.set_region_index(held.index.value());
  }
}

}  // namespace

BrokerConnection::~BrokerConnection() {
  Shutdown();
  if (stream_ != nullptr) (void)Finish();
}

void BrokerConnection::Shutdown() {
  MutexLock lock(&mu_);
  shut_down_ = true;
  context_.TryCancel();
  if (socket_ != nullptr) socket_->Shutdown();
}

DescriptorChannel& BrokerConnection::socket() {
  MutexLock lock(&mu_);
  return *socket_;  // set once, before anybody asks for it
}

absl::StatusOr<Token> BrokerConnection::Greet() {
  absl::StatusOr<DescriptorChannel> connected =
      DescriptorChannel::Connect(options_.descriptor_socket);
  // Whatever the reason, a broker that starts may remove it.
  if (!connected.ok()) return absl::UnavailableError(connected.status().message());
  auto channel = std::make_shared<DescriptorChannel>(*std::move(connected));
  {
    MutexLock lock(&mu_);
    if (shut_down_) return EndedError();
    socket_ = channel;
  }
  Hello hello;
  hello.tenant = options_.tenant;
  hello.secret = options_.secret;
  if (absl::Status status = channel->Send(hello, {}, options_.packet_timeout); !status.ok()) {
    return status;
  }
  absl::StatusOr<Welcome> welcome = channel->ReceiveA<Welcome>(options_.packet_timeout);
  if (!welcome.ok()) return welcome.status();
  return welcome->nonce;
}

absl::Status BrokerConnection::AwaitAccepted() {
  return socket().ReceiveA<Accepted>(options_.packet_timeout).status();
}

absl::Status BrokerConnection::ReturnSlabs(absl::Span<const SlabRegion::Held> slabs) {
  while (!slabs.empty()) {
    const size_t pieces = slabs.front().memory->size();
    const auto batch = slabs.subspan(0, MaxPacketEntries(pieces));
    slabs.remove_prefix(batch.size());
    palimpsest::ReturnSlabs packet;
    packet.pieces = static_cast<uint8_t>(pieces);
    std::vector<int> descriptors;
    for (const SlabRegion::Held& held : batch) {
      packet.entries.push_back({held.slab, held.epoch});
      for (const UniqueFd& piece : *held.memory) descriptors.push_back(piece.get());
    }
    absl::Status status = socket().Send(packet, descriptors, options_.packet_timeout);
    if (status.ok()) status = AwaitAccepted();
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status BrokerConnection::ReturnHeld(const HeldMemory& held) {
  if (absl::Status status = ReturnSlabs(held.parameters); !status.ok()) return status;
  if (absl::Status status = ReturnSlabs(held.kv); !status.ok()) return status;
  if (absl::Status status = ReturnSlabs(held.workspace); !status.ok()) return status;
  if (absl::Status status = ReturnSlabs(held.slots); !status.ok()) return status;
  const ReturnImage packet{held.fingerprint};
  if (absl::Status status = socket().Send(packet, {held.image}, options_.packet_timeout);
      !status.ok()) {
    return status;
  }
  return AwaitAccepted();
}

absl::StatusOr<v1::Attached> BrokerConnection::Open(const HeldMemory* held) {
  absl::StatusOr<Token> nonce = Greet();
  if (!nonce.ok()) return nonce.status();
  v1::WorkerMessage first;
  v1::Attach& attach = *first.mutable_attach();
  attach.set_nonce(nonce->ToBytes());
  attach.set_rotates(options_.rotates);
  if (held != nullptr) {
    if (absl::Status status = ReturnHeld(*held); !status.ok()) return status;
    v1::Reattach& reattach = *attach.mutable_reattach();
    reattach.set_session_id(held->session.value());
    AddHeld(held->parameters, v1::SLAB_ROLE_PARAMETER, reattach);
    AddHeld(held->kv, v1::SLAB_ROLE_KV, reattach);
    AddHeld(held->workspace, v1::SLAB_ROLE_WORKSPACE, reattach);
    AddHeld(held->slots, v1::SLAB_ROLE_SLOT, reattach);
    if (!held->rotation.none()) {
      for (const int32_t stage : held->rotation.stages) {
        reattach.mutable_rotation()->add_stages(static_cast<uint32_t>(stage));
      }
      reattach.mutable_rotation()->set_slots(static_cast<uint32_t>(held->rotation.slots));
    }
    reattach.set_has_image(true);
  }

  grpc::ChannelArguments arguments;
  // A connection of its own, whose state is not that of an earlier broker's.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  Keepalive(arguments);
  channel_ =
      grpc::CreateCustomChannel(options_.address, grpc::InsecureChannelCredentials(), arguments);
  stub_ = v1::Broker::NewStub(channel_);
  stream_ = stub_->Session(&context_);
  if (!stream_->Write(first)) return Finish();
  v1::BrokerMessage message;
  while (stream_->Read(&message)) {
    if (message.has_attached()) return std::move(*message.mutable_attached());
    if (!message.has_image_progress()) {
      return absl::InvalidArgumentError("the broker sent something else before Attached");
    }
    if (options_.on_progress) options_.on_progress(message.image_progress());
  }
  return Finish();
}

absl::Status BrokerConnection::Finish() {
  if (end_.ok()) {
    end_ = FromGrpcStatus(stream_->Finish());
    if (end_.ok()) end_ = absl::UnavailableError("the broker ended the session");
  }
  return end_;
}

std::optional<v1::BrokerMessage> BrokerConnection::Read() {
  v1::BrokerMessage message;
  if (!stream_->Read(&message)) return std::nullopt;
  return message;
}

bool BrokerConnection::Write(const v1::WorkerMessage& message) { return stream_->Write(message); }

void BrokerConnection::FinishWriting() { stream_->WritesDone(); }

absl::StatusOr<std::vector<SlabDescriptors>> BrokerConnection::FetchSlabs(
    absl::string_view token, absl::Span<const SlabEntry> expected, int pieces) {
  std::optional<Token> parsed = Token::FromBytes(token);
  if (!parsed.has_value()) return absl::InvalidArgumentError("a grant's token is malformed");
  absl::Status status = socket().Send(Fetch{*parsed}, {}, options_.packet_timeout);
  if (!status.ok()) return status;
  std::vector<SlabDescriptors> all;
  while (all.size() < expected.size()) {
    std::vector<UniqueFd> descriptors;
    absl::StatusOr<Descriptors> packet =
        socket().ReceiveA<Descriptors>(options_.packet_timeout, &descriptors);
    if (!packet.ok()) return packet.status();
    const auto wanted = expected.subspan(all.size(), packet->entries.size());
    if (packet->kind != DescriptorKind::kSlabs || packet->pieces != pieces ||
        packet->first != all.size() || packet->total != expected.size() ||
        !std::equal(wanted.begin(), wanted.end(), packet->entries.begin(), packet->entries.end())) {
      return absl::InvalidArgumentError(
          "the descriptors of a grant are not those of the slabs it names");
    }
    auto next = std::make_move_iterator(descriptors.begin());
    for (size_t i = 0; i < wanted.size(); ++i, next += pieces)
      all.emplace_back(next, next + pieces);
  }
  return all;
}

absl::StatusOr<UniqueFd> BrokerConnection::FetchImage(absl::string_view token) {
  std::optional<Token> parsed = Token::FromBytes(token);
  if (!parsed.has_value()) return absl::InvalidArgumentError("the image's token is malformed");
  absl::Status status = socket().Send(Fetch{*parsed}, {}, options_.packet_timeout);
  if (!status.ok()) return status;
  std::vector<UniqueFd> descriptors;
  absl::StatusOr<Descriptors> packet =
      socket().ReceiveA<Descriptors>(options_.packet_timeout, &descriptors);
  if (!packet.ok()) return packet.status();
  if (packet->kind != DescriptorKind::kImage) {
    return absl::InvalidArgumentError("the broker answered slabs where an image was asked for");
  }
  return std::move(descriptors[0]);
}

}  // namespace palimpsest
