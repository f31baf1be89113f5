// How a case of broker_death_test.cc goes.
//
// Each case brings two workers to where a flow begins and has it stopped at a state: a worker
// stands still before or behind a message, or the broker gets no descriptor for the memory of
// cleaned slabs. Then one of the three is killed, the others go on, the dead one is started anew,
// and everybody asks again for what it wants. All must get it; what survivors held must have the
// bytes that they wrote, what anybody is granted must come as zeros, every slab must exist once and
// be where the broker says, and be free once both workers are gone.
#ifndef PALIMPSEST_BROKER_SERVER_BROKER_DEATH_FIXTURE_H_
#define PALIMPSEST_BROKER_SERVER_BROKER_DEATH_FIXTURE_H_

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "broker/server/testing/broker_process_fixture.h"

namespace palimpsest {

using v1::GetStatusResponse;
using v1::TenantMemory;

// An embedding, eight layers and a head, of one slab each.
inline constexpr int kLayers = 8;
inline constexpr uint32_t kWhole = kLayers + 2;

enum Who { kAlpha, kBeta };
enum class Dies { kAlpha, kBeta, kBroker };
inline constexpr const char* kNames[] = {"alpha", "beta"};

class BrokerDeathTest;

struct State {
  const char* name;
  // Who stands still at what (scripted_worker_main.cc); nowhere: nobody does.
  Who who = kAlpha;
  std::string hold = "nowhere";
  // Slabs that cannot be cleaned.
  uint32_t cleaning = 0;
  bool (*there)(const TenantMemory& alpha, const TenantMemory& beta) = nullptr;
};

struct Flow {
  const char* name;
  uint32_t pool_slabs;
  bool layers_come_back;
  void (*prepare)(BrokerDeathTest&);
  void (*begin)(BrokerDeathTest&);
  std::vector<State> states;
  // What everybody wants at the end, said as often as needed.
  void (*ask)(BrokerDeathTest&);
  bool (*ended)(const TenantMemory& alpha, const TenantMemory& beta);
};

// broker_death_test.cc
const std::vector<Flow>& Flows();

class BrokerDeathTest : public BrokerProcessFixture,
                        public ::testing::WithParamInterface<std::tuple<size_t, Dies>> {
 public:
  BrokerDeathTest() : BrokerProcessFixture(kLayers), flow_(Flows()[std::get<0>(GetParam())]) {}

  void Do(Who who, const std::string& command) { Must(*workers_[who], command); }
  void Attach(Who who) {
    auto worker = WorkerProcess::Start();
    ASSERT_TRUE(worker.ok()) << worker.status();
    workers_[who].emplace(*std::move(worker));
    Do(who, absl::StrCat("mark ", ++marks_));
    Do(who, who == kAlpha ? "rotates yes" : "rotates no");
    absl::Status last;
    const bool attached = Eventually([&] {
      // Refused while the tenant's earlier worker is not known to be gone.
      last = workers_[who]->Do(node_.Hello(kNames[who])).status();
      if (last.ok()) last = workers_[who]->Do("attach " + node_.control()).status();
      return last.ok();
    });
    ASSERT_TRUE(attached) << last;
  }
  void AttachWhole(Who who) {
    Attach(who);
    Do(who, "activate");
    Do(who, absl::StrCat("await-slabs parameter ", kWhole));
  }
  void Want(Who who, int kv_slabs) { Do(who, absl::StrCat("kv ", kv_slabs, " ", kv_slabs)); }
  void Get(Who who, int kv_slabs) {
    Want(who, kv_slabs);
    Do(who, absl::StrCat("await-slabs kv ", kv_slabs));
  }

 protected:
  void RunState(const State& state, Dies dies) {
    flow_.prepare(*this);
    Stop(state);
    flow_.begin(*this);
    AwaitState(state);
    if (HasFailure()) return;
    Kill(dies);
    if (dies != Dies::kBroker) GoOn(state);
    Revive(dies);
    if (HasFailure()) return;
    AwaitEnd();
    if (HasFailure()) return;
    CheckMemory();
    for (auto& worker : workers_) worker.reset();
    EXPECT_TRUE(Eventually([&] {
      const auto status = Status();
      return status.has_value() && status->free_slabs() == status->pool_slabs() &&
             status->tenants(kAlpha).pid() == 0 && status->tenants(kBeta).pid() == 0;
    }));
  }

  void StartBroker() {
    // Only the test kills.
    BrokerProcessFixture::StartBroker(node_.Config(
        static_cast<int>(flow_.pool_slabs),
        absl::StrCat("  revoke_deadline: 60s\n  grant_deadline: 60s\n  activation_deadline: 60s\n"
                     "  reattach_grace: 60s\n  report_patience: 60s\n  min_residence: 10ms\n"
                     "  residence_restores: 0\n  prefetch_grace: 10ms\n  reversion_delay: 20ms\n"
                     "  hysteresis: 0\n"
                     "  rotation: {enabled: true, reversion: ",
                     flow_.layers_come_back ? "true" : "false", "}\n")));
  }

  const Flow& flow_;

 private:
  void Stop(const State& state) {
    if (state.cleaning == 0) return Do(state.who, "hold " + state.hold);
    ASSERT_EQ(prlimit(broker_->pid(), RLIMIT_NOFILE, nullptr, &descriptors_), 0);
    SetDescriptors(3);
  }

  void GoOn(const State& state) {
    if (state.cleaning > 0) {
      SetDescriptors(descriptors_.rlim_cur);
    } else if (workers_[state.who].has_value()) {
      Do(state.who, "go-on");
    }
  }

  void SetDescriptors(rlim_t count) {
    rlimit limits = descriptors_;
    limits.rlim_cur = count;
    ASSERT_EQ(prlimit(broker_->pid(), RLIMIT_NOFILE, &limits, nullptr), 0);
  }

  void AwaitState(const State& state) {
    GetStatusResponse last;
    const bool there = Eventually([&] {
      last = Status().value_or(GetStatusResponse());
      if (last.tenants_size() < 2) return false;
      if (state.there != nullptr && !state.there(last.tenants(kAlpha), last.tenants(kBeta))) {
        return false;
      }
      if (state.cleaning > 0) return last.cleaning_slabs() == state.cleaning;
      return state.hold == "nowhere" || Held(state.who) == Open(state, last.tenants(state.who));
    });
    ASSERT_TRUE(there) << last.ShortDebugString();
  }

  uint32_t Held(Who who) {
    uint32_t held = 0;
    EXPECT_TRUE(absl::SimpleAtoi(workers_[who]->Do("held").value_or(""), &held));
    return held;
  }

  // Of the messages at which the worker stands still, how many are not answered; at least one.
  static uint32_t Open(const State& state, const TenantMemory& tenant) {
    uint32_t open = 1;
    if (state.hold == "grant" || state.hold == "mapped") open = tenant.grants_in_flight();
    if (absl::StartsWith(state.hold, "revoke")) open = tenant.revokes_in_flight();
    return std::max(open, 1u);
  }

  void Kill(Dies dies) {
    if (dies == Dies::kBroker) return KillBroker();
    std::optional<WorkerProcess>& worker = workers_[static_cast<size_t>(dies)];
    ASSERT_TRUE(worker->Kill().ok());
    ASSERT_TRUE(worker->AwaitExit(kPatience).ok());
    worker.reset();
  }

  void Revive(Dies dies) {
    if (dies != Dies::kBroker) return Attach(dies == Dies::kAlpha ? kAlpha : kBeta);
    StartBroker();
    for (const Who who : {kAlpha, kBeta}) {
      for (const std::string& command :
           {std::string("await-lost"), std::string("drop"), std::string("hold nowhere"),
            node_.Hello(kNames[who]), "reattach " + node_.control()}) {
        Do(who, command);
      }
    }
  }

  void AwaitEnd() {
    GetStatusResponse last;
    const bool ended = Eventually([&] {
      flow_.ask(*this);
      if (HasFailure()) return true;
      last = Status().value_or(GetStatusResponse());
      if (last.tenants_size() < 2) return false;
      const TenantMemory &alpha = last.tenants(kAlpha), &beta = last.tenants(kBeta);
      // The broker counts layers as moved when it tells the worker, who may not have moved them
      // yet.
      return flow_.ended(alpha, beta) && HasWhatTheBrokerSays(kAlpha, alpha) &&
             HasWhatTheBrokerSays(kBeta, beta) &&
             alpha.grants_in_flight() + beta.grants_in_flight() == 0 &&
             last.revoking_slabs() + last.cleaning_slabs() + last.quarantined_slabs() == 0;
    });
    ASSERT_TRUE(ended) << last.ShortDebugString() << "\n" << Said();
  }

  std::vector<std::string> SlabsOf(Who who, const std::string& role) {
    return absl::StrSplit(workers_[who]->Do("slabs " + role).value_or(""), ',', absl::SkipEmpty());
  }

  bool HasWhatTheBrokerSays(Who who, const TenantMemory& tenant) {
    return SlabsOf(who, "parameter").size() == tenant.parameter_slabs() &&
           SlabsOf(who, "slot").size() == tenant.slot_slabs() &&
           SlabsOf(who, "kv").size() == tenant.kv_slabs();
  }

  void CheckMemory() {
    const std::optional<GetStatusResponse> status = Status();
    ASSERT_TRUE(status.has_value());
    std::set<std::string> held;
    std::set<std::pair<dev_t, ino_t>> files;
    AddSlabFiles(broker_->pid(), files);
    size_t count = 0;
    for (const Who who : {kAlpha, kBeta}) {
      Do(who, "check");
      AddSlabFiles(workers_[who]->pid(), files);
      EXPECT_TRUE(HasWhatTheBrokerSays(who, status->tenants(who)));
      for (const char* role : {"parameter", "slot", "kv"}) {
        const std::vector<std::string> has = SlabsOf(who, role);
        held.insert(has.begin(), has.end());
        count += has.size();
      }
    }
    EXPECT_EQ(held.size(), count) << "two workers hold a slab";
    EXPECT_EQ(status->free_slabs() + count, status->pool_slabs());
    EXPECT_EQ(files.size(), status->pool_slabs()) << "slabs that have memory";
  }

  static void AddSlabFiles(pid_t pid, std::set<std::pair<dev_t, ino_t>>& files) {
    std::error_code error;
    for (const auto& entry :
         std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/fd"), error)) {
      const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
      struct stat file;
      if (!absl::StrContains(target, "memfd:") || !absl::StrContains(target, "slab")) continue;
      if (stat(entry.path().c_str(), &file) == 0 && file.st_size > 0) {
        files.emplace(file.st_dev, file.st_ino);
      }
    }
  }

  std::array<std::optional<WorkerProcess>, 2> workers_;
  int marks_ = 0;
  rlimit descriptors_{};
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_BROKER_DEATH_FIXTURE_H_
