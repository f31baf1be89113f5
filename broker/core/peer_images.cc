#include "broker/core/peer_images.h"

#include <algorithm>
#include <utility>

namespace palimpsest {

void PeerImages::Connect(SessionId id, int32_t priority, uint32_t slabs, uint32_t ranks) {
  const auto known = sessions_.find(id);
  const uint64_t age = known == sessions_.end() ? ++ages_ : known->second.age;
  sessions_[id] = Session{.priority = priority,
                          .age = age,
                          .image = slabs,
                          .ranks = std::max(ranks, 1u),
                          .connected = true};
}

void PeerImages::Disconnect(SessionId id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  found->second.connected = false;
  // Who does not come back is killed for that.
  found->second.deadline = absl::InfiniteFuture();
}

void PeerImages::End(SessionId id) { sessions_.erase(id); }

void PeerImages::Answer(SessionId id, PeerImageId offer, uint32_t slabs) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || !found->second.has_open() || found->second.open != offer) return;
  Session& session = found->second;
  session.open = PeerImageId(0);
  session.deadline = absl::InfiniteFuture();
  if (session.filling && slabs > 0) return;  // it has what was offered
  session.refused = session.filling;
  session.slabs = 0;
}

std::vector<PeerImages::Offer> PeerImages::Decide(absl::Time now) {
  std::vector<std::pair<SessionId, Session*>> order;
  uint32_t left = options_.slabs;
  for (auto& [id, session] : sessions_) {
    if (session.connected) {
      order.emplace_back(id, &session);
    } else {
      left -= std::min(left, session.slabs * session.ranks);
    }
  }
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    if (a.second->priority != b.second->priority) return a.second->priority > b.second->priority;
    return a.second->age < b.second->age;
  });
  std::vector<Offer> offers;
  uint32_t now_free = free();
  for (const auto& [id, session] : order) {
    const uint32_t share = session->refused ? 0 : std::min(session->image, left / session->ranks);
    left -= share * session->ranks;
    if (session->has_open() || share == session->slabs) continue;
    const bool fill = session->slabs == 0;
    if (fill && share * session->ranks > now_free) continue;
    session->open = PeerImageId(++ids_);
    session->filling = fill;
    session->deadline = now + (fill ? options_.fill_deadline : options_.return_deadline);
    if (fill) {
      session->slabs = share;
      now_free -= share * session->ranks;
    }
    offers.push_back({id, session->open, fill ? share : 0, session->ranks, session->deadline});
  }
  return offers;
}

std::vector<SessionId> PeerImages::TakeLate(absl::Time now) {
  std::vector<SessionId> late;
  for (auto& [id, session] : sessions_) {
    if (session.deadline > now) continue;
    session.deadline = absl::InfiniteFuture();
    late.push_back(id);
  }
  return late;
}

absl::Time PeerImages::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [id, session] : sessions_) next = std::min(next, session.deadline);
  return next;
}

uint32_t PeerImages::Held(SessionId id) const {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? 0 : found->second.slabs * found->second.ranks;
}

uint32_t PeerImages::free() const {
  uint32_t held = 0;
  for (const auto& [id, session] : sessions_) held += session.slabs * session.ranks;
  return options_.slabs - std::min(options_.slabs, held);
}

}  // namespace palimpsest
