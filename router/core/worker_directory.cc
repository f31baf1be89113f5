#include "router/core/worker_directory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace palimpsest::router {

WorkerDirectory::WorkerDirectory(std::vector<WorkerEndpoint> targets,
                                 std::unique_ptr<PlacementPolicy> policy)
    : policy_(std::move(policy)) {
  for (WorkerEndpoint& endpoint : targets) targets_.emplace_back().endpoint = std::move(endpoint);
}

WorkerDirectory::Worker& WorkerDirectory::At(WorkerId worker) { return workers_.at(worker); }

bool WorkerDirectory::IsListed(const WorkerEndpoint& endpoint) const {
  return std::any_of(targets_.begin(), targets_.end(), [&](const Target& target) {
    return target.endpoint.tenant == endpoint.tenant && target.endpoint.model == endpoint.model &&
           std::find(target.addresses.begin(), target.addresses.end(), endpoint.address) !=
               target.addresses.end();
  });
}

std::vector<NewWorker> WorkerDirectory::SetAddresses(size_t index,
                                                     const std::vector<std::string>& addresses) {
  Target& target = targets_.at(index);
  target.addresses = addresses;
  target.problem = addresses.empty() ? "its name has no address" : "";
  for (auto& [id, worker] : workers_) worker.leaving = !IsListed(worker.endpoint);
  std::vector<NewWorker> added;
  for (const std::string& address : addresses) {
    const WorkerEndpoint endpoint{target.endpoint.tenant, target.endpoint.model, address};
    const bool known = std::any_of(workers_.begin(), workers_.end(), [&](const auto& entry) {
      return entry.second.endpoint == endpoint;
    });
    if (known) continue;
    const WorkerId id(next_id_++);
    workers_[id].endpoint = endpoint;
    added.push_back({id, endpoint});
  }
  return added;
}

void WorkerDirectory::SetProblem(size_t target, const absl::Status& status) {
  targets_.at(target).problem = std::string(status.message());
}

std::vector<WorkerId> WorkerDirectory::TakeGone() {
  std::vector<WorkerId> gone;
  for (const auto& [id, worker] : workers_) {
    if (worker.leaving && worker.outstanding == 0 && worker.polls == 0 && worker.drain_calls == 0) {
      gone.push_back(id);
    }
  }
  for (WorkerId id : gone) workers_.erase(id);
  return gone;
}

absl::StatusOr<WorkerId> WorkerDirectory::Choose(absl::string_view tenant, absl::string_view model,
                                                 const PlacementRequest& request,
                                                 absl::Span<const WorkerId> excluded) {
  const uint64_t conversation =
      absl::HashOf(tenant, model, request.conversation);  // of equal ones, one loses its home
  const std::optional<WorkerId> home =
      request.conversation.empty() ? std::nullopt : homes_.Find(conversation);
  std::vector<PlacementCandidate> candidates;
  for (const auto& [id, worker] : workers_) {
    if (worker.endpoint.tenant != tenant || worker.endpoint.model != model) continue;
    if (!worker.healthy || worker.draining || worker.leaving) continue;
    if (std::find(excluded.begin(), excluded.end(), id) != excluded.end()) continue;
    candidates.push_back({id, home == id, worker.outstanding, worker.load, worker.last_chosen});
  }
  if (candidates.empty()) return NobodyError(tenant, model);
  const WorkerId chosen = candidates.at(policy_->Choose(request, candidates)).worker;
  Worker& worker = At(chosen);
  ++worker.outstanding;
  worker.last_chosen = ++placements_;
  if (!request.conversation.empty()) homes_.Set(conversation, chosen);
  return chosen;
}

absl::Status WorkerDirectory::NobodyError(absl::string_view tenant, absl::string_view model) const {
  std::vector<std::string> states;
  for (const Target& target : targets_) {
    if (target.endpoint.tenant != tenant || target.endpoint.model != model) continue;
    if (target.addresses.empty()) {
      states.push_back(absl::StrCat(target.endpoint.address, ": ", target.problem));
    }
  }
  for (const auto& [id, worker] : workers_) {
    if (worker.endpoint.tenant != tenant || worker.endpoint.model != model) continue;
    if (worker.leaving) continue;
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
  const auto found = workers_.find(id);
  if (found == workers_.end()) return;
  Worker& worker = found->second;
  worker.healthy = false;
  worker.problem = std::string(status.message());
  worker.stale_below = polls_ + 1;
}

uint64_t WorkerDirectory::BeginPoll(WorkerId id) {
  ++At(id).polls;
  return ++polls_;
}

void WorkerDirectory::EndPoll(WorkerId id, uint64_t poll, const PollResult& result) {
  Worker& worker = At(id);
  --worker.polls;
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
  const auto found = workers_.find(id);
  if (found == workers_.end()) return absl::InfiniteFuture();
  const Worker& worker = found->second;
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

WorkerView WorkerDirectory::View(WorkerId id) const {
  const Worker& worker = workers_.at(id);
  return {id,
          worker.endpoint,
          worker.healthy,
          worker.draining || worker.leaving,
          worker.outstanding,
          worker.load,
          worker.problem};
}

std::vector<WorkerView> WorkerDirectory::List() const {
  std::vector<WorkerView> views;
  for (const auto& [id, worker] : workers_) views.push_back(View(id));
  return views;
}

std::vector<WorkerView> WorkerDirectory::ListTenant(absl::string_view tenant) const {
  std::vector<WorkerView> views;
  for (const auto& [id, worker] : workers_) {
    if (worker.endpoint.tenant == tenant) views.push_back(View(id));
  }
  return views;
}

}  // namespace palimpsest::router
