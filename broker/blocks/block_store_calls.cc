// What workers ask of the block store.
#include <utility>

#include "absl/strings/str_cat.h"
#include "broker/blocks/block_store.h"

namespace palimpsest {
namespace {

absl::Status Stopped() { return absl::UnavailableError("the block store is shutting down"); }

}  // namespace

template <typename Event>
absl::Status BlockStore::DecideFor(const Caller& caller, Event event) {
  absl::Status status = Stopped();
  Decide([&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    status = CheckCaller(caller);
    if (status.ok()) status = event(now);
  });
  return status;
}

absl::Status BlockStore::CheckCaller(const Caller& caller) {
  const auto found = sessions_.find(caller.session);
  if (found != sessions_.end() && ConstantTimeEqual(found->second.token, caller.token)) {
    return absl::OkStatus();
  }
  return absl::UnauthenticatedError(
      "no session has this id and block_token: expected those of the last Attached");
}

absl::StatusOr<BlockStore::Caller> BlockStore::Identify(SessionId session,
                                                        absl::string_view token) {
  Caller caller{session, "", std::string(token)};
  MutexLock lock(&mu_);
  if (stopping_) return Stopped();
  if (absl::Status known = CheckCaller(caller); !known.ok()) return known;
  caller.tenant = options_.tenants[sessions_.at(session).session.tenant.value()].name;
  return caller;
}

absl::StatusOr<std::vector<blocks::Reserved>> BlockStore::Reserve(
    const Caller& caller, uint64_t request, absl::Span<const ArenaLedger::Wanted> wanted) {
  absl::StatusOr<std::vector<blocks::Reserved>> reserved;
  const absl::Status status =
      DecideFor(caller, [&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        reserved = directory_.Reserve(caller.session, request, wanted, now);
        return reserved.status();
      });
  if (!status.ok()) return status;
  return reserved;
}

absl::Status BlockStore::Commit(const Caller& caller,
                                absl::Span<const ArenaLedger::Committed> blocks) {
  return DecideFor(caller, [&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return directory_.Commit(caller.session, blocks, now);
  });
}

absl::Status BlockStore::Abort(const Caller& caller, absl::Span<const BlockKey> keys) {
  return DecideFor(caller, [&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return directory_.Abort(caller.session, keys, now);
  });
}

absl::Status BlockStore::Release(const Caller& caller, uint64_t request,
                                 absl::Span<const ArenaExtent> extents) {
  return DecideFor(caller, [&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return directory_.Release(caller.session, request, extents, now);
  });
}

absl::Status BlockStore::EndRequest(const Caller& caller, const blocks::RequestEnding& ending) {
  return DecideFor(caller, [&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return directory_.EndRequest(caller.session, ending, now);
  });
}

absl::StatusOr<size_t> BlockStore::Hint(const Caller& caller, const blocks::BlockHint& hint) {
  absl::StatusOr<size_t> moved;
  const absl::Status status =
      DecideFor(caller, [&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        moved = directory_.Hint(caller.session, hint, now);
        return moved.status();
      });
  if (!status.ok()) return status;
  return moved;
}

absl::Status BlockStore::SetRecompute(const Caller& caller, const blocks::RecomputeCost& cost) {
  return DecideFor(caller, [&](absl::Time) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return directory_.SetRecompute(sessions_.at(caller.session).session.tenant, cost);
  });
}

absl::StatusOr<BlockStore::ChunkOffer> BlockStore::MapChunks(const Caller& caller,
                                                             absl::Span<const uint32_t> chunks) {
  std::vector<ArenaChunkId> ids(chunks.begin(), chunks.end());
  HandOver what{DescriptorKind::kSlabs, {}, {}, 1};
  ConnectionId connection;
  absl::Status status = DecideFor(caller, [&](absl::Time) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    connection = sessions_.at(caller.session).session.stream->connection();
    return directory_.Map(caller.session, ids);
  });
  if (!status.ok()) return status;
  for (const ArenaChunkId id : ids) {
    std::shared_ptr<const UniqueFd> memory = arena_->Descriptor(id);
    if (memory == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("chunk ", id.ToString(), " has no memory any more"));
    }
    what.entries.push_back(SlabEntry{SlabId(id.value()), Epoch(0)});
    what.descriptors.push_back(std::move(memory));
  }
  return ChunkOffer{hand_overs_.Offer(connection, std::move(what), options_.token_lifetime),
                    options_.token_lifetime, chunk_bytes()};
}

std::optional<blocks::WaitId> BlockStore::Acquire(const Caller& caller,
                                                  blocks::AcquireRequest request,
                                                  absl::Duration wait, AcquireDone done) {
  absl::StatusOr<blocks::AcquireReply> reply = Stopped();
  std::optional<blocks::WaitId> waits;
  const absl::Status status =
      DecideFor(caller, [&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        request.deadline = wait > absl::ZeroDuration() ? now + wait : absl::InfinitePast();
        reply = directory_.Acquire(caller.session, request, now);
        if (reply.ok() && reply->wait.has_value()) {
          waits = reply->wait;
          waiters_[*waits] = Waiter{caller.session, std::move(done)};
        }
        return reply.status();
      });
  if (waits.has_value()) return waits;
  if (status.ok()) {
    done(std::move(reply));
  } else {
    done(status);
  }
  return std::nullopt;
}

bool BlockStore::CancelWait(const Caller& caller, blocks::WaitId wait) {
  AcquireDone dropped;
  Decide([&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto found = waiters_.find(wait);
    if (found == waiters_.end() || found->second.session != caller.session) return;
    dropped = std::move(found->second.done);
    waiters_.erase(found);
    directory_.CancelWait(caller.session, wait, now);
  });
  return dropped != nullptr;
}

}  // namespace palimpsest
