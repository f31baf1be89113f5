// Sessions and their requests.
#include <algorithm>
#include <cassert>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "broker/core/blocks/block_directory_impl.h"

namespace palimpsest::blocks {
namespace {

std::pair<uint32_t, int64_t> PlaceOf(const ArenaExtent& extent) {
  return {extent.chunk.value(), extent.offset.count()};
}

}  // namespace

absl::StatusOr<BlockDirectory::Impl::Session*> BlockDirectory::Impl::FindSession(
    SessionId session) {
  const auto found = sessions_.find(session);
  if (found != sessions_.end()) return &found->second;
  return absl::NotFoundError(absl::StrCat("no session ", session.ToString()));
}

absl::Status BlockDirectory::Impl::OpenSession(SessionId session, TenantId tenant, absl::Time now) {
  absl::StatusOr<TenantBlocks*> found = FindTenant(tenant);
  if (!found.ok()) return found.status();
  if (absl::Status status = ledger_.OpenSession(session, tenant); !status.ok()) return status;
  sessions_[session].tenant = *found;
  Grow(**found, false, now);
  Pump(now);
  return absl::OkStatus();
}

absl::Status BlockDirectory::Impl::CloseSession(SessionId id, absl::Time now) {
  absl::StatusOr<Session*> found = FindSession(id);
  if (!found.ok()) return found.status();
  Session& session = **found;
  while (!session.requests.empty()) {
    auto& [number, request] = *session.requests.begin();
    while (!request.waits.empty()) ForgetWait(*request.waits.begin());
    FinishRequest(id, session, number, {}, now);
  }
  for (const BlockKey& key : ledger_.WrittenBy(id)) {
    session.tenant->Unreserved(session.tenant->tree().Find(key));
  }
  MustSucceed(ledger_.CloseSession(id));
  sessions_.erase(id);
  Pump(now);
  return absl::OkStatus();
}

// One hash and a few comparisons a block: what else is wrong with identities makes no hit.
absl::Status BlockDirectory::Impl::CheckIdentities(
    const TenantBlocks& tenant, absl::Span<const BlockIdentity* const> ids) const {
  if (ids.size() > kMaxBlocks) {
    return absl::InvalidArgumentError(
        absl::StrCat(ids.size(), " blocks; expected at most ", kMaxBlocks));
  }
  absl::flat_hash_set<BlockKey> keys;
  keys.reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i]->tokens.empty() || ids[i]->tokens.size() > kMaxBlockTokens) {
      return absl::InvalidArgumentError(absl::StrCat("block ", i, " of ", ids[i]->tokens.size(),
                                                     " tokens; expected 1 to ", kMaxBlockTokens));
    }
    if (ids[i]->tenant != tenant.name()) {
      return absl::InvalidArgumentError(absl::StrCat("block ", i, " of tenant '", ids[i]->tenant,
                                                     "'; expected '", tenant.name(), "'"));
    }
    if (i > 0 && ids[i]->parent != ids[i - 1]->key) {
      return absl::InvalidArgumentError(
          absl::StrCat("the parent of block ", i, " is not block ", i - 1));
    }
    if (!keys.insert(ids[i]->key).second) {
      return absl::InvalidArgumentError(absl::StrCat("the key of block ", i, " comes twice"));
    }
  }
  return absl::OkStatus();
}

absl::Status BlockDirectory::Impl::CheckAcquire(const Session& session,
                                                const AcquireRequest& request,
                                                absl::Time now) const {
  if (request.request == 0 || request.held > request.ids.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("request ", request.request, " holds ", request.held, " of ",
                     request.ids.size(), " blocks; expected another number than 0 and no more"));
  }
  if (request.deadline > now + options_.longest_wait) {
    return absl::InvalidArgumentError(
        absl::StrCat("a wait of ", absl::FormatDuration(request.deadline - now),
                     "; expected at most ", absl::FormatDuration(options_.longest_wait)));
  }
  std::vector<const BlockIdentity*> ids;
  ids.reserve(request.ids.size());
  for (const BlockIdentity& id : request.ids) ids.push_back(&id);
  if (absl::Status status = CheckIdentities(*session.tenant, ids); !status.ok()) return status;
  if (!session.requests.contains(request.request) &&
      session.requests.size() >= options_.max_requests) {
    return absl::ResourceExhaustedError(
        absl::StrCat(session.requests.size(), " requests run; expected that some end first"));
  }
  if (request.deadline > now && session.waits >= options_.max_waits) {
    return absl::ResourceExhaustedError(
        absl::StrCat(session.waits, " calls wait; expected that some are answered first"));
  }
  return absl::OkStatus();
}

absl::StatusOr<AcquireReply> BlockDirectory::Impl::Acquire(SessionId id,
                                                           const AcquireRequest& request,
                                                           absl::Time now) {
  absl::StatusOr<Session*> found = FindSession(id);
  if (!found.ok()) return found.status();
  Session& session = **found;
  if (absl::Status status = CheckAcquire(session, request, now); !status.ok()) return status;
  TenantBlocks& tenant = *session.tenant;
  const auto [entry, begins] = session.requests.try_emplace(request.request);
  std::vector<BlockHandle> path;
  if (begins) {
    size_t known = 0;
    path = tenant.Name(request.ids, known);
    entry->second.id = tenant.Begin(request, path, known, now);
    entry->second.conversation = request.conversation;
    tenant.prefetcher().OnBegin(request.conversation, now);
    if (!path.empty()) SetTail(tenant, entry->second, path.back());
  } else {
    path = tenant.Find(request.ids);
  }
  const size_t held = std::min(request.held, path.size());
  Wait wait = {.session = id,
               .request = request.request,
               .tenant = &tenant,
               .held = request.held,
               .window = request.window};
  while (wait.kept < held && LiesSomewhere(tenant, path[wait.kept])) ++wait.kept;
  wait.path.assign(path.begin() + static_cast<ptrdiff_t>(held), path.end());
  wait.deadline = request.deadline;
  const auto ids = request.ids.subspan(held, wait.path.size());
  wait.ids = ids;
  const bool waits = request.deadline > now;
  wait.part = waits || request.promote ? LongestAnywhere(wait) : LongestReady(wait);
  PinPart(wait, false);
  const PathPart missing = {wait.next(), wait.part.end};
  if (request.promote || waits) {
    Promote(tenant, ids.subspan(missing.begin, missing.size()),
            absl::MakeConstSpan(wait.path).subspan(missing.begin, missing.size()),
            waits ? request.deadline : absl::InfiniteFuture(), now);
  }
  AcquireReply reply;
  if (waits && missing.size() > 0 && Coming(tenant, wait.path[missing.begin])) {
    reply.wait = AddWait(session, std::move(wait));
  } else {
    reply = Conclude(wait);
  }
  Pump(now);
  return reply;
}

bool BlockDirectory::Impl::LiesSomewhere(TenantBlocks& tenant, BlockHandle block) {
  const PlacedBlock& placed = tenant.At(block);
  return placed.arena != InArena::kNo || placed.HasCopy() || Coming(tenant, block);
}

std::vector<ArenaLedger::Acquired> BlockDirectory::Impl::Pin(SessionId session, Request& request,
                                                             absl::Span<const BlockIdentity> ids,
                                                             absl::Span<const BlockHandle> path,
                                                             bool waited) {
  absl::StatusOr<std::vector<ArenaLedger::Acquired>> acquired = ledger_.Acquire(session, ids);
  MustSucceed(acquired.status());
  TenantBlocks& tenant = *sessions_.at(session).tenant;
  for (size_t i = 0; i < acquired->size(); ++i) {
    const ArenaExtent& extent = (*acquired)[i].extent;
    tenant.Pinned(path[i], waited);
    Pins& pins = request.pins[PlaceOf(extent)];
    ++pins.count;
    pins.block = path[i];
    pins.extent = extent;
  }
  return *std::move(acquired);
}

void BlockDirectory::Impl::Unpin(SessionId session, Request& request, const ArenaExtent& extent,
                                 uint32_t count) {
  const auto held = request.pins.find(PlaceOf(extent));
  assert(held != request.pins.end() && held->second.count >= count);
  // One that was dropped is not ranked, or it is stored again somewhere else.
  const bool dropped = ledger_.At(extent)->dropped;
  TenantBlocks& tenant = *sessions_.at(session).tenant;
  for (uint32_t i = 0; i < count; ++i) {
    if (!dropped) tenant.Unpinned(held->second.block);
    MustSucceed(ledger_.Release(session, {held->second.extent}));
  }
  held->second.count -= count;
  if (held->second.count == 0) request.pins.erase(held);
}

absl::Status BlockDirectory::Impl::Release(SessionId id, uint64_t number,
                                           absl::Span<const ArenaExtent> extents, absl::Time now) {
  absl::StatusOr<Session*> found = FindSession(id);
  if (!found.ok()) return found.status();
  const auto request = (*found)->requests.find(number);
  if (request == (*found)->requests.end()) {
    return absl::FailedPreconditionError(absl::StrCat("request ", number, " does not run"));
  }
  absl::flat_hash_map<Place, uint32_t> released;
  for (const ArenaExtent& extent : extents) {
    const auto pins = request->second.pins.find(PlaceOf(extent));
    if (pins == request->second.pins.end() || pins->second.extent != extent ||
        ++released[PlaceOf(extent)] > pins->second.count) {
      return absl::FailedPreconditionError(
          absl::StrCat("chunk ", extent.chunk.ToString(), ", offset ", extent.offset.count(),
                       ": nothing that request ", number, " has acquired, or not so often"));
    }
  }
  for (const ArenaExtent& extent : extents) Unpin(id, request->second, extent, 1);
  Pump(now);
  return absl::OkStatus();
}

absl::Status BlockDirectory::Impl::EndRequest(SessionId id, const RequestEnding& ending,
                                              absl::Time now) {
  absl::StatusOr<Session*> found = FindSession(id);
  if (!found.ok()) return found.status();
  const auto request = (*found)->requests.find(ending.request);
  if (request == (*found)->requests.end()) return absl::OkStatus();
  if (ending.then.has_value()) {
    if (absl::Status status = CheckAction(*ending.then); !status.ok()) return status;
  }
  while (!request->second.waits.empty()) {
    const WaitId wait = *request->second.waits.begin();
    actions_.push_back(NoAnswer(wait));
    ForgetWait(wait);
  }
  const cache::ConversationId conversation = request->second.conversation;
  const BlockHandle tail = request->second.tail;

  TenantBlocks& tenant = *(*found)->tenant;
  const std::vector<BlockHandle> path =
      ending.then.has_value() ? tenant.tree().PathTo(tail) : std::vector<BlockHandle>();
  const cache::RequestEnd end = FinishRequest(id, **found, ending.request, ending, now);
  tenant.prefetcher().OnEnd(conversation, tail, end);
  if (ending.then.has_value()) Act(tenant, path, path, *ending.then, now);
  Pump(now);
  return absl::OkStatus();
}

cache::RequestEnd BlockDirectory::Impl::FinishRequest(SessionId id, Session& session,
                                                      uint64_t number, const RequestEnding& ending,
                                                      absl::Time now) {
  Request& request = session.requests.at(number);
  while (!request.pins.empty()) {
    const Pins pins = request.pins.begin()->second;
    Unpin(id, request, pins.extent, pins.count);
  }
  const cache::RequestEnd end = session.tenant->End(request.id, ending, now);
  SetTail(*session.tenant, request, kNoBlock);
  session.requests.erase(number);
  return end;
}

void BlockDirectory::Impl::SetTail(TenantBlocks& tenant, Request& request, BlockHandle block) {
  if (block != kNoBlock) tenant.tree().Retain(block);
  if (request.tail != kNoBlock) tenant.tree().Release(request.tail);
  request.tail = block;
}

// What the running request computes behind its path belongs to it; other new blocks are of nobody.
std::vector<BlockHandle> BlockDirectory::Impl::NameWritten(
    TenantBlocks& tenant, Request* request, absl::Span<const ArenaLedger::Wanted> wanted,
    absl::Time now) {
  std::vector<BlockHandle> path;
  std::vector<BlockHandle> strangers;
  BlockTree& tree = tenant.tree();
  BlockHandle parent = wanted.empty() ? kNoBlock : tree.Find(wanted[0].id.parent);
  for (const ArenaLedger::Wanted& block : wanted) {
    BlockHandle handle = tree.Find(block.id.key);
    const bool added = handle == kNoBlock;
    if (added) handle = tree.Add(block.id.key, parent);
    const bool behind = request != nullptr && request->tail == parent &&
                        tree.parent(handle) == parent && handle != parent && !tenant.Crowded();
    if (behind) {
      if (added) tenant.Extend(request->id, handle);
      SetTail(tenant, *request, handle);
    } else if (added) {
      if (!strangers.empty() && strangers.back() != parent) {
        tenant.NameStrangers(strangers, now);
        strangers.clear();
      }
      strangers.push_back(handle);
    }
    path.push_back(handle);
    parent = handle;
  }
  tenant.NameStrangers(strangers, now);
  return path;
}

absl::StatusOr<std::vector<Reserved>> BlockDirectory::Impl::Reserve(
    SessionId id, uint64_t number, absl::Span<const ArenaLedger::Wanted> wanted, absl::Time now) {
  absl::StatusOr<Session*> found = FindSession(id);
  if (!found.ok()) return found.status();
  TenantBlocks& tenant = *(*found)->tenant;
  std::vector<const BlockIdentity*> ids;
  for (const ArenaLedger::Wanted& block : wanted) {
    ids.push_back(&block.id);
    if (block.length < Bytes(1) || block.length > ledger_.chunk_bytes()) {
      return absl::InvalidArgumentError(absl::StrCat("a block of ", block.length.count(),
                                                     " bytes; expected 1 to ",
                                                     ledger_.chunk_bytes().count()));
    }
  }
  if (absl::Status status = CheckIdentities(tenant, ids); !status.ok()) return status;
  const auto request = (*found)->requests.find(number);
  const std::vector<BlockHandle> path = NameWritten(
      tenant, request == (*found)->requests.end() ? nullptr : &request->second, wanted, now);
  std::vector<Reserved> reserved;
  for (size_t i = 0; i < wanted.size(); ++i) {
    reserved.push_back(ReserveOne(id, tenant, wanted[i], path[i], now));
    const Reservation result = reserved.back().result;
    if (result != Reservation::kReserved && result != Reservation::kPresent) break;
  }
  Grow(tenant, !reserved.empty() && reserved.back().result == Reservation::kNoRoom, now);
  Pump(now);
  return reserved;
}

Reserved BlockDirectory::Impl::ReserveOne(SessionId session, TenantBlocks& tenant,
                                          const ArenaLedger::Wanted& wanted, BlockHandle block,
                                          absl::Time now) {
  TierAccount& account = tenant.account(kArenaTier);
  const PlacedBlock& placed = tenant.At(block);
  if (placed.id != nullptr && *placed.id != wanted.id) {
    account.Refuse(Refusal::kCollision);
    return {.result = Reservation::kCollision};
  }
  if (!ledger_.Find(tenant.id(), wanted.id.key).has_value()) {
    const Reservation room = MakeRoom(tenant, block, wanted.length, true, now);
    if (room != Reservation::kReserved) {
      account.Refuse(room == Reservation::kUnwanted ? Refusal::kWorthless : Refusal::kNoRoom);
      return {.result = room};
    }
  }
  const auto reserved = ledger_.Reserve(session, {wanted});
  MustSucceed(reserved.status());
  switch (reserved->front().result) {
    case ArenaLedger::Reservation::kReserved:
      tenant.Reserved(block, wanted.length);
      return {.result = Reservation::kReserved, .extent = reserved->front().extent};
    case ArenaLedger::Reservation::kPresent:
      return {.result = Reservation::kPresent};
    case ArenaLedger::Reservation::kCollision:
      account.Refuse(Refusal::kCollision);
      return {.result = Reservation::kCollision};
    case ArenaLedger::Reservation::kNoRoom:
      break;
  }
  account.Refuse(Refusal::kNoRoom);
  return {.result = Reservation::kNoRoom};
}

absl::Status BlockDirectory::Impl::Commit(SessionId id,
                                          absl::Span<const ArenaLedger::Committed> blocks,
                                          absl::Time now) {
  absl::StatusOr<Session*> found = FindSession(id);
  if (!found.ok()) return found.status();
  if (absl::Status status = ledger_.Commit(id, blocks); !status.ok()) return status;
  TenantBlocks& tenant = *(*found)->tenant;
  for (const ArenaLedger::Committed& committed : blocks) {
    const BlockHandle block = tenant.tree().Find(committed.key);
    if (tenant.At(block).doomed) {
      tenant.Unreserved(block);
      ledger_.Drop(tenant.id(), committed.key);
    } else {
      tenant.Committed(block, kArenaTier);
    }
  }
  Pump(now);
  return absl::OkStatus();
}

absl::Status BlockDirectory::Impl::Abort(SessionId id, absl::Span<const BlockKey> keys,
                                         absl::Time now) {
  absl::StatusOr<Session*> found = FindSession(id);
  if (!found.ok()) return found.status();
  TenantBlocks& tenant = *(*found)->tenant;
  for (const BlockKey& key : keys) {
    const std::optional<ArenaLedger::Found> block = ledger_.Find(tenant.id(), key);
    if (!block.has_value() || block->ready || block->writer != id) continue;
    MustSucceed(ledger_.Abort(id, {key}));
    tenant.Unreserved(tenant.tree().Find(key));
  }
  Pump(now);
  return absl::OkStatus();
}

}  // namespace palimpsest::blocks
