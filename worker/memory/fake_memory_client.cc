#include "worker/memory/fake_memory_client.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "worker/core/check.h"

namespace palimpsest {

FakeMemoryClient::FakeMemoryClient(Bytes slab_bytes, int32_t region_slabs)
    : slab_bytes_(slab_bytes), kv_((slab_bytes * region_slabs).count()), mapped_(region_slabs) {
  std::memset(kv_.data(), 0xA5, kv_.size());
}

void FakeMemoryClient::Push(MemoryEvent event) {
  {
    MutexLock lock(&mutex_);
    events_.push_back(std::move(event));
  }
  MutexLock lock(&wake_mutex_);
  if (wake_) wake_();
}

void FakeMemoryClient::Connect(bool reattached) { Push(BrokerConnected{reattached}); }

void FakeMemoryClient::Lose() { Push(BrokerLost{"the test says so"}); }

int32_t FakeMemoryClient::GrantKv(int32_t count) {
  KvMapped event;
  {
    MutexLock lock(&mutex_);
    for (size_t i = 0; i < mapped_.size() && static_cast<int32_t>(event.indexes.size()) < count;
         ++i) {
      if (mapped_[i]) continue;
      mapped_[i] = true;
      event.indexes.push_back(RegionIndex(i));
    }
  }
  const auto granted = static_cast<int32_t>(event.indexes.size());
  if (granted > 0) Push(std::move(event));
  return granted;
}

void FakeMemoryClient::GrantKvAt(const std::vector<uint32_t>& places) {
  KvMapped event;
  {
    MutexLock lock(&mutex_);
    for (uint32_t place : places) {
      PALIMPSEST_CHECK(!mapped_.at(place));
      mapped_[place] = true;
      event.indexes.push_back(RegionIndex(place));
    }
  }
  Push(std::move(event));
}

int32_t FakeMemoryClient::GrantKvTarget() { return GrantKv(target() - Mapped().kv); }

RevokeId FakeMemoryClient::RevokeKv(int32_t slabs) {
  RevokeId id;
  {
    MutexLock lock(&mutex_);
    id = RevokeId(next_revoke_++);
  }
  Push(KvRevoked{id, slabs, absl::InfiniteFuture()});
  return id;
}

RevokeId FakeMemoryClient::RevokeParameters() {
  RevokeId id;
  {
    MutexLock lock(&mutex_);
    id = RevokeId(next_revoke_++);
    parameters_ = false;
    gate_open_ = false;
  }
  Push(ParametersRevoked{id, {RegionIndex(0)}, absl::InfiniteFuture()});
  return id;
}

void FakeMemoryClient::RestoreParameters() {
  {
    MutexLock lock(&mutex_);
    parameters_ = true;
    gate_open_ = true;
  }
  Push(ParametersComing{});
}

RotationId FakeMemoryClient::SetRotation(const Rotation& rotation) {
  RotationId id;
  {
    MutexLock lock(&mutex_);
    id = RotationId(next_rotation_++);
    rotations_[id] = rotation;
  }
  Push(RotationWanted{id, rotation, absl::InfiniteFuture()});
  return id;
}

void FakeMemoryClient::ConnectWithTurns(bool reattached) {
  Push(BrokerConnected{.reattached = reattached, .turns = true});
}

TurnId FakeMemoryClient::BeginTurn() {
  TurnId id;
  {
    MutexLock lock(&mutex_);
    id = TurnId(next_turn_++);
  }
  Push(TurnBegun{id, absl::Seconds(1)});
  return id;
}

void FakeMemoryClient::EndTurn(TurnId turn) { Push(TurnEnding{turn, absl::InfiniteFuture()}); }

void FakeMemoryClient::RefuseActivation(const std::string& message, absl::Duration retry_after) {
  Push(ActivationRefused{message, retry_after});
}

void FakeMemoryClient::FailStage(int stage) {
  MutexLock lock(&mutex_);
  failing_stage_ = stage;
}

std::map<RevokeId, std::vector<RegionIndex>> FakeMemoryClient::finished_revokes() const {
  MutexLock lock(&mutex_);
  return finished_;
}

std::vector<TurnId> FakeMemoryClient::finished_turns() const {
  MutexLock lock(&mutex_);
  return finished_turns_;
}

int32_t FakeMemoryClient::target() const {
  MutexLock lock(&mutex_);
  return target_;
}

int32_t FakeMemoryClient::needed() const {
  MutexLock lock(&mutex_);
  return needed_;
}

std::vector<ActivationReason> FakeMemoryClient::activations() const {
  MutexLock lock(&mutex_);
  return activations_;
}

WorkerLoad FakeMemoryClient::load() const {
  MutexLock lock(&mutex_);
  return load_;
}

size_t FakeMemoryClient::open_rotations() const {
  MutexLock lock(&mutex_);
  return rotations_.size();
}

bool FakeMemoryClient::detached() const {
  MutexLock lock(&mutex_);
  return detached_;
}

std::vector<MemoryEvent> FakeMemoryClient::TakeEvents() {
  MutexLock lock(&mutex_);
  return std::exchange(events_, {});
}

void FakeMemoryClient::SetWakeup(std::function<void()> wake) {
  MutexLock lock(&wake_mutex_);
  wake_ = std::move(wake);
}

bool FakeMemoryClient::ParametersAvailable() const {
  MutexLock lock(&mutex_);
  return parameters_;
}

MappedSlabs FakeMemoryClient::Mapped() const {
  MutexLock lock(&mutex_);
  return {.parameters = parameters_ ? 1 : 0,
          .image = 1,
          .kv = static_cast<int32_t>(std::count(mapped_.begin(), mapped_.end(), true))};
}

void FakeMemoryClient::RequestActivation(ActivationReason reason) {
  MutexLock lock(&mutex_);
  if (!parameters_) activations_.push_back(reason);
}

void FakeMemoryClient::SetKvTarget(int32_t target_slabs, int32_t needed_slabs) {
  MutexLock lock(&mutex_);
  PALIMPSEST_CHECK(0 <= needed_slabs && needed_slabs <= target_slabs);
  PALIMPSEST_CHECK(target_slabs <= static_cast<int32_t>(mapped_.size()));
  target_ = target_slabs;
  needed_ = needed_slabs;
}

void FakeMemoryClient::Garble(RegionIndex index) {
  std::memset(kv_.data() + (slab_bytes_ * index.value()).count(), 0x5A, slab_bytes_.count());
}

void FakeMemoryClient::Unmap(absl::Span<const RegionIndex> indexes) {
  for (RegionIndex index : indexes) {
    PALIMPSEST_CHECK(mapped_.at(index.value()));
    mapped_[index.value()] = false;
    Garble(index);
  }
}

void FakeMemoryClient::FinishKvRevoke(RevokeId id, absl::Span<const RegionIndex> indexes) {
  before_give_();
  MutexLock lock(&mutex_);
  Unmap(indexes);
  PALIMPSEST_CHECK(finished_.emplace(id, std::vector(indexes.begin(), indexes.end())).second);
}

void FakeMemoryClient::FinishParameterRevoke(RevokeId id) {
  before_give_();
  MutexLock lock(&mutex_);
  PALIMPSEST_CHECK(finished_.emplace(id, std::vector<RegionIndex>()).second);
}

void FakeMemoryClient::FinishRotation(RotationId id) {
  before_give_();
  RotationSettled event{id, true, {}};
  {
    MutexLock lock(&mutex_);
    const auto found = rotations_.find(id);
    PALIMPSEST_CHECK(found != rotations_.end());
    event.changed = void_.erase(id) == 0;
    event.rotation = std::move(found->second);
    rotations_.erase(found);
    if (hold_rotations_) return held_.push_back(std::move(event));
  }
  Push(std::move(event));
}

void FakeMemoryClient::HoldRotations(bool hold) {
  std::vector<RotationSettled> settled;
  {
    MutexLock lock(&mutex_);
    hold_rotations_ = hold;
    if (!hold) settled.swap(held_);
  }
  for (RotationSettled& event : settled) Push(std::move(event));
}

void FakeMemoryClient::SettleOldestRotation() {
  std::optional<RotationSettled> settled;
  {
    MutexLock lock(&mutex_);
    settled = held_.front();
    held_.erase(held_.begin());
  }
  Push(*std::move(settled));
}

void FakeMemoryClient::VoidRotations() {
  MutexLock lock(&mutex_);
  for (const auto& [id, rotation] : rotations_) void_.insert(id);
}

void FakeMemoryClient::FinishTurn(TurnId id) {
  before_give_();
  MutexLock lock(&mutex_);
  finished_turns_.push_back(id);
}

void FakeMemoryClient::ReleaseKv(absl::Span<const RegionIndex> indexes) {
  before_give_();
  MutexLock lock(&mutex_);
  Unmap(indexes);
}

void FakeMemoryClient::SendReport(const WorkerLoad& load) {
  MutexLock lock(&mutex_);
  load_ = load;
}

void FakeMemoryClient::Detach() {
  MutexLock lock(&mutex_);
  detached_ = true;
}

absl::Status FakeMemoryClient::AwaitStage(int stage) {
  MutexLock lock(&mutex_);
  if (stage == failing_stage_) return absl::UnavailableError("the test closed this stage");
  if (!gate_open_) return absl::UnavailableError("the parameters were taken");
  return absl::OkStatus();
}

}  // namespace palimpsest
