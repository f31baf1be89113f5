#include "broker/server/testing/scripted_worker.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"
#include "common/memory_file.h"
#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);

}  // namespace

absl::Status ScriptedWorker::Hello(const std::string& socket, const std::string& tenant,
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

absl::Status ScriptedWorker::Attach(const std::string& socket,
                                    const std::optional<std::string>& nonce) {
  v1::Attach attach;
  attach.set_nonce(nonce.value_or(nonce_.ToBytes()));
  attach.set_rotates(rotates_);
  return OpenSession(socket, attach);
}

v1::Attach ScriptedWorker::Returning() {
  v1::Attach attach;
  attach.set_nonce(nonce_.ToBytes());
  attach.set_rotates(rotates_);
  v1::Reattach& reattach = *attach.mutable_reattach();
  MutexLock lock(&mu_);
  reattach.set_session_id(session_);
  reattach.set_has_image(image_.valid());
  *reattach.mutable_rotation() = rotation_;
  for (const auto& [id, held] : slabs_) {
    v1::HeldSlab& slab = *reattach.add_slabs();
    slab.set_slab_id(id);
    slab.set_epoch(held.epoch);
    slab.set_role(held.role);
    slab.set_region_index(held.region_index);
  }
  return attach;
}

absl::Status ScriptedWorker::Claim(const std::string& socket) {
  return OpenSession(socket, Returning());
}

absl::Status ScriptedWorker::Reattach(const std::string& socket) {
  const v1::Attach attach = Returning();
  for (const v1::HeldSlab& slab : attach.reattach().slabs()) {
    const absl::Status returned = ReturnSlab(slab.slab_id(), slab.epoch(), slab.slab_id());
    if (!returned.ok()) return returned;
  }
  if (attach.reattach().has_image()) {
    if (const absl::Status returned = ReturnImage(false); !returned.ok()) return returned;
  }
  return OpenSession(socket, attach);
}

absl::Status ScriptedWorker::ReturnSlab(uint32_t slab, uint64_t epoch,
                                        std::optional<uint32_t> memory_of) {
  UniqueFd forged;
  int descriptor = -1;
  if (memory_of.has_value()) {
    MutexLock lock(&mu_);
    descriptor = slabs_[*memory_of].memory.get();
  } else {
    MutexLock lock(&mu_);
    forged = UniqueFd(memfd_create("palimpsest-slab", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    descriptor = forged.get();
    if (ftruncate(descriptor, static_cast<off_t>(slab_bytes_)) != 0 ||
        fcntl(descriptor, F_ADD_SEALS, kSlabSeals) != 0) {
      return ErrnoStatus("forge a slab");
    }
  }
  const absl::Status sent =
      descriptors_->Send(ReturnSlabs{{{SlabId(slab), Epoch(epoch)}}}, {descriptor}, kPatience);
  if (!sent.ok()) return sent;
  return descriptors_->ReceiveA<Accepted>(kPatience).status();
}

absl::Status ScriptedWorker::ReturnImage(bool forged) {
  const UniqueFd other(memfd_create("palimpsest-image", MFD_CLOEXEC));
  std::string fingerprint;
  int descriptor = other.get();
  {
    MutexLock lock(&mu_);
    fingerprint = fingerprint_;
    if (!forged) descriptor = image_.get();
  }
  const absl::Status sent =
      descriptors_->Send(palimpsest::ReturnImage{fingerprint}, {descriptor}, kPatience);
  if (!sent.ok()) return sent;
  return descriptors_->ReceiveA<Accepted>(kPatience).status();
}

absl::Status ScriptedWorker::OpenSession(const std::string& socket, const v1::Attach& attach) {
  if (reader_.joinable()) return absl::FailedPreconditionError("drop the old session first");
  grpc::ChannelArguments arguments;
  // A channel of its own, not one from gRPC's pool that may still back off from an earlier broker.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  channel_ =
      grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
  context_ = std::make_unique<grpc::ClientContext>();
  stream_ = v1::Broker::NewStub(channel_)->Session(context_.get());
  v1::WorkerMessage message;
  *message.mutable_attach() = attach;
  stream_->Write(message);
  v1::BrokerMessage answer;
  bool read = false;
  while ((read = stream_->Read(&answer)) && answer.has_image_progress()) {
    if (hangs_up_) descriptors_->Shutdown();
  }
  if (!read || !answer.has_attached()) {
    const absl::Status status = FromGrpcStatus(stream_->Finish());
    return status.ok() ? absl::InternalError("the session ended without an answer") : status;
  }
  {
    MutexLock lock(&mu_);
    lost_.reset();
    session_ = answer.attached().session_id();
    slab_bytes_ = answer.attached().slab_bytes();
    fingerprint_ = answer.attached().image().fingerprint();
  }
  if (!answer.attached().image_token().empty()) {
    absl::StatusOr<std::vector<UniqueFd>> image =
        FetchDescriptors(answer.attached().image_token(), nullptr);
    if (!image.ok()) return image.status();
    MutexLock lock(&mu_);
    image_ = std::move(image->front());
  }
  if (reads_) reader_ = std::thread([this] { ReadLoop(); });
  return absl::OkStatus();
}

void ScriptedWorker::Drop() {
  if (context_ != nullptr) context_->TryCancel();
  if (descriptors_.has_value()) descriptors_->Shutdown();
  if (reader_.joinable()) reader_.join();
}

void ScriptedWorker::ReadLoop() {
  v1::BrokerMessage message;
  while (stream_->Read(&message)) React(message);
  const absl::Status status = FromGrpcStatus(stream_->Finish());
  MutexLock lock(&mu_);
  lost_ = status;
  changed_.SignalAll();
}

void ScriptedWorker::React(const v1::BrokerMessage& message) {
  if (message.has_grant()) {
    bool maps = false;
    {
      MutexLock lock(&mu_);
      last_token_ = message.grant().token();
      maps = maps_;
    }
    if (maps) {
      const absl::Status mapped = Map(message.grant());
      if (!mapped.ok()) fprintf(stderr, "scripted worker: %s\n", mapped.ToString().c_str());
    }
    MutexLock lock(&mu_);
    ++grants_;
  } else if (message.has_revoke()) {
    AnswerRevoke(message.revoke());
    MutexLock lock(&mu_);
    ++revokes_;
  } else if (message.has_set_rotation()) {
    Rotate(message.set_rotation());
  } else if (message.has_activate_refused()) {
    MutexLock lock(&mu_);
    ++refused_;
  } else if (message.has_kv_pressure()) {
    MutexLock lock(&mu_);
    ++pressure_;
  }
  changed_.SignalAll();
}

absl::Status ScriptedWorker::Map(const v1::Grant& grant) {
  std::vector<SlabEntry> entries;
  absl::StatusOr<std::vector<UniqueFd>> memory = FetchDescriptors(grant.token(), &entries);
  if (!memory.ok()) return memory.status();
  if (static_cast<int>(memory->size()) != grant.slabs_size()) {
    return absl::InternalError("other descriptors than were granted");
  }
  {
    MutexLock lock(&mu_);
    for (int i = 0; i < grant.slabs_size(); ++i) {
      const v1::GrantedSlab& slab = grant.slabs(i);
      if (entries[i].slab_id.value() != slab.slab_id() ||
          entries[i].epoch.value() != slab.epoch()) {
        return absl::InternalError("descriptors in another order than was granted");
      }
      absl::StatusOr<Mapping> mapping = Mapping::Map(
          (*memory)[i].get(), Bytes(static_cast<int64_t>(slab_bytes_)), MapAccess::kReadWrite);
      if (!mapping.ok()) return mapping.status();
      slabs_[slab.slab_id()] = Held{slab.epoch(), grant.role(), slab.region_index(),
                                    std::move((*memory)[i]), *std::move(mapping)};
    }
  }
  v1::WorkerMessage mapped;
  mapped.mutable_grant_mapped()->set_grant_id(grant.grant_id());
  return Send(mapped);
}

void ScriptedWorker::AnswerRevoke(const v1::Revoke& revoke) {
  v1::WorkerMessage answer;
  answer.mutable_revoke_done()->set_revoke_id(revoke.revoke_id());
  {
    MutexLock lock(&mu_);
    if (manners_ == Manners::kSilent) return;
    for (auto it = slabs_.begin(); it != slabs_.end();) {
      auto here = it++;
      const auto& wanted = revoke.region_indexes();
      const bool goes =
          here->second.role == revoke.role() &&
          (revoke.role() == v1::SLAB_ROLE_KV
               ? answer.revoke_done().slab_ids_size() < static_cast<int>(revoke.kv_slabs())
               : std::find(wanted.begin(), wanted.end(), here->second.region_index) !=
                     wanted.end());
      if (!goes) continue;
      answer.mutable_revoke_done()->add_slab_ids(here->first);
      if (manners_ == Manners::kLiar) kept_[here->first] = std::move(here->second);
      slabs_.erase(here);
    }
  }
  (void)Send(answer);
}

void ScriptedWorker::Rotate(const v1::SetRotation& change) {
  {
    MutexLock lock(&mu_);
    if (manners_ == Manners::kSilent) return;
    for (const v1::MovedSlab& move : change.moves()) {
      if (move.role() == v1::SLAB_ROLE_UNSPECIFIED) {
        slabs_.erase(move.slab_id());
        continue;
      }
      slabs_[move.slab_id()].role = move.role();
      slabs_[move.slab_id()].region_index = move.region_index();
    }
    rotation_ = change.rotation();
  }
  v1::WorkerMessage answer;
  answer.mutable_rotation_done()->set_rotation_id(change.rotation_id());
  (void)Send(answer);
}

absl::StatusOr<std::vector<UniqueFd>> ScriptedWorker::FetchDescriptors(
    const std::string& token, std::vector<SlabEntry>* entries) {
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

absl::Status ScriptedWorker::Send(const v1::WorkerMessage& message) {
  MutexLock lock(&write_mu_);
  if (stream_ == nullptr || !stream_->Write(message)) {
    return absl::UnavailableError("the stream has ended");
  }
  return absl::OkStatus();
}

absl::Status ScriptedWorker::Activate() {
  v1::WorkerMessage message;
  message.mutable_activate()->set_reason(v1::Activate::REASON_REQUEST);
  return Send(message);
}

absl::Status ScriptedWorker::SetKvTarget(uint32_t target, uint32_t needed) {
  v1::WorkerMessage message;
  message.mutable_set_kv_target()->set_target_slabs(target);
  message.mutable_set_kv_target()->set_needed_slabs(needed);
  return Send(message);
}

absl::Status ScriptedWorker::Report(bool active, bool unused) {
  v1::WorkerMessage message;
  message.mutable_report()->set_active(active);
  message.mutable_report()->set_running_sequences(active ? 1 : 0);
  if (unused) {
    MutexLock lock(&mu_);
    message.mutable_report()->set_kv_slabs_free(static_cast<uint32_t>(Count(v1::SLAB_ROLE_KV)));
  }
  message.mutable_report()->set_decode_step_seconds(0.02);
  message.mutable_report()->set_image_bytes_per_second(1e10);
  return Send(message);
}

absl::Status ScriptedWorker::Flood(uint32_t messages) {
  for (uint32_t i = 0; i < messages; ++i) {
    if (absl::Status status = SetKvTarget(1 + i % 2, 1); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void ScriptedWorker::OpenSilentCalls(const std::string& socket, uint32_t count) {
  const auto channel = grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials());
  for (uint32_t i = 0; i < count; ++i) {
    auto call = std::make_unique<SilentCall>();
    call->stream = v1::Broker::NewStub(channel)->Session(&call->context);
    silent_calls_.push_back(std::move(call));
  }
}

void ScriptedWorker::set_manners(Manners manners) {
  MutexLock lock(&mu_);
  manners_ = manners;
}

void ScriptedWorker::set_maps(bool maps) {
  MutexLock lock(&mu_);
  maps_ = maps;
}

absl::Status ScriptedWorker::FetchAgain() { return Fetch(last_token()); }

absl::Status ScriptedWorker::Fetch(const std::string& token) {
  std::vector<SlabEntry> entries;
  return FetchDescriptors(token, &entries).status();
}

std::string ScriptedWorker::last_token() {
  MutexLock lock(&mu_);
  return last_token_;
}

size_t ScriptedWorker::Count(v1::SlabRole role) {
  return static_cast<size_t>(std::count_if(
      slabs_.begin(), slabs_.end(), [role](const auto& slab) { return slab.second.role == role; }));
}

absl::Status ScriptedWorker::Await(absl::string_view what, absl::Duration timeout,
                                   const std::function<bool()>& holds) {
  const absl::Time deadline = MonotonicNow() + timeout;
  MutexLock lock(&mu_);
  while (!holds()) {
    if (changed_.WaitWithDeadline(&mu_, deadline)) {
      return absl::DeadlineExceededError(
          absl::StrCat("not yet ", what, ": ", Count(v1::SLAB_ROLE_PARAMETER), " parameter and ",
                       Count(v1::SLAB_ROLE_KV), " KV slabs, ", grants_, " grants, ", revokes_,
                       " revokes", lost_.has_value() ? ", stream lost: " + lost_->ToString() : ""));
    }
  }
  return absl::OkStatus();
}

absl::Status ScriptedWorker::AwaitSlabs(v1::SlabRole role, size_t count, absl::Duration timeout) {
  return Await(absl::StrCat(count, " ", v1::SlabRole_Name(role)), timeout,
               [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return Count(role) == count; });
}

absl::Status ScriptedWorker::AwaitGrants(size_t count, absl::Duration timeout) {
  return Await("granted", timeout,
               [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return grants_ >= count; });
}

absl::Status ScriptedWorker::AwaitRevokes(size_t count, absl::Duration timeout) {
  return Await("revoked", timeout,
               [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return revokes_ >= count; });
}

absl::Status ScriptedWorker::AwaitFreed(int layers, absl::Duration timeout) {
  return Await(absl::StrCat(layers, " layers freed"), timeout,
               [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
                 return rotation_.stages_size() - static_cast<int>(rotation_.slots()) == layers;
               });
}

absl::Status ScriptedWorker::AwaitRefused(absl::Duration timeout) {
  return Await("refused", timeout, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return refused_ > 0; });
}

absl::Status ScriptedWorker::AwaitPressure(size_t count, absl::Duration timeout) {
  return Await("under pressure", timeout,
               [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return pressure_ >= count; });
}

absl::StatusOr<absl::Status> ScriptedWorker::AwaitLost(absl::Duration timeout) {
  const absl::Status waited =
      Await("lost", timeout, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return lost_.has_value(); });
  if (!waited.ok()) return waited;
  MutexLock lock(&mu_);
  return *lost_;
}

uint64_t ScriptedWorker::session() {
  MutexLock lock(&mu_);
  return session_;
}

std::vector<uint32_t> ScriptedWorker::Slabs(v1::SlabRole role) {
  MutexLock lock(&mu_);
  std::vector<uint32_t> ids;
  for (const auto& [id, held] : slabs_) {
    if (held.role == role) ids.push_back(id);
  }
  return ids;
}

uint64_t ScriptedWorker::EpochOf(uint32_t slab) {
  MutexLock lock(&mu_);
  const auto held = slabs_.find(slab);
  return held == slabs_.end() ? 0 : held->second.epoch;
}

absl::StatusOr<int> ScriptedWorker::Read(uint32_t slab) {
  MutexLock lock(&mu_);
  for (const auto* held : {&kept_, &slabs_}) {
    const auto found = held->find(slab);
    if (found == held->end()) continue;
    return static_cast<int>(*static_cast<volatile const std::byte*>(found->second.mapping.data()));
  }
  return absl::NotFoundError("no such slab");
}

void ScriptedWorker::Fill(int value) {
  MutexLock lock(&mu_);
  for (auto& [id, held] : slabs_) memset(held.mapping.data(), value, held.mapping.size());
}

absl::Status ScriptedWorker::Write(uint32_t slab, int value) {
  MutexLock lock(&mu_);
  for (auto* held : {&kept_, &slabs_}) {
    const auto found = held->find(slab);
    if (found == held->end()) continue;
    *static_cast<volatile std::byte*>(found->second.mapping.data()) = static_cast<std::byte>(value);
    return absl::OkStatus();
  }
  return absl::NotFoundError("no such slab");
}

}  // namespace palimpsest
