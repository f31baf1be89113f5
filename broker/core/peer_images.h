// Who has a copy of its parameter image in the memory of a GPU that is set aside for them: copies
// from there are several times as fast as from the host. Pure.
//
// The memory is the broker's, in slabs of the pool's size, and what counts is the image in host
// memory: a copy may be taken back at any time. Sessions have as many slabs as there are for them,
// by priority, then age: the first of their images, so that the last to come has only a part, or
// none. What a session has is changed by an offer: to a session without a copy, or one of no slabs,
// which takes its copy back. One is open at a time, and what it is about counts as taken until its
// worker has answered or is gone.
//
// Not thread-safe.
#ifndef PALIMPSEST_BROKER_CORE_PEER_IMAGES_H_
#define PALIMPSEST_BROKER_CORE_PEER_IMAGES_H_

#include <cstdint>
#include <map>
#include <vector>

#include "absl/time/time.h"
#include "common/ids.h"

namespace palimpsest {

using PeerImageId = StrongInt<struct PeerImageIdTag, uint64_t>;

class PeerImages {
 public:
  struct Options {
    uint32_t slabs = 0;
    // An offer that was not answered by then costs the worker its life.
    absl::Duration fill_deadline = absl::Seconds(60);
    absl::Duration return_deadline = absl::Seconds(10);
  };
  struct Offer {
    SessionId session;
    PeerImageId id;
    // Of each rank; none: what the session has is taken back.
    uint32_t slabs = 0;
    uint32_t ranks = 1;
    absl::Time deadline;
  };

  explicit PeerImages(const Options& options) : options_(options) {}

  // Its worker is there and has no copy. `slabs` is a rank's part of its image.
  void Connect(SessionId session, int32_t priority, uint32_t slabs, uint32_t ranks);
  // The worker may have what it had.
  void Disconnect(SessionId session);
  // Its process is gone.
  void End(SessionId session);

  // The answer to an offer: how much of it the worker uses. If that is nothing of something, the
  // session is offered nothing any more until it connects again. Ignored if it answers no open
  // offer.
  void Answer(SessionId session, PeerImageId id, uint32_t slabs);

  // What is to be offered now.
  std::vector<Offer> Decide(absl::Time now);

  // Sessions whose answer is late, once each.
  std::vector<SessionId> TakeLate(absl::Time now);
  absl::Time NextDeadline() const;

  // Of the session, all ranks together, open offers included; 0 for one that is not known.
  uint32_t Held(SessionId session) const;
  uint32_t slabs() const { return options_.slabs; }
  uint32_t free() const;

 private:
  struct Session {
    int32_t priority = 0;
    uint64_t age = 0;  // smaller is older
    uint32_t image = 0;
    uint32_t ranks = 1;
    bool connected = false;
    bool refused = false;
    uint32_t slabs = 0;  // of each rank
    PeerImageId open{};  // 0: none
    bool filling = false;
    absl::Time deadline = absl::InfiniteFuture();

    bool has_open() const { return open != PeerImageId(0); }
  };

  const Options options_;
  std::map<SessionId, Session> sessions_;
  uint64_t ages_ = 0;
  uint64_t ids_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_PEER_IMAGES_H_
