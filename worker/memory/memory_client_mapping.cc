// The mapper and the restorer of GrpcMemoryClient: everything that touches the regions.
#include <algorithm>
#include <atomic>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/monotonic_time.h"
#include "worker/memory/grpc_memory_client.h"

namespace palimpsest {
namespace {

// Weight of the last copy in the speed of copies.
constexpr double kNewestCopy = 1.0 / 8;

// `histogram` may be null.
void Observe(prometheus::Histogram* histogram, absl::Duration duration) {
  if (histogram != nullptr) histogram->Observe(absl::ToDoubleSeconds(duration));
}

// The places that the rotation vacates and leaves so.
std::set<RegionIndex> LeftEmpty(const RotationPlan& plan) {
  std::set<RegionIndex> empty(plan.vacated.begin(), plan.vacated.end());
  for (const SlabRegion::Held& slab : plan.own) empty.erase(slab.index);
  for (const SlabRegion::Held& slab : plan.aliases) empty.erase(slab.index);
  return empty;
}

}  // namespace

void GrpcMemoryClient::MapperLoop() {
  for (;;) {
    std::optional<MapTask> task;
    {
      MutexLock lock(&mu_);
      mapping_ = false;
      changed_.SignalAll();
      while (!stopping_ && map_tasks_.empty()) changed_.Wait(&mu_);
      if (stopping_) return;
      task = std::move(map_tasks_.front());
      map_tasks_.pop_front();
      mapping_ = true;
    }
    std::visit([this](auto& what) { Perform(what); }, *task);
    Wake();
  }
}

void GrpcMemoryClient::Perform(MapGrant& task) {
  {
    MutexLock lock(&mu_);
    if (detaching_) return;
  }
  const bool slots = task.grant.role() == v1::SLAB_ROLE_SLOT;
  const bool parameters = task.grant.role() == v1::SLAB_ROLE_PARAMETER;
  const absl::Time start = MonotonicNow();
  absl::StatusOr<std::vector<SlabRegion::Arrival>> slabs = Fetch(task.grant);
  if (!slabs.ok()) return DropConnection(slabs.status());
  Observe(parameters || slots ? instruments_.fetch_parameter : instruments_.fetch_kv,
          MonotonicNow() - start);
  if (slots) {
    const absl::Status kept = KeepSpare(task.grant, *std::move(slabs));
    if (!kept.ok()) return DropConnection(kept);
    MutexLock lock(&mu_);
    return SendMapped(task.session_epoch, GrantId(task.grant.grant_id()),
                      MonotonicNow() - task.arrival, absl::ZeroDuration());
  }

  absl::StatusOr<std::vector<RegionIndex>> indexes = Map(task.grant, *std::move(slabs));
  const absl::Duration map_time = MonotonicNow() - task.arrival;
  Observe(parameters ? instruments_.map_parameter : instruments_.map_kv, map_time);
  if (!indexes.ok()) return DropConnection(indexes.status());
  MutexLock lock(&mu_);
  changed_.SignalAll();
  if (parameters) {
    for (const RegionIndex index : *indexes) slabs_->Mapped(index);
    std::sort(indexes->begin(), indexes->end());
    restore_tasks_.push_back(
        {task.session_epoch, GrantId(task.grant.grant_id()), *std::move(indexes), map_time});
    return;
  }
  if (task.grant.role() == v1::SLAB_ROLE_KV) Push(KvMapped{*std::move(indexes)});
  SendMapped(task.session_epoch, GrantId(task.grant.grant_id()), map_time, absl::ZeroDuration());
}

absl::StatusOr<std::vector<SlabRegion::Arrival>> GrpcMemoryClient::Fetch(const v1::Grant& grant) {
  std::vector<SlabRegion::Arrival> slabs;
  std::vector<SlabEntry> expected;
  // What is mapped nowhere needs its descriptors all the same, for the next broker.
  bool kept = grant.role() != v1::SLAB_ROLE_SLOT;
  for (const v1::GrantedSlab& slab : grant.slabs()) {
    expected.push_back({SlabId(slab.slab_id()), Epoch(slab.epoch())});
    slabs.push_back({SlabId(slab.slab_id()), Epoch(slab.epoch()), slab.memory_id(), {}});
    kept = kept && slab.memory_id() != 0 && backend_.Keeps(slab.memory_id());
  }
  if (kept) return slabs;
  std::shared_ptr<BrokerConnection> connection;
  {
    MutexLock lock(&mu_);
    connection = connection_;
  }
  absl::StatusOr<std::vector<SlabDescriptors>> descriptors =
      connection->FetchSlabs(grant.token(), expected, backend_.ranks());
  if (!descriptors.ok()) return descriptors.status();
  for (size_t i = 0; i < slabs.size(); ++i) slabs[i].memory = std::move((*descriptors)[i]);
  return slabs;
}

absl::StatusOr<std::vector<RegionIndex>> GrpcMemoryClient::Map(
    const v1::Grant& grant, std::vector<SlabRegion::Arrival> slabs) {
  if (grant.role() == v1::SLAB_ROLE_KV) return kv_->MapAnywhere(std::move(slabs));
  std::vector<RegionIndex> indexes;
  for (const v1::GrantedSlab& slab : grant.slabs()) {
    indexes.push_back(RegionIndex(slab.region_index()));
  }
  SlabRegion& region = grant.role() == v1::SLAB_ROLE_PARAMETER ? *parameters_ : *workspace_;
  absl::Status status = region.Map(std::move(slabs), indexes);
  if (!status.ok()) return status;
  return indexes;
}

absl::Status GrpcMemoryClient::KeepSpare(const v1::Grant& grant,
                                         std::vector<SlabRegion::Arrival> slabs) {
  MutexLock lock(&mu_);
  std::map<RegionIndex, SlabRegion::Held> kept = slots_;
  for (int i = 0; i < grant.slabs_size(); ++i) {
    const RegionIndex index(grant.slabs(i).region_index());
    SlabRegion::Arrival& slab = slabs[static_cast<size_t>(i)];
    SlabRegion::Held held{slab.slab, slab.epoch, index,
                          std::make_shared<const SlabDescriptors>(std::move(slab.memory)),
                          slab.memory_id};
    if (index.value() >= slabs_->size() || !kept.emplace(index, std::move(held)).second) {
      return absl::InvalidArgumentError(absl::StrCat("a grant for place ", index.ToString(),
                                                     " of the slots, which is outside or taken"));
    }
  }
  slots_ = std::move(kept);
  return absl::OkStatus();
}

void GrpcMemoryClient::Perform(GiveKv& task) {
  auto rest = absl::MakeConstSpan(task.indexes);
  do {
    const auto indexes = rest.subspan(0, GiveBackPart());
    rest.remove_prefix(indexes.size());
    const std::vector<SlabId> slabs = UnmapKv(indexes);
    if (task.revoke.has_value()) {
      SendRevokeDone(*task.revoke, slabs, /*more=*/!rest.empty());
    } else if (!slabs.empty()) {
      v1::WorkerMessage message;
      for (const SlabId slab : slabs) message.mutable_release_kv()->add_slab_ids(slab.value());
      MutexLock lock(&mu_);
      Send(std::move(message));
    }
  } while (!rest.empty());
}

void GrpcMemoryClient::SendRevokeDone(RevokeId revoke, absl::Span<const SlabId> slabs, bool more) {
  v1::WorkerMessage message;
  v1::RevokeDone& done = *message.mutable_revoke_done();
  done.set_revoke_id(revoke.value());
  for (const SlabId slab : slabs) done.add_slab_ids(slab.value());
  done.set_more(more);
  MutexLock lock(&mu_);
  Send(std::move(message));
}

size_t GrpcMemoryClient::GiveBackPart() const {
  return static_cast<size_t>(std::max<int64_t>(options_.give_back_part / slab_bytes_, 1));
}

std::vector<SlabId> GrpcMemoryClient::UnmapKv(absl::Span<const RegionIndex> indexes) {
  absl::StatusOr<std::vector<SlabId>> slabs = kv_->Unmap(indexes);
  if (slabs.ok()) return *std::move(slabs);
  Log(LogLevel::kError, "KV slabs cannot be given back", {{"status", slabs.status()}});
  return {};
}

void GrpcMemoryClient::Perform(GiveParameters& task) {
  // Not mapped: its grant failed, and with it the session.
  std::erase_if(task.indexes, [this](RegionIndex index) { return !parameters_->IsMapped(index); });
  AwaitWritten(task.indexes);
  auto rest = absl::MakeConstSpan(task.indexes);
  do {
    const auto indexes = rest.subspan(0, GiveBackPart());
    rest.remove_prefix(indexes.size());
    const absl::StatusOr<std::vector<SlabId>> slabs = parameters_->Unmap(indexes);
    if (!slabs.ok()) {
      Log(LogLevel::kError, "parameter slabs cannot be given back", {{"status", slabs.status()}});
      return DropConnection(slabs.status());
    }
    {
      MutexLock lock(&mu_);
      for (const RegionIndex index : indexes) slabs_->Unmapped(index);
    }
    SendRevokeDone(task.revoke, *slabs, /*more=*/!rest.empty());
  } while (!rest.empty());
}

void GrpcMemoryClient::AwaitWritten(absl::Span<const RegionIndex> places) {
  MutexLock lock(&mu_);
  for (const RegionIndex index : places) {
    const ParameterSlabs::State state = slabs_->state(index);
    if (state != ParameterSlabs::State::kRotating && !slabs_->revoked(index)) {
      slabs_->Revoke(index);
    }
  }
  // The copies that are under way, at most.
  for (const RegionIndex index : places) {
    while (slabs_->BeingWritten(index)) changed_.Wait(&mu_);
  }
}

void GrpcMemoryClient::Perform(Rotate& task) {
  ParameterTable before;
  bool was_available = false;
  {
    MutexLock lock(&mu_);
    was_available = slabs_->Available();
    before.slots = slots_;
    before.rotation = rotation_;
  }
  for (SlabRegion::Held& slab : parameters_->held()) before.own[slab.index] = std::move(slab);
  absl::StatusOr<RotationPlan> plan = PlanRotation(before, stages_, task.rotation, task.moves);
  if (!plan.ok()) {
    {
      MutexLock lock(&mu_);
      Settle(task.id, /*changed=*/false);
    }
    return DropConnection(plan.status());
  }
  if (slot_copier_ != nullptr) slot_copier_->Stop();
  const absl::Status status = Rearrange(task.id, *plan);
  if (status.ok() && slot_copier_ != nullptr) slot_copier_->Start(task.rotation);
  {
    MutexLock lock(&mu_);
    if (status.ok()) TakeOver(*std::move(plan), was_available);
    Settle(task.id, /*changed=*/status.ok());
  }
  if (!status.ok()) return Fatal(status);
  Log(LogLevel::kInfo, "layers rotate",
      {{"rotation", task.id},
       {"layers", task.rotation.stages.size()},
       {"slots", task.rotation.slots}});
}

absl::Status GrpcMemoryClient::Rearrange(RotationId id, const RotationPlan& plan) {
  AwaitWritten(plan.vacated);
  absl::Status status = parameters_->Vacate(plan.vacated);
  if (!status.ok()) return status;
  v1::WorkerMessage message;
  message.mutable_rotation_done()->set_rotation_id(id.value());
  {
    MutexLock lock(&mu_);
    // The broker may grant these at once.
    for (const RegionIndex index : LeftEmpty(plan)) slabs_->Unmapped(index);
    Send(std::move(message));
  }
  return parameters_->Occupy(plan.own, plan.aliases);
}

void GrpcMemoryClient::TakeOver(RotationPlan plan, bool was_available) {
  const std::set<RegionIndex> empty = LeftEmpty(plan);
  for (const RegionIndex index : plan.vacated) {
    if (!empty.contains(index)) slabs_->Unmapped(index);
  }
  RestoreTask restore;
  for (const SlabRegion::Held& slab : plan.own) {
    slabs_->Promise(slab.index);
    slabs_->Mapped(slab.index);
    restore.indexes.push_back(slab.index);
  }
  for (const SlabRegion::Held& slab : plan.aliases) slabs_->Rotate(slab.index);
  if (!restore.indexes.empty()) restore_tasks_.push_back(std::move(restore));
  slots_ = std::move(plan.after.slots);
  rotation_ = std::move(plan.after.rotation);
  if (!was_available && slabs_->Available()) {
    activation_.reset();
    Push(ParametersComing{});
  }
}

void GrpcMemoryClient::Settle(RotationId id, bool changed) {
  --settling_;
  Push(RotationSettled{id, changed, rotation_});
  changed_.SignalAll();
}

void GrpcMemoryClient::RestorerLoop() {
  for (;;) {
    std::vector<RestoreTask> tasks;
    std::optional<std::variant<PeerOffer, PeerReturn>> peer;
    {
      MutexLock lock(&mu_);
      restoring_ = false;
      changed_.SignalAll();
      while (!stopping_ && restore_tasks_.empty() && peer_tasks_.empty()) changed_.Wait(&mu_);
      if (stopping_) return;
      if (restore_tasks_.empty()) {
        peer = std::move(peer_tasks_.front());
        peer_tasks_.pop_front();
      }
      tasks.assign(std::make_move_iterator(restore_tasks_.begin()),
                   std::make_move_iterator(restore_tasks_.end()));
      restore_tasks_.clear();
      restoring_ = true;
    }
    if (!tasks.empty()) Restore(tasks);
    if (!peer.has_value()) continue;
    if (auto* offer = std::get_if<PeerOffer>(&*peer)) {
      Fill(*offer);
    } else {
      Drop(std::get<PeerReturn>(*peer));
    }
    Wake();
  }
}

void GrpcMemoryClient::Restore(absl::Span<const RestoreTask> tasks) {
  const absl::Time start = MonotonicNow();
  const absl::Duration waited = pacer_.waited(LinkPacer::Kind::kRestore);
  std::vector<RegionIndex> indexes;
  for (const RestoreTask& task : tasks) {
    indexes.insert(indexes.end(), task.indexes.begin(), task.indexes.end());
  }
  ImageRestorer::Progress progress;
  progress.pacer = &pacer_;
  progress.wanted = [this](RegionIndex index) {
    MutexLock lock(&mu_);
    return !stopping_ && !detaching_ && slabs_->BeginRestore(index);
  };
  progress.queued = [this](RegionIndex index) {
    MutexLock lock(&mu_);
    slabs_->Queued(index);
  };
  std::atomic<int64_t> copied = 0;
  progress.done = [this, &copied](RegionIndex index) {
    ++copied;
    MutexLock lock(&mu_);
    slabs_->Restored(index);
    changed_.SignalAll();
    if (instruments_.restored_bytes != nullptr) {
      instruments_.restored_bytes->Increment(
          static_cast<double>((slab_bytes_ * backend_.ranks()).count()));
    }
  };
  std::vector<std::byte*> bases;
  for (int rank = 0; rank < backend_.ranks(); ++rank) bases.push_back(parameters_->base(rank));
  const absl::Status status = restorer_->Restore(bases, indexes, progress);
  if (!status.ok()) {
    if (instruments_.checksum_failures != nullptr) instruments_.checksum_failures->Increment();
    // First: who waits for the checksums must not take their end for a proof.
    gate_->Fail(status);
    {
      MutexLock lock(&mu_);
      for (const RegionIndex index : indexes) slabs_->AbandonRestore(index);
      changed_.SignalAll();
    }
    return Fatal(status);
  }
  const absl::Duration restore_time = MonotonicNow() - start;
  Observe(instruments_.restore, restore_time);
  MutexLock lock(&mu_);
  if (restorer_->copies_slabs()) {
    // What one thread copied, and the time that it had for that.
    const absl::Duration held_back = pacer_.waited(LinkPacer::Kind::kRestore) - waited;
    Copied(slab_bytes_ * copied.load() / options_.restore_threads,
           restore_time - held_back / options_.restore_threads);
  }
  for (const RestoreTask& task : tasks) {
    if (!task.grant.has_value()) continue;
    const double share =
        static_cast<double>(task.indexes.size()) / static_cast<double>(indexes.size());
    SendMapped(task.session_epoch, *task.grant, task.map_time, restore_time * share);
  }
}

void GrpcMemoryClient::Copied(Bytes bytes, absl::Duration time) {
  if (bytes == Bytes(0) || time <= absl::ZeroDuration()) return;
  const double rate = static_cast<double>(bytes.count()) / absl::ToDoubleSeconds(time);
  double& smoothed = image_bytes_per_second_;
  smoothed = smoothed == 0 ? rate : smoothed + (rate - smoothed) * kNewestCopy;
}

void GrpcMemoryClient::SendMapped(uint64_t session_epoch, GrantId grant, absl::Duration map_time,
                                  absl::Duration restore_time) {
  if (session_epoch != session_epoch_) return;
  v1::WorkerMessage message;
  v1::GrantMapped& mapped = *message.mutable_grant_mapped();
  mapped.set_grant_id(grant.value());
  mapped.set_map_seconds(absl::ToDoubleSeconds(map_time));
  mapped.set_restore_seconds(absl::ToDoubleSeconds(restore_time));
  Send(std::move(message));
}

}  // namespace palimpsest
