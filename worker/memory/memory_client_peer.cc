// GrpcMemoryClient's copy of the image on another GPU.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/log.h"
#include "common/monotonic_time.h"
#include "worker/memory/grpc_memory_client.h"

namespace palimpsest {

absl::Status GrpcMemoryClient::HandlePeerImage(const v1::PeerImage& message) {
  MutexLock lock(&mu_);
  if (message.slabs() == 0) {
    LeavePeer(message.peer_image_id());
    return absl::OkStatus();
  }
  if (peer_kept_ || message.slabs() > slabs_->size()) {
    return absl::InvalidArgumentError(absl::StrCat("memory for a copy of ", message.slabs(),
                                                   " slabs of an image of ", slabs_->size(),
                                                   peer_kept_ ? ", beside another copy" : ""));
  }
  peer_kept_ = true;
  ++peer_copy_;
  map_tasks_.push_back(
      PeerOffer{session_epoch_, message.peer_image_id(), message.slabs(), message.token(), {}});
  changed_.SignalAll();
  return absl::OkStatus();
}

void GrpcMemoryClient::LeavePeer(std::optional<uint64_t> id) {
  if (!peer_kept_) {
    if (id.has_value()) AnswerPeer(session_epoch_, *id, 0);
    return;
  }
  peer_leaving_ = PeerReturn{session_epoch_, id, peer_copy_};
  Push(RotationWanted{kImageMoves, rotation_, absl::InfiniteFuture()});
}

void GrpcMemoryClient::FinishImageMove() {
  if (!peer_leaving_.has_value()) return Settle(kImageMoves, /*changed=*/false);
  peer_tasks_.push_back(*std::exchange(peer_leaving_, std::nullopt));
}

void GrpcMemoryClient::Perform(PeerOffer& task) {
  std::vector<SlabEntry> expected;
  for (uint32_t i = 0; i < task.slabs; ++i) expected.push_back({SlabId(i), Epoch(task.id)});
  std::shared_ptr<BrokerConnection> connection;
  {
    MutexLock lock(&mu_);
    if (detaching_) return;
    connection = connection_;
  }
  auto memory = connection->FetchSlabs(task.token, expected, backend_.ranks());
  if (!memory.ok()) {
    {
      MutexLock lock(&mu_);
      peer_kept_ = false;
      changed_.SignalAll();
    }
    return DropConnection(memory.status());
  }
  task.memory = *std::move(memory);
  MutexLock lock(&mu_);
  peer_tasks_.push_back(std::move(task));
  changed_.SignalAll();
}

void GrpcMemoryClient::Fill(PeerOffer& offer) {
  const absl::Time begin = MonotonicNow();
  const absl::StatusOr<double> rate = restorer_->KeepCopy(std::move(offer.memory));
  if (rate.ok()) {
    const Bytes copied = slab_bytes_ * (int64_t{offer.slabs} * backend_.ranks());
    if (instruments_.peer_image_bytes != nullptr) {
      instruments_.peer_image_bytes->Set(static_cast<double>(copied.count()));
      instruments_.peer_filled_bytes->Increment(static_cast<double>(copied.count()));
      instruments_.peer_fill_seconds->Increment(absl::ToDoubleSeconds(MonotonicNow() - begin));
    }
    Log(LogLevel::kInfo, "parameters are copied from another GPU",
        {{"slabs", offer.slabs}, {"gigabytes_per_s", *rate / 1e9}});
  } else {
    Log(LogLevel::kWarning, "no copy of the parameter image on another GPU",
        {{"reason", rate.status()}});
  }
  MutexLock lock(&mu_);
  if (rate.ok()) {
    // A layer that lies elsewhere would take longer.
    image_on_peer_ = offer.slabs == slabs_->size() && *rate > 0;
    if (image_on_peer_) image_bytes_per_second_ = *rate;
    Push(RotationWanted{kImageMoves, rotation_, absl::InfiniteFuture()});
  } else {
    peer_kept_ = false;
  }
  AnswerPeer(offer.session_epoch, offer.id, rate.ok() ? offer.slabs : 0);
}

void GrpcMemoryClient::Drop(const PeerReturn& what) {
  bool present = false;
  {
    MutexLock lock(&mu_);
    present = what.copy == peer_copy_;
  }
  if (present) {
    restorer_->DropCopy();
    if (instruments_.peer_image_bytes != nullptr) instruments_.peer_image_bytes->Set(0);
  }
  MutexLock lock(&mu_);
  if (present) {
    peer_kept_ = false;
    image_bytes_per_second_ = host_bytes_per_second_;
    image_on_peer_ = false;
  }
  if (what.id.has_value()) AnswerPeer(what.session_epoch, *what.id, 0);
  Settle(kImageMoves, /*changed=*/false);
}

void GrpcMemoryClient::AnswerPeer(uint64_t session_epoch, uint64_t id, uint32_t slabs) {
  changed_.SignalAll();
  if (session_epoch != session_epoch_) return;
  v1::WorkerMessage message;
  message.mutable_peer_image_done()->set_peer_image_id(id);
  message.mutable_peer_image_done()->set_slabs(slabs);
  Send(std::move(message));
}

}  // namespace palimpsest
