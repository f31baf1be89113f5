#include "broker/tier/remote/remote_backend.h"

#include <algorithm>
#include <cassert>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "broker/tier/aligned_buffer.h"
#include "broker/tier/remote/remote_wire.h"
#include "broker/tier/remote/ucx_node.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"

namespace palimpsest {
namespace {

constexpr absl::Duration kLongestNap = absl::Seconds(1);

// What the owner may say of an operation; anything else is a failure of the tier.
absl::Status ToStatus(const RemoteReply& reply) {
  switch (reply.code) {
    case absl::StatusCode::kOk:
      return absl::OkStatus();
    case absl::StatusCode::kNotFound:
      return absl::NotFoundError("the peer has no such block");
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kDataLoss:
      return absl::Status(reply.code, absl::StrCat("the peer says: ", reply.text));
    default:
      return absl::UnavailableError(absl::StrCat("the peer refused: ", reply.text));
  }
}

}  // namespace

class RemoteBackend::Core : public UcxNode::Handler {
 public:
  using Link = UcxNode::Link;
  using Finish = absl::AnyInvocable<void(absl::Status, TierPlace)>;

  struct Operation {
    RemoteRequest request;
    uint64_t checksum = 0;  // of the block that a kLoad is for
    absl::Span<const std::byte> from;
    absl::Span<std::byte> to;
    Finish finish;
    absl::Time deadline;
    int under_way = 0;  // of UCX's operations
    bool answered = false;
    absl::Status status;
    TierPlace place;
  };

  explicit Core(const Options& options) : options_(options) {}
  ~Core() override { Stop(); }

  absl::Status Start();
  void Stop();
  void Enqueue(Operation operation);

  bool OnAccepted(Link*) override { return false; }
  void OnMessage(Link* link, absl::string_view header, const UcxNode::Payload& payload) override;
  void OnClosed(Link* link, const absl::Status& why) override;

 private:
  using Operations = std::map<uint64_t, Operation>;

  // Of the thread alone.
  void Run();
  bool TakeEnqueued();
  void Begin(Operation operation);
  void Ended(uint64_t id, const absl::Status& status);
  void TakeBlock(Operations::iterator operation, const RemoteReply& reply,
                 const UcxNode::Payload& payload);
  void EndIfDone(Operations::iterator operation);
  void Break(absl::Status why);
  static void Fail(Operation& operation, absl::string_view why);
  void BreakIfLate(absl::Time now);
  absl::Time NextDeadline() const;

  const Options options_;
  std::unique_ptr<UcxNode> node_;
  std::thread thread_;

  Mutex mutex_;
  std::vector<Operation> enqueued_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  Link* link_ = nullptr;
  bool breaking_ = false;
  uint64_t last_id_ = 0;
  Operations operations_;
  std::set<std::pair<absl::Time, uint64_t>> deadlines_;
};

absl::Status RemoteBackend::Core::Start() {
  absl::StatusOr<std::unique_ptr<UcxNode>> node = UcxNode::Make(options_.transports, this);
  if (!node.ok()) return node.status();
  node_ = *std::move(node);
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

void RemoteBackend::Core::Stop() {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  node_->Wake();
  thread_.join();
  node_.reset();
}

void RemoteBackend::Core::Enqueue(Operation operation) {
  operation.deadline = MonotonicNow() + options_.timeout;
  {
    MutexLock lock(&mutex_);
    assert(!stopping_);
    enqueued_.push_back(std::move(operation));
  }
  node_->Wake();
}

void RemoteBackend::Core::Run() {
  while (TakeEnqueued() || !operations_.empty()) {
    node_->RunOnce(NextDeadline());
    BreakIfLate(MonotonicNow());
  }
}

// Whether there may be more.
bool RemoteBackend::Core::TakeEnqueued() {
  std::vector<Operation> taken;
  bool more = false;
  {
    MutexLock lock(&mutex_);
    taken.swap(enqueued_);
    more = !stopping_;
  }
  for (Operation& operation : taken) Begin(std::move(operation));
  return more;
}

absl::Time RemoteBackend::Core::NextDeadline() const {
  const absl::Time nap_over = MonotonicNow() + kLongestNap;
  return deadlines_.empty() ? nap_over : std::min(deadlines_.begin()->first, nap_over);
}

void RemoteBackend::Core::Begin(Operation operation) {
  if (breaking_) {
    Fail(operation, "the connection to the peer is being given up");
    return;
  }
  if (link_ == nullptr) {
    const absl::StatusOr<Link*> link = node_->Connect(options_.peer);
    if (!link.ok()) {
      Fail(operation, link.status().message());
      return;
    }
    link_ = *link;
  }
  const uint64_t id = ++last_id_;
  operation.request.id = id;
  operation.under_way = 1;
  deadlines_.insert({operation.deadline, id});
  const Operation& begun = operations_.emplace(id, std::move(operation)).first->second;
  node_->Send(link_, EncodeRequest(begun.request), begun.from,
              [this, id](const absl::Status& status) { Ended(id, status); });
}

void RemoteBackend::Core::Ended(uint64_t id, const absl::Status& status) {
  const auto operation = operations_.find(id);
  --operation->second.under_way;
  if (!status.ok()) Break(status);
  EndIfDone(operation);
}

void RemoteBackend::Core::EndIfDone(Operations::iterator operation) {
  if (operation->second.under_way > 0 || !operation->second.answered || breaking_) return;
  Operation ended = std::move(operation->second);
  deadlines_.erase({ended.deadline, operation->first});
  operations_.erase(operation);
  ended.finish(std::move(ended.status), ended.place);
}

void RemoteBackend::Core::OnMessage(Link*, absl::string_view header,
                                    const UcxNode::Payload& payload) {
  const absl::StatusOr<RemoteReply> reply = DecodeReply(header);
  if (!reply.ok()) return Break(reply.status());
  const auto operation = operations_.find(reply->id);
  if (operation == operations_.end() || operation->second.answered) {
    return Break(absl::InvalidArgumentError("the peer answers what was not asked"));
  }
  ++operation->second.under_way;  // until the end of this function
  operation->second.answered = true;
  operation->second.status = ToStatus(*reply);
  operation->second.place = TierPlace(reply->place);
  if (operation->second.request.kind == RemoteRequest::Kind::kLoad &&
      operation->second.status.ok()) {
    TakeBlock(operation, *reply, payload);
  }
  Ended(reply->id, absl::OkStatus());
}

void RemoteBackend::Core::TakeBlock(Operations::iterator operation, const RemoteReply& reply,
                                    const UcxNode::Payload& payload) {
  Operation& load = operation->second;
  if (reply.length != load.request.length || reply.checksum != load.checksum ||
      payload.size != load.to.size()) {
    load.status = absl::DataLossError(
        absl::StrCat("the peer has another block at this place: ", payload.size,
                     " bytes for one of ", load.to.size(), ", or with another checksum"));
    return;
  }
  ++load.under_way;
  node_->Receive(link_, payload, load.to,
                 [this, id = operation->first](const absl::Status& status) { Ended(id, status); });
}

void RemoteBackend::Core::Break(absl::Status why) {
  if (breaking_ || link_ == nullptr) return;
  breaking_ = true;
  node_->Close(link_, std::move(why));
}

void RemoteBackend::Core::BreakIfLate(absl::Time now) {
  if (deadlines_.empty() || deadlines_.begin()->first > now) return;
  Break(absl::DeadlineExceededError(
      absl::StrCat("the peer did not answer within ", absl::FormatDuration(options_.timeout))));
}

void RemoteBackend::Core::OnClosed(Link* link, const absl::Status& why) {
  assert(link == link_);
  (void)link;
  link_ = nullptr;
  breaking_ = false;
  deadlines_.clear();
  Operations failed = std::exchange(operations_, {});
  for (auto& [id, operation] : failed) {
    assert(operation.under_way == 0);
    Fail(operation, why.message());
  }
}

// A block does not outlive the connection over which it was stored, so that one to be removed is
// gone.
void RemoteBackend::Core::Fail(Operation& operation, absl::string_view why) {
  const bool removal = operation.request.kind == RemoteRequest::Kind::kRemove;
  operation.finish(removal ? absl::NotFoundError(why) : absl::UnavailableError(why), {});
}

RemoteBackend::RemoteBackend(const Options& options) : options_(options) {}
RemoteBackend::~RemoteBackend() = default;

Bytes RemoteBackend::Footprint(Bytes length) const { return RoundUp(length, kIoUnit); }

absl::StatusOr<std::vector<StoredBlock>> RemoteBackend::Open() {
  if (options_.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("a remote tier needs a timeout above 0");
  }
  core_ = std::make_unique<Core>(options_);
  if (absl::Status status = core_->Start(); !status.ok()) return status;
  return std::vector<StoredBlock>();
}

void RemoteBackend::Close() { core_->Stop(); }

void RemoteBackend::Write(const BlockRecord& record, absl::Span<const std::byte> from,
                          Written done) {
  core_->Enqueue({.request = {.kind = RemoteRequest::Kind::kStore,
                              .key = record.id.key,
                              .length = record.length,
                              .checksum = record.checksum,
                              .tenant = record.id.tenant},
                  .from = from,
                  .finish = [done = std::move(done)](absl::Status status, TierPlace place) mutable {
                    if (status.ok()) {
                      done(place);
                    } else {
                      done(std::move(status));
                    }
                  }});
}

void RemoteBackend::Read(const BlockRecord& record, TierPlace place, absl::Span<std::byte> to,
                         Done done) {
  core_->Enqueue({.request = {.kind = RemoteRequest::Kind::kLoad,
                              .place = place.value(),
                              .key = record.id.key,
                              .length = record.length},
                  .checksum = record.checksum,
                  .to = to,
                  .finish = [done = std::move(done)](absl::Status status, TierPlace) mutable {
                    done(std::move(status));
                  }});
}

void RemoteBackend::Remove(const BlockRecord& record, TierPlace place, RemoveReason, Done done) {
  core_->Enqueue({.request = {.kind = RemoteRequest::Kind::kRemove,
                              .place = place.value(),
                              .key = record.id.key},
                  .finish = [done = std::move(done)](absl::Status status, TierPlace) mutable {
                    done(std::move(status));
                  }});
}

void RemoteBackend::Purge(const std::string& tenant, Done done) {
  core_->Enqueue({.request = {.kind = RemoteRequest::Kind::kPurge, .tenant = tenant},
                  .finish = [done = std::move(done)](absl::Status status, TierPlace) mutable {
                    done(std::move(status));
                  }});
}

}  // namespace palimpsest
