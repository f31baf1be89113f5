// The other side of a tier in another node's memory: owns a bounded region, and keeps blocks of
// peers in it.
//
// A block arrives whole, is compared with its checksum, and only then has a place. Who loads it
// takes it from where it lies. It stays there until that is over, or the reader's connection was
// closed and flushed, whatever is removed meanwhile. A peer that lets this side wait for too long
// is cut off.
//
// Peers see nothing of each other: a place that another one filled is not found. When a connection
// ends, its blocks are dropped. Peers are the brokers of one cluster, in a network of theirs: what
// they say is bounded and checked here, but UCX itself parses it first.
//
// One thread of its own does everything. Thread-safe.
#ifndef PALIMPSEST_BROKER_TIER_REMOTE_PEER_MEMORY_H_
#define PALIMPSEST_BROKER_TIER_REMOTE_PEER_MEMORY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/bytes.h"

namespace palimpsest {

class PeerMemory {
 public:
  struct Options {
    // Numeric; port 0 takes a free one.
    std::string listen = "127.0.0.1:0";
    // As UCX_TLS.
    std::string transports = "all";
    // Of the region, in whole units of 4 KiB. Allocated at once.
    Bytes bytes;
    int max_peers = 16;
    int max_loads_per_peer = 64;
    // How long a peer may take for the bytes of one block, in either direction.
    absl::Duration patience = absl::Seconds(10);
  };

  struct Usage {
    uint64_t peers = 0;
    uint64_t blocks = 0;   // that can be loaded
    uint64_t loading = 0;  // loads that have not ended
    uint64_t loaded = 0;   // that have
    Bytes used;            // by all blocks: arriving, there, or dropped and still being loaded
    uint64_t refused = 0;  // requests
    uint64_t cut_off = 0;  // peers that broke the rules
  };

  // InvalidArgument for wrong options; ResourceExhausted if there is no such memory.
  static absl::StatusOr<std::unique_ptr<PeerMemory>> Start(const Options& options);
  // Cuts all peers off.
  ~PeerMemory();

  // Where it listens, with the port.
  const std::string& address() const;
  Usage usage() const;

 private:
  class Core;
  explicit PeerMemory(std::unique_ptr<Core> core);

  std::unique_ptr<Core> core_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_REMOTE_PEER_MEMORY_H_
