// What the block store (broker/blocks) hears of the broker's sessions.
#ifndef PALIMPSEST_BROKER_SERVER_BLOCK_SESSIONS_H_
#define PALIMPSEST_BROKER_SERVER_BLOCK_SESSIONS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/types/span.h"
#include "broker/core/slab_ledger.h"
#include "broker/server/session_stream.h"
#include "common/ids.h"
#include "common/process.h"
#include "proto/palimpsest/v1/broker.pb.h"

namespace palimpsest {

// Called without locks held; Attached and Ended of one session in the order in which they happened.
// Thread-safe; nothing blocks for long.
class BlockSessions {
 public:
  struct Session {
    SessionId id;
    TenantId tenant;
    std::shared_ptr<const ProcessHandle> process;
    std::shared_ptr<SessionStream> stream;
  };

  virtual ~BlockSessions() = default;

  // A worker has attached, for the first time or again: what the session had before is void.
  // Returns Attached.block_token.
  virtual std::string Attached(const Session& session) = 0;

  // A ChunksUnmapped that came over `stream`.
  virtual void ChunksUnmapped(SessionId session, const SessionStream& stream,
                              absl::Span<const uint32_t> chunks) = 0;

  // The session's process is gone, or it has detached. Ignored if it never attached.
  virtual void Ended(SessionId session) = 0;

  // Adds what is in the tiers.
  virtual void FillStatus(v1::GetStatusResponse& status) = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_BLOCK_SESSIONS_H_
