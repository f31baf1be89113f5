// Random walks of simulated workers, some slow, dying, lying or vanishing, of the clock and of a
// broker that restarts now and then. Invariants must hold after each step, and promises that take
// their time are called in on the way. SimulatedNode keeps the account against which the arbiter is
// judged.
#ifndef PALIMPSEST_BROKER_CORE_ARBITER_FUZZER_H_
#define PALIMPSEST_BROKER_CORE_ARBITER_FUZZER_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "broker/core/simulated_node.h"

namespace palimpsest {

inline constexpr uint32_t kFuzzedPool = 96;

inline std::vector<SimulatedTenant> FuzzedTenants() {
  // Floors: 26 + 20 + 17 of 96; best effort for two, one with a workspace.
  return {
      {{.name = "pinned",
        .priority = 1,
        .pinned = true,
        .floor_slabs = 26,
        .quota_slabs = 60,
        .sequence_slabs = 4,
        .workspace_slabs = 2},
       EvenStages(5, 4)},
      {{.name = "high",
        .priority = 2,
        .floor_slabs = 20,
        .floor_by_default = true,
        .quota_slabs = 80,
        .sequence_slabs = 4},
       RotatingStages(8, 2)},
      {{.name = "low",
        .priority = 0,
        .floor_slabs = 17,
        .quota_slabs = 96,
        .sequence_slabs = 4,
        .workspace_slabs = 1},
       {{0, 3}, {3, 7}, {10, 2}}},
      {{.name = "effort",
        .priority = 0,
        .quota_slabs = 96,
        .sequence_slabs = 8,
        .workspace_slabs = 3},
       RotatingStages(10, 3)},
      {{.name = "effort-high", .priority = 2, .quota_slabs = 50, .sequence_slabs = 8},
       RotatingStages(20, 1)},
  };
}

inline ArbiterOptions FuzzedOptions(uint32_t seed) {
  return ArbiterOptions{.pool_slabs = kFuzzedPool,
                        .rotation = {.enabled = true, .cap = 0.8},
                        .generation = 1,
                        .kv_step_slabs = 4,
                        .reversion_delay = absl::Milliseconds(500),
                        .sharing = seed % 3 == 0 ? Sharing::kTemporal : Sharing::kSpatial,
                        .skip_clean_for_same_tenant = seed % 2 == 1};
}

class ArbiterFuzzer {
 public:
  explicit ArbiterFuzzer(uint32_t seed, SimulatedNode::LedgerFactory ledgers = nullptr)
      : random_(seed), node_(FuzzedOptions(seed), FuzzedTenants(), std::move(ledgers)) {}

  void Run(int steps) {
    for (int i = 0; i < steps && problems().empty(); ++i) {
      Step();
      node_.CheckInvariants();
      if (i % 400 == 199) ExpectFloorHonoured();
      if (i % 400 == 399) ExpectHungWorkerGivesWay();
      if (i % 300 == 149) ExpectEverythingComesBack();
    }
    if (problems().empty()) EndAll();
  }

  const std::vector<std::string>& problems() const {
    return problems_.empty() ? node_.problems() : problems_;
  }
  const std::string& log() const { return node_.log(); }
  int kills() const { return Occurrences("kill "); }
  int hangs() const { return hangs_; }
  int hung_killed() const { return hung_killed_; }
  int rotations_ended() const { return rotations_ended_; }
  int completed() const { return completed_; }
  int Occurrences(const std::string& word) const {
    int count = 0;
    for (size_t at = log().find(word); at != std::string::npos; at = log().find(word, at + 1)) {
      ++count;
    }
    return count;
  }

 private:
  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }

  SimulatedWorker* AnyWorker() {
    auto& workers = node_.workers();
    if (workers.empty()) return nullptr;
    return &std::next(workers.begin(), Below(static_cast<uint32_t>(workers.size())))->second;
  }

  void Step() {
    const uint32_t tenant = Below(5);
    switch (Below(24)) {
      case 0:
      case 1:
        if (node_.WorkerOf(tenant) == nullptr) (void)node_.Attach(tenant);
        return;
      case 2:
      case 3:
        node_.Clean(1 + Below(8));
        return;
      case 4:
        node_.Clean(node_.cleaning());
        return;
      case 5:
      case 6:
        node_.Advance(absl::Milliseconds(Below(400)));
        return;
      case 7:
        if (Below(4) == 0) node_.Advance(absl::Seconds(Below(12)));
        return;
      case 8:
        if (Below(20) == 0) node_.RestartBroker();
        if (Below(4) == 0) node_.set_image_bytes_per_second(1e9 * Below(8));
        if (Below(4) == 0) node_.set_cached_slab(absl::Milliseconds(Below(4)));
        return;
      case 9:
        node_.Settle();
        return;
      default:
        if (SimulatedWorker* worker = AnyWorker()) WorkerStep(*worker);
    }
  }

  void WorkerStep(SimulatedWorker& worker) {
    if (!worker.connected) {
      if (worker.killed || worker.detached || Below(10) == 0) {
        node_.ProcessGone(worker.session);
      } else if (Below(3) == 0) {
        Return(worker);
      }
      return;
    }
    if (worker.hung) {
      worker.hung = Below(20) != 0;
      return;
    }
    if (worker.turn_ending && Below(2) == 0) {
      node_.AnswerEndTurn(worker);
      return;
    }
    const uint32_t kv = worker.Count(SlabRole::kKv);
    switch (Below(28)) {
      case 0:
        node_.Activate(worker, ActivateReason::kEager);
        return;
      case 1:
      case 2:
      case 3:
        node_.Activate(worker);
        return;
      case 4:
      case 5:
      case 6:
      case 7: {
        const uint32_t target = Below(40);
        node_.SetKvTarget(worker, target, Below(target + 1));
        return;
      }
      case 8:
      case 9:
      case 10: {
        const uint32_t used = Below(kv + 1);
        node_.Report(worker, Below(2) == 0, used, kv - used, Below(3));
        return;
      }
      case 11:
        if (worker.grants.empty() && worker.revokes.empty()) {
          node_.ReleaseKv(worker, Below(kv + 1));
        }
        return;
      case 12:
        if (Below(6) == 0) node_.LoseConnection(worker);
        return;
      case 13:
        if (Below(6) == 0) node_.Detach(worker);
        return;
      case 14:
        if (Below(8) == 0) node_.ProcessGone(worker.session);
        return;
      case 15:
        if (Below(6) == 0) Lie(worker);
        return;
      case 16:
        worker.hung = Below(6) == 0;
        return;
      default:
        if (Below(2) == 0 && !worker.grants.empty()) {
          node_.MapGrant(worker, absl::Milliseconds(Below(700)));
        } else if (!worker.rotations.empty()) {
          if (Below(12) == 0) {
            node_.FinishRotationAndLoseConnection(worker);
          } else {
            node_.FinishRotation(worker);
          }
        } else if (!worker.revokes.empty()) {
          if (Below(3) == 0) {
            node_.AnswerRevokePart(worker, 1 + Below(4));
          } else {
            node_.AnswerRevoke(worker);
          }
        }
    }
  }

  void Return(SimulatedWorker& worker) {
    if (Below(12) == 0 && !worker.held.empty() && worker.grants.empty()) {
      worker.held.begin()->second.epoch = Epoch(1);  // claims what it never got
      const SessionId session = worker.session;
      if (node_.Reattach(worker).ok()) problems_.push_back("a false epoch was accepted");
      if (!node_.workers()[session].killed) problems_.push_back("a false claim was not punished");
      return;
    }
    if (Below(30) == 0) {
      const Rotation truth = std::exchange(
          worker.rotation, Rotation{.stages = {0, 1}, .slots = 1});  // the first never rotates
      if (node_.Reattach(worker).ok()) problems_.push_back("a false rotation was accepted");
      if (!worker.killed) problems_.push_back("a false claim was not punished");
      worker.rotation = truth;
      return;
    }
    if (const absl::Status status = node_.Reattach(worker); !status.ok()) {
      problems_.push_back(status.ToString());
    }
  }

  // Breaks the protocol; the arbiter must kill the worker and nobody else.
  void Lie(SimulatedWorker& worker) {
    const SessionId session = worker.session;
    const std::vector<SlabId> parameters = worker.Slabs(SlabRole::kParameter);
    switch (Below(6)) {
      case 0:
        node_.arbiter().OnReleaseKv(session, {SlabId(kFuzzedPool + Below(3))}, node_.now());
        break;
      case 1:
        node_.arbiter().OnSetKvTarget(session, 1, 2, node_.now());
        break;
      case 2:
        node_.arbiter().OnRevokeDone(session, RevokeId((7ull << 40) + 1), {}, node_.now());
        break;
      case 3:
        node_.arbiter().OnRotationDone(session, RotationId((7ull << 40) + 1), node_.now());
        break;
      case 4:
        node_.arbiter().OnGrantMapped(session, GrantId((7ull << 40) + 1), {}, {}, node_.now());
        break;
      default:
        if (parameters.empty()) return;
        node_.arbiter().OnReleaseKv(session, {parameters.front()}, node_.now());
    }
    node_.Advance(absl::Milliseconds(1));
    if (!node_.workers()[session].killed) problems_.push_back("a lie was not punished");
  }

  void LetAllBehave() {
    for (auto& [session, worker] : node_.workers()) worker.hung = false;
    node_.Settle();
    for (auto& [session, worker] : node_.workers()) {
      if (!worker.connected) Return(worker);
    }
    node_.Settle();
  }

  bool temporal() const { return node_.options().sharing == Sharing::kTemporal; }

  // Until one that waits has had its turn, when others hold on to theirs.
  absl::Duration TurnsOfAll() const {
    const ArbiterOptions& options = node_.options();
    if (!temporal()) return absl::ZeroDuration();
    return (options.quantum + options.activation_deadline) * static_cast<int>(tenants_.size()) +
           options.turn_deadline;
  }

  // A worker that says it is active and then hangs keeps nothing that another one needs: within the
  // patience for its reports and the deadline of a revoke, or of an open grant, it is killed.
  void ExpectHungWorkerGivesWay() {
    LetAllBehave();
    // No activation waits any more: what is needed for KV may be taken.
    node_.Advance(node_.options().activation_deadline);
    LetAllBehave();
    SimulatedWorker* const hung = AnyWorker();
    SimulatedWorker* const needy = AnyWorker();
    if (hung == nullptr || hung == needy) return;
    const SessionId hung_session = hung->session;
    const SessionId needy_session = needy->session;
    node_.Report(*hung, /*active=*/true, hung->Count(SlabRole::kKv), 0);
    hung->hung = true;
    const SimulatedTenant& tenant = tenants_[needy->tenant.value()];
    const ParameterStage& last = tenant.stages.back();
    const uint32_t kv = tenant.config.quota_slabs - tenant.config.workspace_slabs -
                        (last.first_slab + last.slab_count);
    node_.Report(*needy, /*active=*/true, needy->Count(SlabRole::kKv), 0);
    node_.SetKvTarget(*needy, kv, kv);
    const absl::Time due = node_.now() + node_.options().report_patience +
                           node_.options().min_residence + node_.options().revoke_deadline +
                           TurnsOfAll();
    while (node_.now() < due) {
      node_.Settle();
      node_.Advance(absl::Milliseconds(500));
    }
    node_.Settle();
    const auto still = node_.workers().find(hung_session);
    if (still != node_.workers().end() && !still->second.grants.empty()) {
      node_.Advance(node_.options().grant_deadline);  // granted before its silence was noticed
      node_.Settle();
    }
    ++hangs_;
    if (!node_.workers().contains(hung_session)) {
      ++hung_killed_;
      return;
    }
    const SimulatedWorker& left = node_.workers()[hung_session];
    const bool pinned = tenants_[left.tenant.value()].config.pinned;
    const bool could_give =
        left.Count(SlabRole::kKv) > 0 ||
        (!pinned && left.Count(SlabRole::kParameter) + left.Count(SlabRole::kSlot) > 0);
    if (could_give && node_.workers()[needy_session].Count(SlabRole::kKv) < kv) {
      problems_.push_back("a hung worker kept what another one needed");
    }
  }

  // Once everybody behaves, a tenant gets its floor when it asks, whatever the others hold.
  void ExpectFloorHonoured() {
    LetAllBehave();
    const uint32_t tenant = Below(3);
    if (node_.WorkerOf(tenant) == nullptr && !node_.Attach(tenant).ok()) {
      problems_.push_back("a tenant without a process could not attach");
    }
    SimulatedWorker* worker = node_.WorkerOf(tenant);
    if (worker == nullptr) return;
    const SessionId session = worker->session;
    const SimulatedTenant& config = tenants_[tenant];
    const uint32_t image = ImageOf(config);
    const uint32_t kv = config.config.floor_slabs - image - config.config.workspace_slabs;
    node_.Report(*worker, /*active=*/true, worker->Count(SlabRole::kKv), 0);
    node_.Activate(*worker);
    node_.SetKvTarget(*worker, kv, kv);
    const int refusals = worker->refusals;
    const absl::Time due = node_.now() + absl::Seconds(20) + TurnsOfAll();
    while (node_.now() < due) {
      node_.Settle();
      node_.Advance(absl::Milliseconds(500));
      worker = &node_.workers()[session];
      // As an engine does for what was taken during another one's turn.
      if (temporal()) node_.Activate(*worker);
      if (worker->refusals > refusals) problems_.push_back("a floor was refused");
      if (node_.Complete(*worker) && worker->Count(SlabRole::kKv) >= kv &&
          worker->Count(SlabRole::kWorkspace) == config.config.workspace_slabs) {
        return;
      }
    }
    problems_.push_back("a floor was not honoured: tenant " + config.config.name);
  }

  static uint32_t ImageOf(const SimulatedTenant& tenant) {
    return tenant.stages.back().first_slab + tenant.stages.back().slab_count;
  }

  // Processes end until the images of the others fit the pool beside all workspaces.
  void MakeRoomForImages() {
    while (true) {
      uint32_t slabs = 0;
      for (const SimulatedTenant& tenant : tenants_) slabs += tenant.config.workspace_slabs;
      for (const auto& [session, worker] : node_.workers()) {
        slabs += ImageOf(tenants_[worker.tenant.value()]);
      }
      if (slabs <= kFuzzedPool) return;
      node_.ProcessGone(AnyWorker()->session);
    }
  }

  // Within 15 s.
  bool EachBecomes(const std::function<bool(const SimulatedWorker&)>& wanted) {
    for (int i = 0; i < 30; ++i) {
      node_.Settle();
      const auto& workers = node_.workers();
      if (std::all_of(workers.begin(), workers.end(),
                      [&](const auto& entry) { return wanted(entry.second); })) {
        return true;
      }
      node_.Advance(absl::Milliseconds(500));
    }
    return false;
  }

  // Slabs come to rest while nobody wants anything else. Late moves are not on and on: what cached
  // blocks are worth falls with time.
  void ExpectRest() {
    std::string moves;
    for (int i = 0; i < 10; ++i) {
      const size_t before = node_.log().size();
      for (int j = 0; j < 20; ++j) {
        node_.Settle();
        node_.Advance(absl::Milliseconds(500));
      }
      moves = node_.log().substr(before);
      if (moves.empty()) return;
    }
    problems_.push_back("slabs move on and on: " + moves);
  }

  void WantOfEach(uint32_t most_kv) {
    for (auto& [session, worker] : node_.workers()) {
      const uint32_t target = Below(most_kv + 1);
      const uint32_t kv = worker.Count(SlabRole::kKv);
      const uint32_t used = std::min(kv, Below(target + 1));
      // Those that are active take turns, and slabs with them.
      node_.Report(worker, /*active=*/!temporal() && Below(2) == 0, used, kv - used);
      node_.SetKvTarget(worker, target, Below(target + 1));
    }
  }

  // Slabs come to rest under any demand that stays. Once nobody asks for KV any more, all layers
  // have memory of their own again, whatever cached blocks might save, and who was whole is whole
  // unless blocks are worth more.
  void ExpectEverythingComesBack() {
    LetAllBehave();
    // No activation waits any more.
    const absl::Time due = node_.now() + TurnsOfAll();
    for (auto& [session, worker] : node_.workers()) {
      if (temporal() && worker.connected) node_.Report(worker, false, 0, 0);
    }
    while (node_.now() < due) {
      node_.Settle();
      node_.Advance(absl::Milliseconds(500));
    }
    node_.Advance(node_.options().activation_deadline);
    LetAllBehave();
    WantOfEach(40);
    ExpectRest();
    MakeRoomForImages();
    for (auto& [session, worker] : node_.workers()) {
      if (!worker.rotation.none()) ++rotations_ended_;
      if (worker.was_complete && !node_.Complete(worker)) ++completed_;
    }
    node_.set_cached_slab(absl::Seconds(1));
    WantOfEach(0);
    if (!EachBecomes([](const SimulatedWorker& worker) { return worker.rotation.none(); })) {
      problems_.push_back("layers did not come back");
    }
    node_.set_cached_slab(absl::ZeroDuration());
    if (!EachBecomes([this](const SimulatedWorker& worker) {
          return !worker.was_complete || node_.Complete(worker);
        })) {
      problems_.push_back("parameters did not come back");
    }
    ExpectRest();
  }

  void EndAll() {
    while (!node_.workers().empty()) node_.ProcessGone(node_.workers().begin()->first);
    node_.Clean(node_.cleaning());
    node_.CheckInvariants();
    if (node_.arbiter().ledger().Count(SlabState::kFree) != kFuzzedPool) {
      problems_.push_back("not every slab is free after all processes ended");
    }
    if (node_.arbiter().NextDeadline() != absl::InfiniteFuture()) {
      problems_.push_back("a deadline is left after all processes ended");
    }
  }

  const std::vector<SimulatedTenant> tenants_ = FuzzedTenants();
  std::mt19937 random_;
  SimulatedNode node_;
  int hangs_ = 0;
  int hung_killed_ = 0;
  int rotations_ended_ = 0;
  int completed_ = 0;
  std::vector<std::string> problems_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_ARBITER_FUZZER_H_
