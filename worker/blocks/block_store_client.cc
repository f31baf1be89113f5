#include "worker/blocks/block_store_client.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/grpc_keepalive.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "common/log.h"
#include "common/monotonic_time.h"
#include "worker/blocks/block_store_messages.h"
#include "worker/core/check.h"

namespace palimpsest {
namespace {

// Weight of the newest in the smoothed time of an answer.
constexpr double kNewest = 0.1;
// A change by less is not worth a message.
constexpr double kSameCost = 0.1;

absl::Status NoStore() {
  return absl::UnavailableError("the broker has no block store, or is not connected");
}

bool Differs(double a, double b) { return std::abs(a - b) > kSameCost * std::max(a, b); }

}  // namespace

BlockStoreClient::BlockStoreClient(const Options& options, ArenaLink* link)
    : options_(options), link_(link), map_(options.block_bytes) {}

BlockStoreClient::~BlockStoreClient() {
  MutexLock lock(&mu_);
  PALIMPSEST_CHECK(stopping_ && open_calls_ == 0);
}

void BlockStoreClient::Shutdown() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    session_ = nullptr;
    for (grpc::ClientContext* call : calls_) call->TryCancel();
  }
  chunk_tasks_.Stop();
  MutexLock lock(&mu_);
  while (open_calls_ > 0) changed_.Wait(&mu_);
}

template <typename Request, typename Response>
void BlockStoreClient::Start(const SessionPtr& session, Request request, absl::Duration timeout,
                             void (*start)(v1::BlockStore::Stub&, grpc::ClientContext*,
                                           const Request*, Response*,
                                           std::function<void(grpc::Status)>),
                             std::function<void(const absl::Status&, const Response&)> done) {
  struct Call {
    grpc::ClientContext context;
    SessionPtr session;
    Request request;
    Response response;
  };
  auto call = std::make_shared<Call>();
  call->session = session;
  call->request = std::move(request);
  *call->request.mutable_session() = call->session->proof;
  call->context.set_deadline(GrpcTimeout(timeout));
  {
    MutexLock lock(&mu_);
    calls_.insert(&call->context);
    ++open_calls_;
    if (stopping_) call->context.TryCancel();
  }
  Call& started = *call;
  start(*started.session->stub, &started.context, &started.request, &started.response,
        [this, call = std::move(call), done = std::move(done)](const grpc::Status& status) mutable {
          done(FromGrpcStatus(status), call->response);
          {
            MutexLock lock(&mu_);
            calls_.erase(&call->context);
          }
          // What they hold of the channel goes before whoever waits for this call.
          done = nullptr;
          call.reset();
          MutexLock lock(&mu_);
          --open_calls_;
          changed_.SignalAll();
        });
}

BlockStoreClient::SessionPtr BlockStoreClient::session() const {
  MutexLock lock(&mu_);
  return session_;
}

bool BlockStoreClient::available() const { return session() != nullptr; }

double BlockStoreClient::answer_seconds() const {
  MutexLock lock(&mu_);
  return answer_seconds_;
}

void BlockStoreClient::Wake() {
  std::function<void()> wakeup;
  {
    MutexLock lock(&mu_);
    wakeup = wakeup_;
    ++waking_;
  }
  if (wakeup) wakeup();
  MutexLock lock(&mu_);
  --waking_;
  changed_.SignalAll();
}

void BlockStoreClient::Push(StoreEvent event) {
  {
    MutexLock lock(&mu_);
    events_.push_back(std::move(event));
  }
  Wake();
}

std::vector<StoreEvent> BlockStoreClient::TakeEvents() {
  MutexLock lock(&mu_);
  return std::exchange(events_, {});
}

void BlockStoreClient::SetWakeup(std::function<void()> wakeup) {
  MutexLock lock(&mu_);
  wakeup_ = std::move(wakeup);
  while (waking_ > 0) changed_.Wait(&mu_);
}

void BlockStoreClient::Fail(StoreCallId call, bool reserve, const absl::Status& status) {
  if (reserve) {
    Push(ReserveAnswer{call, status, {}});
  } else {
    Push(AcquireAnswer{call, status, {}, {}});
  }
}

void BlockStoreClient::Reserve(StoreCallId call, uint64_t request, BlockChain chain) {
  SessionPtr session = this->session();
  if (session == nullptr) return Fail(call, true, NoStore());
  Answer answer{.session = session, .call = call, .reserve = true};
  for (const BlockKey& key : chain.keys) answer.blocks.push_back({.key = key});
  Start<v1::ReserveRequest, v1::ReserveResponse>(
      session, ReserveMessage(request, chain, options_.block_tokens, options_.block_bytes),
      options_.call_timeout,
      [](auto& stub, auto* context, auto* request, auto* response, auto done) {
        stub.async()->Reserve(context, request, response, std::move(done));
      },
      [this, answer = std::move(answer)](const absl::Status& status,
                                         const v1::ReserveResponse& response) {
        if (status.ok()) return OnReserved(answer, response);
        // The broker may have reserved them all the same.
        v1::AbortRequest abort;
        for (const Named& block : answer.blocks) SetKey(block.key, *abort.add_keys());
        GiveBack(answer.session, std::move(abort), {}, options_.give_back_attempts);
        Fail(answer.call, true, status);
      });
}

void BlockStoreClient::OnReserved(Answer answer, const v1::ReserveResponse& response) {
  const size_t count =
      std::min<size_t>(answer.blocks.size(), static_cast<size_t>(response.blocks_size()));
  answer.blocks.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const v1::ReservedBlock& block = response.blocks(static_cast<int>(i));
    answer.blocks[i].result = ResultOf(block.result());
    answer.blocks[i].extent = ExtentOf(block.extent());
  }
  Settle(std::move(answer));
}

void BlockStoreClient::Acquire(StoreCallId call, StoreQuery query) {
  SessionPtr session = this->session();
  if (session == nullptr) return Fail(call, false, NoStore());
  Answer answer{.session = session, .call = call, .request = query.request};
  const absl::Duration timeout = query.wait + options_.call_timeout;
  const bool timed = query.wait <= absl::ZeroDuration();
  Start<v1::AcquireRequest, v1::AcquireResponse>(
      session, AcquireMessage(query, options_.block_tokens), timeout,
      [](auto& stub, auto* context, auto* request, auto* response, auto done) {
        stub.async()->Acquire(context, request, response, std::move(done));
      },
      [this, answer = std::move(answer), timed, begin = MonotonicNow()](
          const absl::Status& status, const v1::AcquireResponse& response) {
        if (!status.ok()) return Fail(answer.call, false, status);
        if (timed) {
          const double took = absl::ToDoubleSeconds(MonotonicNow() - begin);
          MutexLock lock(&mu_);
          answer_seconds_ =
              answer_seconds_ == 0 ? took : answer_seconds_ + kNewest * (took - answer_seconds_);
        }
        OnAcquired(answer, response);
      });
}

void BlockStoreClient::OnAcquired(Answer answer, const v1::AcquireResponse& response) {
  for (const v1::PinnedBlock& block : response.blocks()) {
    answer.blocks.push_back({.extent = ExtentOf(block.extent()), .checksum = block.checksum()});
  }
  answer.lower = LowerOf(response);
  Settle(std::move(answer));
}

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
  AcquireAnswer acquired{answer.call, {}, {}, std::move(answer.lower)};
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
  Start<v1::MapChunksRequest, v1::MapChunksResponse>(
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
  Start<Request, Response>(
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
  Start<v1::CommitRequest, v1::CommitResponse>(
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

void BlockStoreClient::EndRequest(const StoreRequestEnd& end) {
  SessionPtr session;
  {
    MutexLock lock(&mu_);
    session = session_;
    if (session == nullptr) return;
    if (!commits_.empty()) {
      ends_.emplace_back(last_commit_, end);
      return;
    }
  }
  SendEnd(session, end);
}

void BlockStoreClient::OnCommitted(uint64_t commit) {
  std::vector<StoreRequestEnd> due;
  SessionPtr session;
  {
    MutexLock lock(&mu_);
    commits_.erase(commit);
    session = session_;
    std::erase_if(ends_, [&](const auto& waiting) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      if (!commits_.empty() && *commits_.begin() <= waiting.first) return false;
      due.push_back(waiting.second);
      return true;
    });
  }
  if (session == nullptr) return;
  for (const StoreRequestEnd& end : due) SendEnd(session, end);
}

void BlockStoreClient::SendEnd(const SessionPtr& session, const StoreRequestEnd& end) {
  Start<v1::EndRequestRequest, v1::EndRequestResponse>(
      session, EndMessage(end), options_.call_timeout,
      [](auto& stub, auto* context, auto* request, auto* response, auto done) {
        stub.async()->EndRequest(context, request, response, std::move(done));
      },
      [](const absl::Status&, const v1::EndRequestResponse&) {});
}

void BlockStoreClient::Hint(uint64_t conversation, const CacheAction& action,
                            std::function<void(absl::StatusOr<uint64_t>)> done) {
  const SessionPtr session = this->session();
  if (session == nullptr) return done(NoStore());
  v1::HintRequest request;
  request.set_conversation_id(conversation);
  SetAction(action, *request.mutable_action());
  Start<v1::HintRequest, v1::HintResponse>(
      session, std::move(request), options_.call_timeout,
      [](auto& stub, auto* context, auto* request, auto* response, auto answered) {
        stub.async()->Hint(context, request, response, std::move(answered));
      },
      [done = std::move(done)](const absl::Status& status, const v1::HintResponse& response) {
        if (status.ok()) return done(response.blocks());
        done(status);
      });
}

void BlockStoreClient::SetRecompute(double first_seconds, double per_position_seconds) {
  SessionPtr session;
  {
    MutexLock lock(&mu_);
    if (session_ == nullptr || (!Differs(first_seconds, told_first_seconds_) &&
                                !Differs(per_position_seconds, told_per_position_seconds_))) {
      return;
    }
    session = session_;
    told_first_seconds_ = first_seconds;
    told_per_position_seconds_ = per_position_seconds;
  }
  v1::SetRecomputeRequest request;
  request.set_first_seconds(first_seconds);
  request.set_per_position_seconds(per_position_seconds);
  Start<v1::SetRecomputeRequest, v1::SetRecomputeResponse>(
      session, std::move(request), options_.call_timeout,
      [](auto& stub, auto* context, auto* request, auto* response, auto done) {
        stub.async()->SetRecompute(context, request, response, std::move(done));
      },
      [](const absl::Status&, const v1::SetRecomputeResponse&) {});
}

void BlockStoreClient::OnSession(const ArenaSession& session) {
  auto next = std::make_shared<Session>();
  next->epoch = session.epoch;
  next->proof.set_session_id(session.session.value());
  next->proof.set_block_token(session.block_token);
  grpc::ChannelArguments arguments;
  // A connection of its own, whose state is not that of an earlier broker's.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  Keepalive(arguments);
  next->stub = v1::BlockStore::NewStub(
      grpc::CreateCustomChannel(options_.address, grpc::InsecureChannelCredentials(), arguments));
  Log(LogLevel::kInfo,
      session.block_token.empty() ? "the broker has no tiers for KV blocks"
                                  : "KV blocks go to the broker's tiers",
      {{"session", session.session}});
  std::vector<SessionPtr> unused;
  MutexLock lock(&mu_);
  if (stopping_ || session.block_token.empty() || session.epoch < sessions_over_) return;
  const auto idle = std::stable_partition(sessions_.begin(), sessions_.end(),
                                          [](const SessionPtr& s) { return s.use_count() > 1; });
  std::move(idle, sessions_.end(), std::back_inserter(unused));
  sessions_.erase(idle, sessions_.end());
  session_ = std::move(next);
  sessions_.push_back(session_);
  told_first_seconds_ = told_per_position_seconds_ = 0;
}

void BlockStoreClient::OnSessionLost(uint64_t epoch) {
  ArenaMap::Gone gone;
  std::vector<Answer> lost;
  {
    MutexLock lock(&mu_);
    sessions_over_ = std::max(sessions_over_, epoch + 1);
    if (session_ == nullptr || session_->epoch > epoch) return;
    session_ = nullptr;
    for (grpc::ClientContext* call : calls_) call->TryCancel();
    map_.Reset(gone);
    mapping_.clear();
    unwanted_.clear();
    commits_.clear();
    ends_.clear();
    lost = std::exchange(unsettled_, {});
    events_.push_back(StoreLost{});
  }
  Discard(std::move(gone), epoch, {});
  for (const Answer& answer : lost) Fail(answer.call, answer.reserve, NoStore());
  Wake();
}

}  // namespace palimpsest
