// Descriptors that wait to be fetched with a single-use token.
//
// An offer belongs to one connection of the descriptor socket: over another one its token means
// nothing. It shares ownership of the descriptors, so that what is fetched is what was offered,
// even if the slab was retired in between (the fetched memory is then empty and sealed off from its
// successor).
//
// Threads: thread-safe; nothing blocks.
#ifndef PALIMPSEST_BROKER_SERVER_HAND_OVER_H_
#define PALIMPSEST_BROKER_SERVER_HAND_OVER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/descriptor_protocol.h"
#include "common/fd.h"
#include "common/mutex.h"
#include "common/random.h"
#include "common/strong_int.h"

namespace palimpsest {

// One accepted connection of the descriptor socket; never reused.
using ConnectionId = StrongInt<struct ConnectionIdTag, uint64_t>;

struct HandOver {
  DescriptorKind kind = DescriptorKind::kSlabs;
  // kSlabs: each has `pieces` descriptors, in order. kImage: empty, one descriptor.
  std::vector<SlabEntry> entries;
  std::vector<std::shared_ptr<const UniqueFd>> descriptors;
  uint8_t pieces = 1;
};

class HandOverTable {
 public:
  // At most `max_offers` wait for one connection: beyond that the oldest is withdrawn.
  HandOverTable(const Clock& clock, size_t max_offers) : clock_(clock), max_offers_(max_offers) {}

  // The connection may be offered descriptors, until Drop.
  void Open(ConnectionId connection);

  // What is offered to a connection that is not open is withdrawn at once: it may close while
  // somebody has something for it.
  Token Offer(ConnectionId connection, HandOver what, absl::Duration lifetime);

  // Takes an offer; it can be taken once. NotFound for a token that was never offered to this
  // connection, was taken or withdrawn; DeadlineExceeded for one that expired.
  absl::StatusOr<HandOver> Take(ConnectionId connection, const Token& token);

  // Withdraws everything offered to the connection, now and from now on.
  void Drop(ConnectionId connection);

  // Offers that wait, of all connections.
  size_t size() const;

 private:
  struct Waiting {
    Token token;
    HandOver what;
    absl::Time expiry;
  };

  const Clock& clock_;
  const size_t max_offers_;
  mutable Mutex mu_;
  absl::flat_hash_map<ConnectionId, std::vector<Waiting>> waiting_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_HAND_OVER_H_
