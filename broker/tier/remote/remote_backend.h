// Tier 4: blocks in another node's memory, over UCX. Its owner is a PeerMemory (peer_memory.h), in
// another process.
//
// A block that is stored is offered to the owner, which takes the bytes from this process's memory;
// one that is loaded is offered by the owner, and taken from where it lies there. What the owner
// says of a block is compared with what this side knows, and the store verifies the bytes.
//
// An owner that is not there, breaks off or does not answer within `timeout` costs its blocks: what
// is under way fails when the connection has been closed and flushed, so that nobody touches memory
// that was given back; the next operation connects anew. After that its places are not found:
// whoever owned the memory has dropped them. Nothing outlives this process.
//
// One thread of its own does everything; calls enqueue.
#ifndef PALIMPSEST_BROKER_TIER_REMOTE_REMOTE_BACKEND_H_
#define PALIMPSEST_BROKER_TIER_REMOTE_REMOTE_BACKEND_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "broker/tier/tier_backend.h"

namespace palimpsest {

class RemoteBackend : public TierBackend {
 public:
  struct Options {
    // Of the owner: numeric, with the port.
    std::string peer;
    // As UCX_TLS; must have one in common with the owner's.
    std::string transports = "all";
    // Of every operation, connecting included.
    absl::Duration timeout = absl::Seconds(5);
  };

  explicit RemoteBackend(const Options& options);
  ~RemoteBackend() override;

  std::string name() const override { return "remote"; }
  Bytes Footprint(Bytes length) const override;
  // Succeeds whether the owner is there or not; finds nothing.
  absl::StatusOr<std::vector<StoredBlock>> Open() override;
  void Close() override;
  void Write(const BlockRecord& record, absl::Span<const std::byte> from, Written done) override;
  void Read(const BlockRecord& record, TierPlace place, absl::Span<std::byte> to,
            Done done) override;
  void Remove(const BlockRecord& record, TierPlace place, RemoveReason reason, Done done) override;
  void Purge(const std::string& tenant, Done done) override;

 private:
  class Core;

  const Options options_;
  std::unique_ptr<Core> core_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_REMOTE_REMOTE_BACKEND_H_
