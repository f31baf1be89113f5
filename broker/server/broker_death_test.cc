// Who dies at which state of the protocols: a worker that gives memory, one that gets it, or the
// broker, each killed exactly there. All three are processes on real sockets; workers map real
// memory and mark it, but have no model. docs/faults.md has the table of states.
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "broker/server/broker_death_fixture.h"

namespace palimpsest {
namespace {

// Beta's requests want a model, alpha's is idle.
Flow ActivationAtOnce() {
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
  Flow flow = ActivationAtOnce();
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

}  // namespace

const std::vector<Flow>& Flows() {
  static const std::vector<Flow>& flows =
      *new std::vector<Flow>{ActivationAtOnce(), WaitingActivation(), Kv(),
                             LayersGo(),         LayersComeBack(),    RotatingTenantGivesAll()};
  return flows;
}

namespace {

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
