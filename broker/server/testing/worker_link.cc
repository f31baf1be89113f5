#include "broker/server/testing/worker_link.h"

#include <utility>

#include "common/grpc_status.h"

namespace palimpsest {

absl::Status WorkerLink::Hello(const std::string& socket, const std::string& tenant,
                               const std::string& secret) {
  absl::StatusOr<DescriptorChannel> channel = DescriptorChannel::Connect(socket);
  if (!channel.ok()) return channel.status();
  descriptors_.reset();
  descriptors_.emplace(*std::move(channel));
  const absl::Status sent = descriptors_->Send(
      palimpsest::Hello{kDescriptorProtocolVersion, tenant, secret}, {}, kPatience);
  if (!sent.ok()) return sent;
  const absl::StatusOr<Welcome> welcome = descriptors_->ReceiveA<Welcome>(kPatience);
  if (!welcome.ok()) return welcome.status();
  nonce_ = welcome->nonce;
  return absl::OkStatus();
}

absl::StatusOr<v1::Attached> WorkerLink::Open(const std::string& socket, const v1::Attach& attach,
                                              const std::function<void()>& on_progress) {
  grpc::ChannelArguments arguments;
  // A channel of its own, not one from gRPC's pool that may still back off from an earlier broker.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  channel_ =
      grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
  stream_ = nullptr;
  context_ = std::make_unique<grpc::ClientContext>();
  stream_ = v1::Broker::NewStub(channel_)->Session(context_.get());
  v1::WorkerMessage message;
  *message.mutable_attach() = attach;
  stream_->Write(message);
  v1::BrokerMessage answer;
  bool read = false;
  while ((read = stream_->Read(&answer)) && answer.has_image_progress()) on_progress();
  if (read && answer.has_attached()) return answer.attached();
  const absl::Status status = Finish();
  return status.ok() ? absl::InternalError("the session ended without an answer") : status;
}

absl::Status WorkerLink::Finish() { return FromGrpcStatus(stream_->Finish()); }

absl::Status WorkerLink::Send(const v1::WorkerMessage& message) {
  MutexLock lock(&write_mu_);
  if (stream_ == nullptr || !stream_->Write(message)) {
    return absl::UnavailableError("the stream has ended");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<UniqueFd>> WorkerLink::Fetch(const std::string& token,
                                                        std::vector<SlabEntry>* entries) {
  MutexLock lock(&fetch_mu_);
  const absl::Status sent = descriptors_->Send(
      palimpsest::Fetch{Token::FromBytes(token).value_or(Token())}, {}, kPatience);
  if (!sent.ok()) return sent;
  std::vector<UniqueFd> all;
  uint32_t total = 1;
  while (all.size() < total) {
    std::vector<UniqueFd> some;
    const auto packet = descriptors_->ReceiveA<Descriptors>(kPatience, &some);
    if (!packet.ok()) return packet.status();
    total = packet->total;
    for (UniqueFd& fd : some) all.push_back(std::move(fd));
    if (entries != nullptr) {
      entries->insert(entries->end(), packet->entries.begin(), packet->entries.end());
    }
  }
  return all;
}

void WorkerLink::Cancel() {
  if (context_ != nullptr) context_->TryCancel();
  if (descriptors_.has_value()) descriptors_->Shutdown();
}

}  // namespace palimpsest
