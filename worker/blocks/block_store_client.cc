#include "worker/blocks/block_store_client.h"

#include <algorithm>
#include <cmath>
#include <utility>

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
  PALIMPSEST_CHECK(stopping_);
}

void BlockStoreClient::Shutdown() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    session_ = nullptr;
  }
  calls_.Cancel();
  chunk_tasks_.Stop();
  calls_.Shutdown();
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
    Push(AcquireAnswer{.call = call, .status = status});
  }
}

void BlockStoreClient::Reserve(StoreCallId call, uint64_t request, BlockChain chain) {
  SessionPtr session = this->session();
  if (session == nullptr) return Fail(call, true, NoStore());
  Answer answer{.session = session, .call = call, .reserve = true};
  for (const BlockKey& key : chain.keys) answer.blocks.push_back({.key = key});
  calls_.Start<v1::ReserveRequest, v1::ReserveResponse>(
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
  calls_.Start<v1::AcquireRequest, v1::AcquireResponse>(
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
  answer.first = CountOf(response.first_block());
  answer.kept = CountOf(response.kept_blocks());
  Settle(std::move(answer));
}

void BlockStoreClient::SendAfterCommits(std::function<void(const SessionPtr&)> send) {
  SessionPtr session;
  {
    MutexLock lock(&mu_);
    session = session_;
    if (session == nullptr) return;
    if (!commits_.empty()) {
      behind_commits_.emplace_back(last_commit_, std::move(send));
      return;
    }
  }
  send(session);
}

void BlockStoreClient::OnCommitted(uint64_t commit) {
  std::vector<std::function<void(const SessionPtr&)>> due;
  SessionPtr session;
  {
    MutexLock lock(&mu_);
    commits_.erase(commit);
    session = session_;
    std::erase_if(behind_commits_, [&](const auto& waiting) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      if (!commits_.empty() && *commits_.begin() <= waiting.first) return false;
      due.push_back(waiting.second);
      return true;
    });
  }
  if (session == nullptr) return;
  for (const auto& send : due) send(session);
}

void BlockStoreClient::EndRequest(const StoreRequestEnd& end) {
  SendAfterCommits([this, end](const SessionPtr& session) {
    calls_.Start<v1::EndRequestRequest, v1::EndRequestResponse>(
        session, EndMessage(end), options_.call_timeout,
        [](auto& stub, auto* context, auto* request, auto* response, auto done) {
          stub.async()->EndRequest(context, request, response, std::move(done));
        },
        [](const absl::Status&, const v1::EndRequestResponse&) {});
  });
}

void BlockStoreClient::Demote(const BlockChain& chain, int32_t first) {
  v1::HintRequest message = DemoteMessage(chain, first, options_.block_tokens);
  SendAfterCommits([this, message = std::move(message)](const SessionPtr& session) {
    calls_.Start<v1::HintRequest, v1::HintResponse>(
        session, message, options_.call_timeout,
        [](auto& stub, auto* context, auto* request, auto* response, auto done) {
          stub.async()->Hint(context, request, response, std::move(done));
        },
        [](const absl::Status&, const v1::HintResponse&) {});
  });
}

void BlockStoreClient::Hint(uint64_t conversation, const CacheAction& action,
                            std::function<void(absl::StatusOr<uint64_t>)> done) {
  const SessionPtr session = this->session();
  if (session == nullptr) return done(NoStore());
  v1::HintRequest request;
  request.set_conversation_id(conversation);
  SetAction(action, *request.mutable_action());
  calls_.Start<v1::HintRequest, v1::HintResponse>(
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
  calls_.Start<v1::SetRecomputeRequest, v1::SetRecomputeResponse>(
      session, std::move(request), options_.call_timeout,
      [](auto& stub, auto* context, auto* request, auto* response, auto done) {
        stub.async()->SetRecompute(context, request, response, std::move(done));
      },
      [](const absl::Status&, const v1::SetRecomputeResponse&) {});
}

void BlockStoreClient::OnSession(const ArenaSession& session) {
  Log(LogLevel::kInfo,
      session.block_token.empty() ? "the broker has no tiers for KV blocks"
                                  : "KV blocks go to the broker's tiers",
      {{"session", session.session}});
  if (session.block_token.empty()) return;
  SessionPtr next = calls_.Open(options_.address, session);
  MutexLock lock(&mu_);
  if (stopping_ || session.epoch < sessions_over_) return;
  session_ = std::move(next);
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
    map_.Reset(gone);
    mapping_.clear();
    unwanted_.clear();
    commits_.clear();
    behind_commits_.clear();
    lost = std::exchange(unsettled_, {});
    events_.push_back(StoreLost{});
  }
  calls_.Cancel();
  Discard(std::move(gone), epoch, {});
  for (const Answer& answer : lost) Fail(answer.call, answer.reserve, NoStore());
  Wake();
}

}  // namespace palimpsest
