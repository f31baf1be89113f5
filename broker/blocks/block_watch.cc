#include "broker/blocks/block_watch.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "broker/blocks/block_messages.h"
#include "common/grpc_status.h"

namespace palimpsest {

std::shared_ptr<BlockWatch> BlockWatch::Create(BlockStore& store) {
  std::shared_ptr<BlockWatch> watch(new BlockWatch(store));
  watch->self_ = watch;
  return watch;
}

void BlockWatch::Refuse(const absl::Status& status) {
  {
    MutexLock lock(&mu_);
    ended_ = true;
  }
  Finish(ToGrpcStatus(status));
}

void BlockWatch::Begin(const v1::WatchBlocksRequest& request) {
  tenants_ = store_.tenant_names();
  for (const std::string& name : store_.tier_names()) tiers_.push_back(TierFromName(name));
  if (!request.tenant().empty()) {
    const auto found = std::find(tenants_.begin(), tenants_.end(), request.tenant());
    if (found == tenants_.end()) {
      return Refuse(
          absl::NotFoundError(absl::StrCat("no tenant ", request.tenant(), " is configured here")));
    }
    only_ = TenantId(static_cast<uint32_t>(found - tenants_.begin()));
  }
  // Numbers of another broker mean nothing here.
  wants_snapshot_ = request.generation() != store_.event_generation();
  position_ = request.after_sequence();
  if (absl::Status added = store_.AddListener(weak_from_this()); !added.ok()) return Refuse(added);
  Pump();
}

void BlockWatch::Pump() {
  while (true) {
    bool cancelled = false;
    {
      MutexLock lock(&mu_);
      woken_ = true;
      if (making_ || ended_) return;
      making_ = true;
      woken_ = false;
      cancelled = cancelled_;
    }
    absl::Status status = absl::CancelledError("the reader has gone");
    const Next next = cancelled ? Next::kFinish : Make(status);
    if (next == Next::kWrite) {
      StartWrite(&response_);
      return;
    }
    if (next == Next::kFinish) return Refuse(status);
    MutexLock lock(&mu_);
    making_ = false;
    if (!woken_) return;
  }
}

BlockWatch::Next BlockWatch::Make(absl::Status& status) {
  while (true) {
    if (!in_snapshot_ && !wants_snapshot_) {
      const auto events = store_.EventsAfter(position_, kEvents);
      if (!events.ok()) {
        status = events.status();
        return Next::kFinish;
      }
      if (events->complete) {
        if (events->events.empty()) return Next::kNothing;
        position_ = events->events.back().sequence;
        response_.Clear();
        for (const blocks::BlockEvent& event : events->events) Add(event);
        if (response_.events().empty()) continue;
        response_.set_generation(store_.event_generation());
        response_.set_sequence(position_);
        return Next::kWrite;
      }
      missed_ = events->last - std::min(events->last, position_);
    }
    if (!in_snapshot_) {
      auto snapshot = store_.EventSnapshot();
      if (!snapshot.ok()) {
        status = snapshot.status();
        return Next::kFinish;
      }
      position_ = snapshot->last;
      snapshot_ = std::move(snapshot->events);
      told_ = 0;
      in_snapshot_ = true;
      wants_snapshot_ = false;
    }
    MakeOfSnapshot();
    return Next::kWrite;
  }
}

void BlockWatch::MakeOfSnapshot() {
  response_.Clear();
  response_.set_generation(store_.event_generation());
  response_.set_sequence(position_);
  v1::WatchBlocksResponse::Snapshot& snapshot = *response_.mutable_snapshot();
  snapshot.set_begins(told_ == 0);
  if (told_ == 0) snapshot.set_missed_events(std::exchange(missed_, 0));
  for (; told_ < snapshot_.size() && response_.events_size() < static_cast<int>(kEvents); ++told_) {
    Add(snapshot_[told_]);
  }
  if (told_ < snapshot_.size()) return;
  snapshot.set_ends(true);
  in_snapshot_ = false;
  snapshot_ = {};
}

void BlockWatch::Add(const blocks::BlockEvent& event) {
  if (only_.has_value() && event.tenant != *only_) return;
  v1::BlockEvent& out = *response_.add_events();
  out.set_sequence(event.sequence);
  out.set_kind(event.kind == blocks::BlockEvent::Kind::kStored ? v1::BlockEvent::KIND_STORED
                                                               : v1::BlockEvent::KIND_REMOVED);
  out.set_tenant(tenants_[event.tenant.value()]);
  out.set_tier(tiers_[event.tier.value()]);
  out.mutable_key()->set_high(event.key.high);
  out.mutable_key()->set_low(event.key.low);
}

void BlockWatch::OnBlockEvents() { Pump(); }

void BlockWatch::OnWriteDone(bool ok) {
  {
    MutexLock lock(&mu_);
    making_ = false;
    cancelled_ = cancelled_ || !ok;
  }
  Pump();
}

void BlockWatch::OnCancel() {
  {
    MutexLock lock(&mu_);
    cancelled_ = true;
  }
  Pump();
}

void BlockWatch::OnDone() {
  // The last reference may be this one.
  const std::shared_ptr<BlockWatch> self = std::move(self_);
}

}  // namespace palimpsest
