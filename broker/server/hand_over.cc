#include "broker/server/hand_over.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace palimpsest {

void HandOverTable::Open(ConnectionId connection) {
  MutexLock lock(&mu_);
  waiting_[connection];
}

Token HandOverTable::Offer(ConnectionId connection, HandOver what, absl::Duration lifetime) {
  const Token token = Token::Random();
  const absl::Time now = clock_.Now();
  std::vector<Waiting> withdrawn;  // closes descriptors after the lock
  MutexLock lock(&mu_);
  const auto found = waiting_.find(connection);
  if (found == waiting_.end()) return token;
  std::vector<Waiting>& offers = found->second;
  const auto expired = std::stable_partition(
      offers.begin(), offers.end(), [now](const Waiting& offer) { return offer.expiry > now; });
  std::move(expired, offers.end(), std::back_inserter(withdrawn));
  offers.erase(expired, offers.end());
  if (offers.size() >= max_offers_) {
    withdrawn.push_back(std::move(offers.front()));
    offers.erase(offers.begin());
  }
  offers.push_back(Waiting{token, std::move(what), now + lifetime});
  return token;
}

absl::StatusOr<HandOver> HandOverTable::Take(ConnectionId connection, const Token& token) {
  const absl::Time now = clock_.Now();
  MutexLock lock(&mu_);
  const auto found = waiting_.find(connection);
  if (found != waiting_.end()) {
    std::vector<Waiting>& offers = found->second;
    const auto it = std::find_if(offers.begin(), offers.end(),
                                 [&token](const Waiting& offer) { return offer.token == token; });
    if (it != offers.end()) {
      Waiting taken = std::move(*it);
      offers.erase(it);
      if (taken.expiry > now) return std::move(taken.what);
      return absl::DeadlineExceededError("the token has expired");
    }
  }
  return absl::NotFoundError(
      "no descriptors wait for this token on this connection: it was used already, was withdrawn "
      "or belongs to another connection");
}

void HandOverTable::Drop(ConnectionId connection) {
  std::vector<Waiting> dropped;  // closes descriptors after the lock
  MutexLock lock(&mu_);
  const auto found = waiting_.find(connection);
  if (found == waiting_.end()) return;
  dropped = std::move(found->second);
  waiting_.erase(found);
}

size_t HandOverTable::size() const {
  MutexLock lock(&mu_);
  size_t total = 0;
  for (const auto& [connection, offers] : waiting_) total += offers.size();
  return total;
}

}  // namespace palimpsest
