// Who dies at which state of the protocols: a worker that gives memory, one that gets it, or the
// broker, each killed exactly there. All three are processes on real sockets; workers map real
// memory and mark it, but have no model. docs/faults.md has the table of states.
//
// Each case brings two workers to where a flow begins and has it stopped at a state: a worker
// stands still before or behind a message, or the broker gets no descriptor for the memory of
// cleaned slabs. Then one of the three is killed, the others go on, the dead one is started anew,
// and everybody asks again for what it wants. All must get it; what survivors held must have the
// bytes that they wrote, what anybody is granted must come as zeros, every slab must exist once and
// be where the broker says, and be free once both workers are gone.
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
namespace {

using v1::GetStatusResponse;
using v1::TenantMemory;

// An embedding, eight layers and a head, of one slab each.
constexpr int kLayers = 8;
constexpr uint32_t kWhole = kLayers + 2;

enum Who { kAlpha, kBeta };
enum class Dies { kAlpha, kBeta, kBroker };
constexpr const char* kNames[] = {"alpha", "beta"};

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

// Beta's requests want a model, alpha's is idle.
Flow Activation() {
  return {
      .name = "Activation",
      .pool_slabs = kWhole + 4,
      .layers_come_back = false,
      .prepare =
          [](BrokerDeathTest& test) {
            test.AttachWhole(kAlpha);
            test.Do(kAlpha, "report idle");
            test.Attach(kBeta);
          },
      .begin =
          [](BrokerDeathTest& test) {
            test.Do(kBeta, "report active");
            test.Do(kBeta, "activate");
          },
      .states =
          {{.name = "revoke sent", .hold = "revoke"},
           {.name = "one slab told given up",
            .hold = "revoked-part",
            .there = [](const auto& a, const auto&) { return a.parameter_slabs() == kWhole - 1; }},
           {.name = "slabs given up, not told", .hold = "revoked"},
           {.name = "slabs are cleaned", .cleaning = kWhole - 4},
           {.name = "granted",
            .who = kBeta,
            .hold = "grant",
            .there = [](const auto&, const auto& b) { return b.parameter_slabs() == kWhole; }},
           {.name = "mapped, being restored",
            .who = kBeta,
            .hold = "mapped",
            .there = [](const auto&, const auto& b) { return b.parameter_slabs() == kWhole; }},
           {.name = "restored",
            .there =
                [](const auto&, const auto& b) {
                  return b.parameter_slabs() == kWhole && b.grants_in_flight() == 0;
                }}},
      .ask =
          [](BrokerDeathTest& test) {
            test.Do(kAlpha, "report idle");
            test.Do(kBeta, "report active");
            test.Do(kBeta, "activate");
          },
      .ended = [](const auto&, const auto& b) { return b.parameter_slabs() == kWhole; }};
}

// The same while alpha runs: beta waits until it does not.
Flow WaitingActivation() {
  Flow flow = Activation();
  flow.name = "WaitingActivation";
  flow.prepare = [](BrokerDeathTest& test) {
    test.AttachWhole(kAlpha);
    test.Do(kAlpha, "report active");
    test.Attach(kBeta);
  };
  flow.states = {{.name = "waits",
                  .there = [](const auto&, const auto& b) { return b.activation_waiting(); }}};
  return flow;
}

// Alpha has KV that it neither uses nor asks for.
Flow Kv() {
  const auto has_kv = [](const TenantMemory&, const TenantMemory& b) { return b.kv_slabs() == 4; };
  return {.name = "Kv",
          .pool_slabs = kWhole + 4,
          .layers_come_back = false,
          .prepare =
              [](BrokerDeathTest& test) {
                test.AttachWhole(kAlpha);
                test.Do(kAlpha, "report active");
                test.Get(kAlpha, 4);
                test.Want(kAlpha, 0);
                test.Do(kAlpha, "report active unused");
                test.Attach(kBeta);
                test.Do(kBeta, "report active");
              },
          .begin = [](BrokerDeathTest& test) { test.Want(kBeta, 4); },
          .states = {{.name = "revoke sent", .hold = "revoke"},
                     {.name = "one slab told given up",
                      .hold = "revoked-part",
                      .there = [](const auto& a, const auto&) { return a.kv_slabs() == 3; }},
                     {.name = "slabs given up, not told", .hold = "revoked"},
                     {.name = "slabs are cleaned", .cleaning = 4},
                     {.name = "granted", .who = kBeta, .hold = "grant", .there = has_kv},
                     {.name = "mapped, not told", .who = kBeta, .hold = "mapped", .there = has_kv},
                     {.name = "done", .there = has_kv}},
          .ask =
              [](BrokerDeathTest& test) {
                test.Want(kAlpha, 0);
                test.Do(kAlpha, "report active unused");
                test.Do(kBeta, "report active");
                test.Want(kBeta, 4);
              },
          .ended = has_kv};
}

bool TwoLayersRotate(const TenantMemory& a, const TenantMemory& b) {
  return a.freed_layers() == 2 && a.parameter_slabs() == kWhole - 3 && a.slot_slabs() == 1 &&
         a.kv_slabs() == 4 && b.parameter_slabs() == kWhole && b.kv_slabs() == 2;
}

void PrepareTwoThatRun(BrokerDeathTest& test) {
  test.AttachWhole(kAlpha);
  test.Do(kAlpha, "report active");
  test.Get(kAlpha, 4);
  test.AttachWhole(kBeta);
  test.Do(kBeta, "report active");
}

// Both run; beta's KV gets the memory of two of alpha's layers.
Flow LayersGo() {
  const auto told = [](const TenantMemory& a, const TenantMemory&) {
    return a.freed_layers() == 2;
  };
  const auto granted = [](const TenantMemory&, const TenantMemory& b) { return b.kv_slabs() == 2; };
  return {.name = "LayersGo",
          .pool_slabs = 2 * kWhole + 4,
          .layers_come_back = false,
          .prepare = PrepareTwoThatRun,
          .begin = [](BrokerDeathTest& test) { test.Want(kBeta, 2); },
          .states = {{.name = "SetRotation sent", .hold = "rotation", .there = told},
                     {.name = "layers rotate, not told", .hold = "rotated", .there = told},
                     {.name = "slabs are cleaned", .cleaning = 2},
                     {.name = "granted", .who = kBeta, .hold = "grant", .there = granted},
                     {.name = "mapped, not told", .who = kBeta, .hold = "mapped", .there = granted},
                     {.name = "done", .there = TwoLayersRotate}},
          .ask =
              [](BrokerDeathTest& test) {
                for (const Who who : {kAlpha, kBeta}) {
                  test.Do(who, "activate");
                  test.Do(who, "report active");
                  test.Want(who, who == kAlpha ? 4 : 2);
                }
              },
          .ended = TwoLayersRotate};
}

// Beta does not need that KV any more.
Flow LayersComeBack() {
  const auto spare = [](const TenantMemory& a, const TenantMemory&) { return a.slot_slabs() == 3; };
  const auto told = [](const TenantMemory& a, const TenantMemory&) {
    return a.freed_layers() == 0;
  };
  const auto whole = [](const TenantMemory& a, const TenantMemory& b) {
    return a.freed_layers() == 0 && a.parameter_slabs() == kWhole && a.slot_slabs() == 0 &&
           a.kv_slabs() == 4 && b.parameter_slabs() == kWhole && b.kv_slabs() == 0;
  };
  return {.name = "LayersComeBack",
          .pool_slabs = 2 * kWhole + 4,
          .layers_come_back = true,
          .prepare =
              [](BrokerDeathTest& test) {
                PrepareTwoThatRun(test);
                test.Get(kBeta, 2);
              },
          .begin =
              [](BrokerDeathTest& test) {
                test.Want(kBeta, 0);
                test.Do(kBeta, "report active unused");
              },
          .states = {{.name = "revoke sent", .who = kBeta, .hold = "revoke"},
                     {.name = "slabs given up, not told", .who = kBeta, .hold = "revoked"},
                     {.name = "slabs are cleaned", .cleaning = 2},
                     {.name = "spare slabs granted", .hold = "grant", .there = spare},
                     {.name = "spare slabs fetched, not told", .hold = "mapped", .there = spare},
                     {.name = "second SetRotation sent", .hold = "rotation", .there = told},
                     {.name = "layers are back, not told", .hold = "rotated", .there = told},
                     {.name = "done", .there = whole}},
          .ask =
              [](BrokerDeathTest& test) {
                for (const Who who : {kAlpha, kBeta}) {
                  test.Do(who, "activate");
                  test.Do(who, who == kAlpha ? "report active" : "report active unused");
                  test.Want(who, who == kAlpha ? 4 : 0);
                }
              },
          .ended = whole};
}

// Alpha, whose layers rotate, has become idle: it stops rotating, then gives whole stages.
Flow RotatingTenantGivesAll() {
  const auto whole = [](const TenantMemory&, const TenantMemory& b) {
    return b.parameter_slabs() == kWhole;
  };
  return {.name = "RotatingTenantGivesAll",
          .pool_slabs = kWhole + 4,
          .layers_come_back = false,
          .prepare =
              [](BrokerDeathTest& test) {
                test.AttachWhole(kAlpha);
                test.Do(kAlpha, "report active");
                test.Get(kAlpha, 6);
                test.Attach(kBeta);
                test.Do(kBeta, "report active");
              },
          .begin =
              [](BrokerDeathTest& test) {
                test.Want(kAlpha, 0);
                test.Do(kAlpha, "report idle unused");
                test.Do(kBeta, "activate");
              },
          .states = {{.name = "SetRotation to none sent", .hold = "rotation"},
                     {.name = "nothing rotates, not told", .hold = "rotated"},
                     {.name = "revoke behind it sent", .hold = "revoke"},
                     {.name = "slabs are cleaned", .cleaning = kWhole},
                     {.name = "granted", .who = kBeta, .hold = "grant", .there = whole},
                     {.name = "done", .there = whole}},
          .ask =
              [](BrokerDeathTest& test) {
                test.Want(kAlpha, 0);
                test.Do(kAlpha, "report idle unused");
                test.Do(kBeta, "report active");
                test.Do(kBeta, "activate");
              },
          .ended = whole};
}

const std::vector<Flow>& Flows() {
  static const std::vector<Flow>& flows =
      *new std::vector<Flow>{Activation(), WaitingActivation(), Kv(),
                             LayersGo(),   LayersComeBack(),    RotatingTenantGivesAll()};
  return flows;
}

TEST_P(BrokerDeathTest, AtEachStateLosesNothing) {
  StartBroker();
  for (const State& state : flow_.states) {
    SCOPED_TRACE(state.name);
    RunState(state, std::get<1>(GetParam()));
    if (HasFailure()) return;
  }
}

std::string CaseName(const ::testing::TestParamInfo<std::tuple<size_t, Dies>>& info) {
  const auto [flow, dies] = info.param;
  constexpr const char* kWho[] = {"AlphaIn", "BetaIn", "TheBrokerIn"};
  return absl::StrCat(kWho[static_cast<size_t>(dies)], Flows()[flow].name);
}

INSTANTIATE_TEST_SUITE_P(Of, BrokerDeathTest,
                         ::testing::Combine(::testing::Range<size_t>(0, Flows().size()),
                                            ::testing::Values(Dies::kAlpha, Dies::kBeta,
                                                              Dies::kBroker)),
                         CaseName);

}  // namespace
}  // namespace palimpsest
