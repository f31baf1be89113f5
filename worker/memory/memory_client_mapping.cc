// The mapper and the restorer of GrpcMemoryClient: everything that touches the regions.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/monotonic_time.h"
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
  {
    MutexLock lock(&mu_);
    if (detaching_) return;
  }
  const bool parameters = task.grant.role() == v1::SLAB_ROLE_PARAMETER;
  const absl::Time start = MonotonicNow();
  absl::StatusOr<std::vector<SlabRegion::Arrival>> slabs = Fetch(task.grant);
  if (!slabs.ok()) return DropConnection(slabs.status());
  Observe(parameters ? instruments_.fetch_parameter : instruments_.fetch_kv,
          MonotonicNow() - start);

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
  bool kept = true;
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
  {
    MutexLock lock(&mu_);
    // The copies that are under way, at most.
    for (const RegionIndex index : task.indexes) {
      while (slabs_->BeingWritten(index)) changed_.Wait(&mu_);
    }
  }
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
  const absl::Time start = MonotonicNow();
  ImageRestorer::Progress progress;
  progress.wanted = [this](RegionIndex index) {
    MutexLock lock(&mu_);
    return !stopping_ && !detaching_ && slabs_->BeginRestore(index);
  };
  progress.queued = [this](RegionIndex index) {
    MutexLock lock(&mu_);
    slabs_->Queued(index);
  };
  progress.done = [this](RegionIndex index) {
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
  const absl::Status status = restorer_->Restore(bases, task.indexes, progress);
  if (!status.ok()) {
    if (instruments_.checksum_failures != nullptr) instruments_.checksum_failures->Increment();
    // First: who waits for the checksums must not take their end for a proof.
    gate_->Fail(status);
    {
      MutexLock lock(&mu_);
      for (const RegionIndex index : task.indexes) slabs_->AbandonRestore(index);
      changed_.SignalAll();
    }
    return Fatal(status);
  }
  const absl::Duration restore_time = MonotonicNow() - start;
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
