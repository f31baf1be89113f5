#include "broker/server/testing/scripted_worker.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/memory_file.h"
#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);

}  // namespace

absl::Status ScriptedWorker::Attach(const std::string& socket,
                                    const std::optional<std::string>& nonce) {
  v1::Attach attach;
  attach.set_nonce(nonce.value_or(link_.nonce()));
  attach.set_rotates(rotates_);
  return OpenSession(socket, attach);
}

v1::Attach ScriptedWorker::Returning() {
  v1::Attach attach;
  attach.set_nonce(link_.nonce());
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
  const absl::Status sent = link_.descriptors().Send(ReturnSlabs{{{SlabId(slab), Epoch(epoch)}}},
                                                     {descriptor}, kPatience);
  if (!sent.ok()) return sent;
  return link_.descriptors().ReceiveA<Accepted>(kPatience).status();
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
      link_.descriptors().Send(palimpsest::ReturnImage{fingerprint}, {descriptor}, kPatience);
  if (!sent.ok()) return sent;
  return link_.descriptors().ReceiveA<Accepted>(kPatience).status();
}

absl::Status ScriptedWorker::OpenSession(const std::string& socket, const v1::Attach& attach) {
  if (reader_.joinable()) return absl::FailedPreconditionError("drop the old session first");
  const absl::StatusOr<v1::Attached> attached = link_.Open(socket, attach, [this] {
    if (hangs_up_) link_.descriptors().Shutdown();
  });
  if (!attached.ok()) return attached.status();
  {
    MutexLock lock(&mu_);
    lost_.reset();
    session_ = attached->session_id();
    slab_bytes_ = attached->slab_bytes();
    fingerprint_ = attached->image().fingerprint();
  }
  if (!attached->image_token().empty()) {
    absl::StatusOr<std::vector<UniqueFd>> image = link_.Fetch(attached->image_token(), nullptr);
    if (!image.ok()) return image.status();
    MutexLock lock(&mu_);
    image_ = std::move(image->front());
  }
  if (reads_) reader_ = std::thread([this] { ReadLoop(); });
  return absl::OkStatus();
}

void ScriptedWorker::Drop() {
  link_.Cancel();
  if (reader_.joinable()) reader_.join();
  // What it had not answered is void.
  MutexLock lock(&mu_);
  held_messages_.clear();
  held_answers_.clear();
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
  return link_.Fetch(token, &entries).status();
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
