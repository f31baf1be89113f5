#include "router/core/worker_directory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace palimpsest::router {

WorkerDirectory::WorkerDirectory(std::vector<WorkerEndpoint> workers,
                                 std::unique_ptr<PlacementPolicy> policy)
    : policy_(std::move(policy)) {
  for (WorkerEndpoint& endpoint : workers) {
    workers_.emplace_back().endpoint = std::move(endpoint);
  }
}

WorkerDirectory::Worker& WorkerDirectory::At(WorkerId worker) {
  return workers_.at(worker.value());
}

absl::StatusOr<WorkerId> WorkerDirectory::Choose(absl::string_view tenant, absl::string_view model,
                                                 const PlacementRequest& request,
                                                 absl::Span<const WorkerId> excluded) {
  std::vector<PlacementCandidate> candidates;
  for (size_t i = 0; i < workers_.size(); ++i) {
    const Worker& worker = workers_[i];
    const WorkerId id(static_cast<uint32_t>(i));
    if (worker.endpoint.tenant != tenant || worker.endpoint.model != model) continue;
    if (!worker.healthy || worker.draining) continue;
    if (std::find(excluded.begin(), excluded.end(), id) != excluded.end()) continue;
    candidates.push_back({id, worker.outstanding, worker.load, worker.last_chosen});
  }
  if (candidates.empty()) return NobodyError(tenant, model);
  const WorkerId chosen = candidates.at(policy_->Choose(request, candidates)).worker;
  Worker& worker = At(chosen);
  ++worker.outstanding;
  worker.last_chosen = ++placements_;
  return chosen;
}

absl::Status WorkerDirectory::NobodyError(absl::string_view tenant, absl::string_view model) const {
  std::vector<std::string> states;
  for (const Worker& worker : workers_) {
    if (worker.endpoint.tenant != tenant || worker.endpoint.model != model) continue;
    states.push_back(absl::StrCat(worker.endpoint.address, ": ",
                                  worker.draining  ? "draining"
                                  : worker.healthy ? "tried already"
                                                   : worker.problem));
  }
  return absl::UnavailableError(absl::StrCat("no worker can take a request for model '", model,
                                             "' now (", absl::StrJoin(states, "; "), ")"));
}

void WorkerDirectory::Finished(WorkerId id) {
  Worker& worker = At(id);
  if (worker.outstanding <= 0) {
    std::fprintf(stderr, "WorkerDirectory: worker %s finished a request that it was not given\n",
                 worker.endpoint.address.c_str());
    std::abort();
  }
  --worker.outstanding;
}

void WorkerDirectory::ReportFailure(WorkerId id, const absl::Status& status) {
  Worker& worker = At(id);
  worker.healthy = false;
  worker.problem = std::string(status.message());
  worker.stale_below = polls_ + 1;
}

uint64_t WorkerDirectory::BeginPoll(WorkerId) { return ++polls_; }

void WorkerDirectory::EndPoll(WorkerId id, uint64_t poll, const PollResult& result) {
  Worker& worker = At(id);
  const bool answered = result.answered_at > absl::InfinitePast();
  worker.unanswered = answered ? 0 : worker.unanswered + 1;
  worker.answered_at = std::max(worker.answered_at, result.answered_at);
  if (poll < worker.stale_below || poll <= worker.newest_poll) return;
  worker.newest_poll = poll;
  worker.healthy = result.status.ok();
  worker.problem = std::string(result.status.message());
  if (!result.status.ok()) return;
  worker.load = result.load;
  if (worker.drain_calls == 0) worker.draining = result.draining;
}

absl::Time WorkerDirectory::SilentSince(WorkerId id) const {
  const Worker& worker = workers_.at(id.value());
  return worker.unanswered < 2 ? absl::InfiniteFuture() : worker.answered_at;
}

void WorkerDirectory::BeginDrain(WorkerId id) {
  Worker& worker = At(id);
  worker.draining = true;
  ++worker.drain_calls;
}

void WorkerDirectory::EndDrain(WorkerId id) {
  Worker& worker = At(id);
  --worker.drain_calls;
  worker.stale_below = polls_ + 1;
}

const WorkerEndpoint& WorkerDirectory::endpoint(WorkerId worker) const {
  return workers_.at(worker.value()).endpoint;
}

WorkerView WorkerDirectory::View(size_t index) const {
  const Worker& worker = workers_[index];
  return {WorkerId(static_cast<uint32_t>(index)),
          worker.endpoint,
          worker.healthy,
          worker.draining,
          worker.outstanding,
          worker.load,
          worker.problem};
}

std::vector<WorkerView> WorkerDirectory::List() const {
  std::vector<WorkerView> views;
  for (size_t i = 0; i < workers_.size(); ++i) views.push_back(View(i));
  return views;
}

std::vector<WorkerView> WorkerDirectory::ListTenant(absl::string_view tenant) const {
  std::vector<WorkerView> views;
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (workers_[i].endpoint.tenant == tenant) views.push_back(View(i));
  }
  return views;
}

}  // namespace palimpsest::router
