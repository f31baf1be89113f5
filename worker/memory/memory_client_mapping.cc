// The mapper and the restorer of GrpcMemoryClient: everything that touches the regions.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/log.h"
#include "worker/memory/grpc_memory_client.h"

namespace palimpsest {
namespace {

// `histogram` may be null.
void Observe(prometheus::Histogram* histogram, absl::Duration duration) {
  if (histogram != nullptr) histogram->Observe(absl::ToDoubleSeconds(duration));
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
  std::shared_ptr<BrokerConnection> connection;
  {
    MutexLock lock(&mu_);
    if (detaching_) return;
    connection = connection_;
  }
  std::vector<SlabEntry> expected;
  for (const v1::GrantedSlab& slab : task.grant.slabs()) {
    expected.push_back({SlabId(slab.slab_id()), Epoch(slab.epoch())});
  }
  const bool parameters = task.grant.role() == v1::SLAB_ROLE_PARAMETER;
  const absl::Time start = absl::Now();
  absl::StatusOr<std::vector<UniqueFd>> descriptors =
      connection->FetchSlabs(task.grant.token(), expected);
  if (!descriptors.ok()) return DropConnection(descriptors.status());
  Observe(parameters ? instruments_.fetch_parameter : instruments_.fetch_kv, absl::Now() - start);

  absl::StatusOr<std::vector<RegionIndex>> indexes =
      parameters ? MapParameters(task.grant, *std::move(descriptors))
                 : MapKv(task.grant, *std::move(descriptors));
  const absl::Duration map_time = absl::Now() - task.arrival;
  Observe(parameters ? instruments_.map_parameter : instruments_.map_kv, map_time);
  {
    MutexLock lock(&mu_);
    if (indexes.ok() && parameters) {
      restore_tasks_.push_back(
          {task.session_epoch, GrantId(task.grant.grant_id()), *std::move(indexes), map_time});
    } else if (indexes.ok()) {
      Push(KvMapped{*std::move(indexes)});
      SendMapped(task.session_epoch, GrantId(task.grant.grant_id()), map_time,
                 absl::ZeroDuration());
    }
    changed_.SignalAll();
  }
  if (!indexes.ok()) DropConnection(indexes.status());
}

absl::StatusOr<std::vector<RegionIndex>> GrpcMemoryClient::MapParameters(
    const v1::Grant& grant, std::vector<UniqueFd> descriptors) {
  std::vector<RegionIndex> indexes;
  for (int i = 0; i < grant.slabs_size(); ++i) {
    const v1::GrantedSlab& slab = grant.slabs(i);
    const RegionIndex index(slab.region_index());
    absl::Status status = parameters_->Map(index, SlabId(slab.slab_id()), Epoch(slab.epoch()),
                                           std::move(descriptors[i]));
    if (!status.ok()) return status;
    indexes.push_back(index);
    MutexLock lock(&mu_);
    slabs_->Mapped(index);
  }
  std::sort(indexes.begin(), indexes.end());
  return indexes;
}

absl::StatusOr<std::vector<RegionIndex>> GrpcMemoryClient::MapKv(
    const v1::Grant& grant, std::vector<UniqueFd> descriptors) {
  std::vector<RegionIndex> indexes;
  absl::Status status;
  for (int i = 0; i < grant.slabs_size(); ++i) {
    const v1::GrantedSlab& slab = grant.slabs(i);
    absl::StatusOr<RegionIndex> index =
        kv_->MapAnywhere(SlabId(slab.slab_id()), Epoch(slab.epoch()), std::move(descriptors[i]));
    if (!index.ok()) {
      status = index.status();
      break;
    }
    indexes.push_back(*index);
  }
  if (status.ok()) return indexes;
  // Half a grant is none: nobody was told of these.
  for (const RegionIndex index : indexes) (void)kv_->Unmap(index);
  return status;
}

void GrpcMemoryClient::Perform(GiveKv& task) {
  v1::WorkerMessage message;
  auto& slab_ids = task.revoke.has_value() ? *message.mutable_revoke_done()->mutable_slab_ids()
                                           : *message.mutable_release_kv()->mutable_slab_ids();
  for (const RegionIndex index : task.indexes) {
    absl::StatusOr<SlabId> slab = kv_->Unmap(index);
    if (!slab.ok()) {
      Log(LogLevel::kError, "a KV slab cannot be given back", {{"status", slab.status()}});
      continue;
    }
    slab_ids.Add(slab->value());
  }
  if (task.revoke.has_value()) {
    message.mutable_revoke_done()->set_revoke_id(task.revoke->value());
  } else if (slab_ids.empty()) {
    return;
  }
  MutexLock lock(&mu_);
  Send(std::move(message));
}

void GrpcMemoryClient::Perform(GiveParameters& task) {
  v1::WorkerMessage message;
  v1::RevokeDone& done = *message.mutable_revoke_done();
  done.set_revoke_id(task.revoke.value());
  for (const RegionIndex index : task.indexes) {
    {
      MutexLock lock(&mu_);
      // The copy of one slab at most.
      while (slabs_->state(index) == ParameterSlabs::State::kRestoring) changed_.Wait(&mu_);
    }
    absl::StatusOr<SlabId> slab = parameters_->Unmap(index);
    // Not mapped: its grant failed, and with it the session.
    if (!slab.ok()) continue;
    done.add_slab_ids(slab->value());
    MutexLock lock(&mu_);
    slabs_->Unmapped(index);
  }
  MutexLock lock(&mu_);
  Send(std::move(message));
}

void GrpcMemoryClient::RestorerLoop() {
  for (;;) {
    RestoreTask task;
    {
      MutexLock lock(&mu_);
      restoring_ = false;
      changed_.SignalAll();
      while (!stopping_ && restore_tasks_.empty()) changed_.Wait(&mu_);
      if (stopping_) return;
      task = std::move(restore_tasks_.front());
      restore_tasks_.pop_front();
      restoring_ = true;
    }
    Restore(task);
  }
}

void GrpcMemoryClient::Restore(const RestoreTask& task) {
  const absl::Time start = absl::Now();
  const absl::Status status = restorer_->Restore(
      parameters_->base(), task.indexes,
      [this](RegionIndex index) {
        MutexLock lock(&mu_);
        return !stopping_ && !detaching_ && slabs_->BeginRestore(index);
      },
      [this](RegionIndex index) {
        MutexLock lock(&mu_);
        slabs_->Restored(index);
        changed_.SignalAll();
        if (instruments_.restored_bytes != nullptr) {
          instruments_.restored_bytes->Increment(static_cast<double>(slab_bytes_.count()));
        }
      });
  if (!status.ok()) {
    if (instruments_.checksum_failures != nullptr) instruments_.checksum_failures->Increment();
    {
      MutexLock lock(&mu_);
      for (const RegionIndex index : task.indexes) slabs_->AbandonRestore(index);
      changed_.SignalAll();
    }
    return Fatal(status);
  }
  const absl::Duration restore_time = absl::Now() - start;
  Observe(instruments_.restore, restore_time);
  MutexLock lock(&mu_);
  if (task.grant.has_value()) {
    SendMapped(task.session_epoch, *task.grant, task.map_time, restore_time);
  }
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
