#include "worker/memory/testing/fake_broker.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/grpc_keepalive.h"
#include "common/grpc_time.h"
#include "common/memory_file.h"
#include "common/monotonic_time.h"
#include "common/slab_checksum.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr absl::Duration kLong = absl::Seconds(30);
constexpr absl::Duration kPatience = absl::Seconds(20);

FakeBroker::Model RandomModel() {
  FakeBroker::Model model{FakeBroker::kSlab, FakeBroker::kPoolSlabs, {1, 2, 1}, {}};
  std::mt19937_64 random(7);
  model.image.resize((FakeBroker::kSlab * FakeBroker::kImageSlabs).count());
  for (size_t i = 0; i < model.image.size(); i += sizeof(uint64_t)) {
    const uint64_t value = random();
    std::memcpy(&model.image[i], &value, sizeof(value));
  }
  return model;
}

}  // namespace

FakeBroker::FakeBroker(std::string folder) : FakeBroker(std::move(folder), RandomModel()) {}

FakeBroker::FakeBroker(std::string folder, Model model)
    : folder_(std::move(folder)), model_(std::move(model)) {}

FakeBroker::~FakeBroker() { Kill(); }

void FakeBroker::Start() {
  {
    MutexLock lock(&mu_);
    down_ = false;
    returned_slabs_.clear();
    image_returned_ = false;
  }
  absl::StatusOr<DescriptorListener> listener =
      DescriptorListener::Listen(descriptor_socket(), 0600);
  ASSERT_TRUE(listener.ok()) << listener.status();
  listener_.emplace(*std::move(listener));
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address(), grpc::InsecureServerCredentials());
  builder.RegisterService(this);
  PermitKeepalive(builder);
  server_ = builder.BuildAndStart();
  ASSERT_NE(server_, nullptr);
  acceptor_ = std::thread([this] { AcceptLoop(); });
}

void FakeBroker::Kill() {
  if (server_ == nullptr) return;
  std::vector<std::thread> servers;
  {
    MutexLock lock(&mu_);
    down_ = true;
    for (DescriptorChannel& channel : channels_) channel.Shutdown();
  }
  listener_->Shutdown();
  server_->Shutdown(GrpcTimeout(absl::ZeroDuration()));
  server_.reset();
  acceptor_.join();
  {
    MutexLock lock(&mu_);
    servers = std::exchange(servers_, {});
  }
  for (std::thread& server : servers) server.join();
  listener_.reset();
  MutexLock lock(&mu_);
  channels_.clear();
  offers_.clear();
  nonces_.clear();
  messages_.clear();
  image_file_ = nullptr;
}

template <typename Condition>
void FakeBroker::AwaitLocked(const Condition& condition, const char* what) {
  const absl::Time deadline = MonotonicNow() + kPatience;
  while (!condition()) {
    if (changed_.WaitWithDeadline(&mu_, deadline) && !condition()) {
      ADD_FAILURE() << "timeout: " << what;
      return;
    }
  }
}

void FakeBroker::AwaitAttached(int times) {
  MutexLock lock(&mu_);
  AwaitLocked(
      [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return attached_ >= times && stream_ != nullptr; },
      "no worker attached");
}

v1::Attach FakeBroker::last_attach() const {
  MutexLock lock(&mu_);
  return last_attach_;
}

std::set<uint32_t> FakeBroker::returned_slabs() const {
  MutexLock lock(&mu_);
  return returned_slabs_;
}

bool FakeBroker::image_returned() const {
  MutexLock lock(&mu_);
  return image_returned_;
}

v1::WorkerMessage FakeBroker::Await(const std::vector<v1::WorkerMessage::MessageCase>& wanted) {
  MutexLock lock(&mu_);
  const auto next = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return std::find_if(messages_.begin(), messages_.end(), [&](const auto& m) {
      return std::count(wanted.begin(), wanted.end(), m.message_case()) > 0;
    });
  };
  AwaitLocked([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return next() != messages_.end(); },
              "the worker did not say what was expected");
  const auto found = next();
  if (found == messages_.end()) return {};
  v1::WorkerMessage message = std::move(*found);
  messages_.erase(messages_.begin(), found + 1);
  return message;
}

std::optional<v1::WorkerMessage> FakeBroker::Next() {
  MutexLock lock(&mu_);
  if (messages_.empty()) return std::nullopt;
  v1::WorkerMessage message = std::move(messages_.front());
  messages_.pop_front();
  return message;
}

void FakeBroker::Send(const v1::BrokerMessage& message) {
  MutexLock lock(&mu_);
  if (stream_ == nullptr || !stream_->Write(message)) ADD_FAILURE() << "no worker to send to";
}

Token FakeBroker::MakeOffer(Offer offer) {
  const Token token = Token::Random();
  offers_[token] = std::move(offer);
  return token;
}

std::shared_ptr<UniqueFd> FakeBroker::NewSlab() const {
  auto slab =
      std::make_shared<UniqueFd>(::memfd_create("fake-slab", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(slab->get(), lies_.small_slabs ? 4096 : model_.slab.count()), 0);
  EXPECT_EQ(::fcntl(slab->get(), F_ADD_SEALS, lies_.unsealed_slabs ? F_SEAL_GROW : kSlabSeals), 0);
  return slab;
}

uint64_t FakeBroker::Grant(v1::SlabRole role, const std::vector<uint32_t>& slabs,
                           const std::vector<uint32_t>& indexes, bool valid_token) {
  v1::BrokerMessage message;
  v1::Grant& grant = *message.mutable_grant();
  {
    MutexLock lock(&mu_);
    Offer offer;
    grant.set_grant_id(next_id_++);
    grant.set_role(role);
    for (size_t i = 0; i < slabs.size(); ++i) {
      v1::GrantedSlab& slab = *grant.add_slabs();
      slab.set_slab_id(slabs[i]);
      slab.set_epoch(next_id_++);
      slab.set_region_index(indexes.empty() ? 0 : indexes[i]);
      offer.entries.push_back({SlabId(slab.slab_id()), Epoch(slab.epoch())});
      offer.descriptors.push_back(NewSlab());
      slabs_[slabs[i]] = offer.descriptors.back();
    }
    const Token token = MakeOffer(std::move(offer));
    grant.set_token((valid_token ? token : Token::Random()).ToBytes());
    grant.set_token_seconds(30);
  }
  const uint64_t id = grant.grant_id();
  Send(message);
  return id;
}

void FakeBroker::LimitLink(double bytes_per_second) {
  v1::BrokerMessage message;
  message.mutable_link_limit()->set_bytes_per_second(bytes_per_second);
  Send(message);
}

uint64_t FakeBroker::RevokeParameters(const std::vector<uint32_t>& indexes) {
  v1::BrokerMessage message;
  v1::Revoke& revoke = *message.mutable_revoke();
  {
    MutexLock lock(&mu_);
    revoke.set_revoke_id(next_id_++);
  }
  revoke.set_role(v1::SLAB_ROLE_PARAMETER);
  for (const uint32_t index : indexes) revoke.add_region_indexes(index);
  revoke.set_deadline_seconds(10);
  const uint64_t id = revoke.revoke_id();
  Send(message);
  return id;
}

void FakeBroker::TakeTurn(uint64_t turn) {
  v1::BrokerMessage message;
  message.mutable_take_turn()->set_turn_id(turn);
  message.mutable_take_turn()->set_quantum_seconds(1);
  Send(message);
}

void FakeBroker::EndTurn(uint64_t turn) {
  v1::BrokerMessage message;
  message.mutable_end_turn()->set_turn_id(turn);
  message.mutable_end_turn()->set_deadline_seconds(10);
  Send(message);
}

uint64_t FakeBroker::RevokeKv(uint32_t slabs) {
  v1::BrokerMessage message;
  v1::Revoke& revoke = *message.mutable_revoke();
  {
    MutexLock lock(&mu_);
    revoke.set_revoke_id(next_id_++);
  }
  revoke.set_role(v1::SLAB_ROLE_KV);
  revoke.set_kv_slabs(slabs);
  revoke.set_deadline_seconds(10);
  const uint64_t id = revoke.revoke_id();
  Send(message);
  return id;
}

uint64_t FakeBroker::SetRotation(v1::SetRotation rotation) {
  v1::BrokerMessage message;
  {
    MutexLock lock(&mu_);
    rotation.set_rotation_id(next_id_++);
  }
  rotation.set_deadline_seconds(10);
  const uint64_t id = rotation.rotation_id();
  *message.mutable_set_rotation() = std::move(rotation);
  Send(message);
  return id;
}

void FakeBroker::Fill(uint32_t slab, unsigned char byte) {
  std::shared_ptr<UniqueFd> memory;
  {
    MutexLock lock(&mu_);
    memory = slabs_[slab];
  }
  if (memory == nullptr) return;
  const std::string bytes(static_cast<size_t>(model_.slab.count()), static_cast<char>(byte));
  EXPECT_EQ(::pwrite(memory->get(), bytes.data(), bytes.size(), 0), bytes.size());
}

std::string FakeBroker::ImageSlab(uint32_t slab) const {
  return model_.image.substr((model_.slab * slab).count(), model_.slab.count());
}

v1::ImageManifest FakeBroker::Manifest() const {
  v1::ImageManifest manifest;
  manifest.set_fingerprint(std::string(32, 'f'));
  const auto slabs = static_cast<uint32_t>(Bytes(model_.image.size()) / model_.slab);
  manifest.set_slab_bytes(model_.slab.count());
  manifest.set_image_bytes(model_.image.size());
  manifest.set_ranks(1);
  uint32_t first = 0;
  for (const uint32_t count : model_.stages) {
    v1::ImageStage& stage = *manifest.add_stages();
    stage.set_name(absl::StrCat("stage.", first));
    stage.set_first_slab(first + (lies_.stage_gap && first > 0));
    stage.set_slab_count(count);
    first += count;
  }
  for (uint32_t i = 0; i < slabs; ++i) {
    const std::string bytes = ImageSlab(i);
    const uint64_t checksum = SlabChecksum(
        absl::MakeConstSpan(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()));
    manifest.add_slab_checksums(lies_.wrong_checksum == i ? checksum + 1 : checksum);
  }
  return manifest;
}

v1::Attached FakeBroker::MakeAttached() {
  v1::Attached attached;
  attached.set_session_id(42);
  attached.set_tenant("alpha");
  attached.set_slab_bytes(model_.slab.count());
  attached.set_pool_slabs(model_.pool_slabs);
  attached.set_quota_slabs(model_.pool_slabs);
  attached.set_workspace_slabs(workspace_slabs_);
  attached.set_backend("host");
  attached.set_turns(turns_);
  *attached.mutable_image() = Manifest();

  const UniqueFd writable(::memfd_create("fake-image", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const std::string& image = model_.image;
  const size_t size = lies_.short_image ? image.size() / 2 : image.size();
  EXPECT_EQ(::write(writable.get(), image.data(), size), size);
  EXPECT_TRUE(SealMemory(writable.get(), lies_.writable_image ? F_SEAL_GROW : kImageSeals).ok());
  const std::string path = absl::StrCat("/proc/self/fd/", writable.get());
  image_file_ = std::make_shared<UniqueFd>(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const Token token = MakeOffer({DescriptorKind::kImage, {}, {image_file_}});
  attached.set_image_token(token.ToBytes());
  return attached;
}

grpc::Status FakeBroker::Session(grpc::ServerContext* context, Stream* stream) {
  v1::WorkerMessage message;
  if (!stream->Read(&message) || !message.has_attach()) {
    return {grpc::StatusCode::INVALID_ARGUMENT, "no Attach"};
  }
  {
    MutexLock lock(&mu_);
    const std::optional<Token> nonce = Token::FromBytes(message.attach().nonce());
    const auto known = std::find(nonces_.begin(), nonces_.end(), nonce.value_or(Token()));
    if (known == nonces_.end()) return {grpc::StatusCode::UNAUTHENTICATED, "unknown nonce"};
    nonces_.erase(known);
    if (lies_.refuse_attach) return {grpc::StatusCode::NOT_FOUND, "no such session"};
    last_attach_ = message.attach();
    messages_.clear();
    v1::BrokerMessage first;
    first.mutable_image_progress()->set_phase("pack");
    stream->Write(first);
    *first.mutable_attached() = MakeAttached();
    if (down_ || !stream->Write(first)) return grpc::Status::CANCELLED;
    stream_ = stream;
    ++attached_;
    changed_.SignalAll();
  }
  while (stream->Read(&message)) {
    MutexLock lock(&mu_);
    messages_.push_back(message);
    changed_.SignalAll();
  }
  MutexLock lock(&mu_);
  if (stream_ == stream) stream_ = nullptr;
  changed_.SignalAll();
  return context->IsCancelled() ? grpc::Status::CANCELLED : grpc::Status::OK;
}

void FakeBroker::AcceptLoop() {
  for (;;) {
    absl::StatusOr<DescriptorChannel> channel = listener_->Accept(kLong);
    if (absl::IsCancelled(channel.status())) return;
    if (!channel.ok()) continue;
    MutexLock lock(&mu_);
    if (down_) continue;
    channels_.push_back(*std::move(channel));
    servers_.emplace_back([this, &channel = channels_.back()] { Serve(channel); });
  }
}

void FakeBroker::Serve(DescriptorChannel& channel) {
  if (!channel.IdentifyPeer().ok()) return;
  absl::StatusOr<Hello> hello = channel.ReceiveA<Hello>(kLong);
  if (!hello.ok()) return;
  if (lies_.refuse_hello || hello->secret != "hush") {
    (void)channel.Send(Refused{"wrong secret"}, {}, kLong);
    return;
  }
  Welcome welcome{Token::Random()};
  {
    MutexLock lock(&mu_);
    nonces_.push_back(welcome.nonce);
  }
  if (!channel.Send(welcome, {}, kLong).ok()) return;
  for (;;) {
    absl::StatusOr<ReceivedPacket> request = channel.Receive(kLong);
    if (!request.ok() || !Answer(channel, *std::move(request))) return;
  }
}

bool FakeBroker::Answer(DescriptorChannel& channel, ReceivedPacket request) {
  if (const auto* slabs = std::get_if<ReturnSlabs>(&request.packet)) {
    MutexLock lock(&mu_);
    for (size_t i = 0; i < slabs->entries.size(); ++i) {
      EXPECT_TRUE(CheckSlabFile(request.descriptors[i].get(), model_.slab).ok());
      returned_slabs_.insert(slabs->entries[i].slab_id.value());
    }
    return channel.Send(Accepted{}, {}, kLong).ok();
  }
  if (std::holds_alternative<ReturnImage>(request.packet)) {
    MutexLock lock(&mu_);
    EXPECT_TRUE(CheckImageFile(request.descriptors[0].get(), Bytes(model_.image.size())).ok());
    image_returned_ = true;
    return channel.Send(Accepted{}, {}, kLong).ok();
  }
  const auto* fetch = std::get_if<Fetch>(&request.packet);
  if (fetch == nullptr) return false;
  Offer offer;
  {
    MutexLock lock(&mu_);
    const auto found = offers_.find(fetch->token);
    if (found == offers_.end() || lies_.forget_tokens) {
      return channel.Send(Failed{"no such token"}, {}, kLong).ok();
    }
    offer = std::move(found->second);
    offers_.erase(found);
  }
  if (offer.kind == DescriptorKind::kImage) {
    return channel
        .Send(Descriptors{DescriptorKind::kImage, 0, 1, {}}, {offer.descriptors[0]->get()}, kLong)
        .ok();
  }
  // In packets of three, so that more than one is needed.
  const auto total = static_cast<uint32_t>(offer.entries.size());
  for (uint32_t first = 0; first < total; first += 3) {
    const uint32_t end = std::min(first + 3, total);
    Descriptors packet{DescriptorKind::kSlabs,
                       first,
                       total,
                       {offer.entries.begin() + first, offer.entries.begin() + end}};
    std::vector<int> descriptors;
    for (uint32_t i = first; i < end; ++i) descriptors.push_back(offer.descriptors[i]->get());
    if (!channel.Send(packet, descriptors, kLong).ok()) return false;
  }
  return true;
}

}  // namespace palimpsest
