// The part of BlockStoreClient that passes on the places that answers name, and gives them back.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "common/log.h"
#include "worker/blocks/block_store_client.h"
#include "worker/blocks/block_store_messages.h"

namespace palimpsest {

void BlockStoreClient::Settle(Answer answer) {
  std::vector<uint32_t> missing;
  bool waits = false;
  std::optional<Answer> settled;
  const SessionPtr session = answer.session;
  {
    MutexLock lock(&mu_);
    // Of a session that is over nothing comes; PassOn gives up what was named.
    if (session_ == session) {
      for (const Named& block : answer.blocks) {
        const uint32_t chunk = block.extent.chunk;
        if (block.result != ReservedBlock::Result::kReserved || map_.mapped(chunk)) continue;
        waits = true;
        if (mapping_.emplace(chunk, Bytes(0)).second) missing.push_back(chunk);
      }
    }
    if (waits) {
      unsettled_.push_back(std::move(answer));
    } else {
      settled = std::move(answer);
    }
  }
  for (const uint32_t chunk : missing) MapChunk(session, chunk);
  if (settled.has_value()) PassOn(*std::move(settled));
}

void BlockStoreClient::PassOn(Answer answer) {
  ReserveAnswer reserved{answer.call, {}, {}};
  AcquireAnswer acquired{.call = answer.call,
                         .first = answer.first,
                         .lower = std::move(answer.lower),
                         .kept = answer.kept};
  v1::ReleaseRequest release;
  release.set_request_id(answer.request);
  v1::AbortRequest abort;
  Given given;
  {
    MutexLock lock(&mu_);
    bool given_up = session_ != answer.session;
    for (const Named& block : answer.blocks) {
      const bool named = block.result == ReservedBlock::Result::kReserved;
      absl::StatusOr<StorePlace> place = StorePlace();
      if (named && !given_up) place = map_.Hold(block.extent, answer.request);
      if (!place.ok()) {
        Log(LogLevel::kDebug, "a block's place is given up unread", {{"status", place.status()}});
        given_up = true;
        acquired.lower.clear();
      }
      if (!given_up) {
        reserved.blocks.push_back({block.result, *place});
        acquired.blocks.push_back({*place, block.checksum});
      } else if (named) {
        given.chunks.push_back(block.extent.chunk);
        SetExtent(block.extent, *release.add_extents());
        SetKey(block.key, *abort.add_keys());
      }
    }
    if (answer.reserve) {
      events_.push_back(std::move(reserved));
    } else {
      events_.push_back(std::move(acquired));
    }
  }
  std::sort(given.chunks.begin(), given.chunks.end());
  given.chunks.erase(std::unique(given.chunks.begin(), given.chunks.end()), given.chunks.end());
  if (given.chunks.empty()) {
    // Nothing is given up.
  } else if (answer.reserve) {
    GiveBack(answer.session, std::move(abort), std::move(given), options_.give_back_attempts);
  } else {
    GiveBack(answer.session, std::move(release), std::move(given), options_.give_back_attempts);
  }
  Wake();
}

void BlockStoreClient::MapChunk(const SessionPtr& session, uint32_t chunk) {
  v1::MapChunksRequest request;
  request.add_chunk_ids(chunk);
  calls_.Start<v1::MapChunksRequest, v1::MapChunksResponse>(
      session, std::move(request), options_.call_timeout,
      [](auto& stub, auto* context, auto* request, auto* response, auto done) {
        stub.async()->MapChunks(context, request, response, std::move(done));
      },
      [this, session, chunk](const absl::Status& status, const v1::MapChunksResponse& response) {
        OnMapOffered(session, chunk, status, response);
      });
}

template <typename Request>
void BlockStoreClient::GiveBack(SessionPtr session, Request request, Given given, int attempts) {
  using Response = std::conditional_t<std::is_same_v<Request, v1::AbortRequest>, v1::AbortResponse,
                                      v1::ReleaseResponse>;
  SessionPtr of = session;
  Request copy = request;
  calls_.Start<Request, Response>(
      std::move(of), std::move(copy), options_.call_timeout,
      [](auto& stub, auto* context, auto* request, auto* response, auto done) {
        if constexpr (std::is_same_v<Request, v1::AbortRequest>) {
          stub.async()->Abort(context, request, response, std::move(done));
        } else {
          stub.async()->Release(context, request, response, std::move(done));
        }
      },
      [=, this](const absl::Status& status, const Response&) {
        const bool again = absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
        if (again && attempts > 1 && this->session() == session) {
          return GiveBack(session, request, given, attempts - 1);
        }
        if (!status.ok()) {
          Log(LogLevel::kDebug, "places that were given back were not held", {{"status", status}});
        }
        Drop(given);
      });
}

void BlockStoreClient::Release(std::vector<StorePlace> places) {
  // By request.
  absl::flat_hash_map<uint64_t, std::pair<v1::ReleaseRequest, std::vector<uint64_t>>> requests;
  std::vector<uint64_t> stale;
  SessionPtr session;
  {
    MutexLock lock(&mu_);
    session = session_;
    for (const StorePlace& place : places) {
      const auto held = map_.Find(place.id);
      if (session == nullptr || !held.has_value()) {
        stale.push_back(place.id);
        continue;
      }
      auto& [request, ids] = requests[held->request];
      request.set_request_id(held->request);
      SetExtent(held->extent, *request.add_extents());
      ids.push_back(place.id);
    }
  }
  Drop({.places = std::move(stale)});
  for (auto& [id, one] : requests) {
    GiveBack(session, std::move(one.first), Given{.places = std::move(one.second)},
             options_.give_back_attempts);
  }
}

void BlockStoreClient::Abort(std::vector<WrittenBlock> blocks) {
  v1::AbortRequest request;
  const auto [session, places] =
      Split(blocks, [&](const WrittenBlock& block) { SetKey(block.key, *request.add_keys()); });
  if (places.empty()) return;
  GiveBack(session, std::move(request), Given{.places = places}, options_.give_back_attempts);
}

void BlockStoreClient::Commit(std::vector<WrittenBlock> blocks) {
  v1::CommitRequest request;
  v1::AbortRequest abort;
  auto [session, places] = Split(blocks, [&](const WrittenBlock& block) {
    v1::CommittedBlock& committed = *request.add_blocks();
    SetKey(block.key, *committed.mutable_key());
    committed.set_checksum(block.checksum);
    SetKey(block.key, *abort.add_keys());
  });
  if (places.empty()) return;
  uint64_t number;
  {
    MutexLock lock(&mu_);
    number = ++last_commit_;
    commits_.insert(number);
  }
  SessionPtr of = session;
  calls_.Start<v1::CommitRequest, v1::CommitResponse>(
      of, std::move(request), options_.call_timeout,
      [](auto& stub, auto* context, auto* request, auto* response, auto done) {
        stub.async()->Commit(context, request, response, std::move(done));
      },
      [this, number, session = std::move(session), places = std::move(places),
       abort = std::move(abort)](const absl::Status& status, const v1::CommitResponse&) {
        OnCommitted(number);
        if (status.ok()) return Drop({.places = places});
        // What was committed all the same stays so.
        Log(LogLevel::kWarning, "blocks could not be committed", {{"status", status}});
        GiveBack(session, abort, Given{.places = places}, options_.give_back_attempts);
      });
}

std::pair<BlockStoreClient::SessionPtr, std::vector<uint64_t>> BlockStoreClient::Split(
    const std::vector<WrittenBlock>& blocks, const std::function<void(const WrittenBlock&)>& add) {
  std::vector<uint64_t> places, stale;
  SessionPtr session;
  {
    MutexLock lock(&mu_);
    session = session_;
    for (const WrittenBlock& block : blocks) {
      const bool current = session != nullptr && map_.Find(block.place.id).has_value();
      (current ? places : stale).push_back(block.place.id);
      if (current) add(block);
    }
  }
  Drop({.places = std::move(stale)});
  return {std::move(session), std::move(places)};
}

}  // namespace palimpsest
