// Copies of parameter images on another GPU: what the broker does about them.
#include <algorithm>
#include <utility>

#include "broker/server/broker.h"
#include "common/log.h"

namespace palimpsest {

void Broker::ConnectPeer(const Session& session) {
  const uint32_t tenant = session.tenant->value();
  if (tenant >= options_.peer_images.size() || !options_.peer_images[tenant]) return;
  peers_.Connect(session.id, options_.tenants[tenant].priority, options_.image_slabs[tenant],
                 static_cast<uint32_t>(parts_.device.pieces()));
}

void Broker::Answer(Session& session, const PeerImageEvent& event) {
  peers_.Answer(session.id, event.id, event.slabs);
  if (peers_.Held(session.id) == 0) ReleasePeerMemory(session);
}

void Broker::ReleasePeerMemory(Session& session) {
  queue_.push_back(Work{std::exchange(session.peer_memory, {}), nullptr, nullptr});
}

void Broker::KillLate(absl::Time now) {
  for (const SessionId id : peers_.TakeLate(now)) {
    const std::shared_ptr<Session>& session = sessions_.at(id);
    queue_.push_back(
        Work{ArbiterAction(KillProcess{
                 id, "it did not answer in time about its copy of the image on another GPU"}),
             session, session->stream});
  }
}

absl::StatusOr<Broker::PeerMemory> Broker::MakePeerMemory(uint32_t slabs) {
  PeerMemory memory;
  for (uint32_t i = 0; i < slabs; ++i) {
    absl::StatusOr<UniqueFd> slab = parts_.device.CreateBeside(options_.peer_gpu);
    if (!slab.ok()) return slab.status();
    memory.push_back(std::make_shared<const UniqueFd>(*std::move(slab)));
  }
  return memory;
}

void Broker::Do(const Work& work, const PeerImages::Offer& offer) {
  Session& session = *work.session;
  if (work.stream == nullptr) return;
  v1::BrokerMessage message;
  v1::PeerImage& out = *message.mutable_peer_image();
  out.set_peer_image_id(offer.id.value());
  out.set_slabs(offer.slabs);
  out.set_deadline_seconds(
      absl::ToDoubleSeconds(std::max(offer.deadline - parts_.clock.Now(), absl::ZeroDuration())));
  if (offer.slabs > 0) {
    auto memory = MakePeerMemory(offer.slabs * offer.ranks);
    if (!memory.ok()) {
      Log(LogLevel::kWarning, "no copy of the parameter image on another GPU",
          {{"tenant", session.tenant_name}, {"reason", memory.status()}});
      return Decide([&](absl::Time) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        Answer(session, {offer.id, 0});
      });
    }
    {
      MutexLock lock(&mu_);
      // The worker has another connection by now, and its offer is void.
      if (session.stream != work.stream) return;
      session.peer_memory = *memory;
    }
    HandOver what{
        DescriptorKind::kSlabs, {}, *std::move(memory), static_cast<uint8_t>(offer.ranks)};
    for (uint32_t i = 0; i < offer.slabs; ++i) {
      what.entries.push_back(SlabEntry{SlabId(i), Epoch(offer.id.value())});
    }
    const Token token = parts_.hand_overs.Offer(work.stream->connection(), std::move(what),
                                                options_.token_lifetime);
    out.set_token(token.ToBytes());
  }
  Log(LogLevel::kInfo, "copy of a parameter image on another GPU",
      {{"tenant", session.tenant_name},
       {"gpu", options_.peer_gpu},
       {"slabs", offer.slabs * offer.ranks}});
  work.stream->Send(std::move(message));
}

}  // namespace palimpsest
