#include "router/core/admission.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace palimpsest::router {
namespace {

const absl::Time kStart = absl::FromUnixSeconds(1000);
constexpr absl::Duration kTimeout = absl::Seconds(5);

std::map<std::string, AdmissionLimits> Tenants(int32_t in_flight, int32_t queue) {
  return {{"alpha", {in_flight, queue, kTimeout}}, {"beta", {in_flight, queue, kTimeout}}};
}

// Enters and requires that the request is admitted at once.
TicketId Admit(Admission& admission, const char* tenant) {
  const TicketId id = admission.Enter(tenant, kStart, absl::InfiniteFuture()).value();
  const std::vector<AdmissionDecision> decisions = admission.RunOnce(kStart);
  EXPECT_EQ(decisions.size(), 1);
  EXPECT_EQ(decisions.front().ticket, id);
  EXPECT_TRUE(decisions.front().status.ok());
  return id;
}

TicketId Queue(Admission& admission, const char* tenant,
               absl::Time deadline = absl::InfiniteFuture()) {
  const TicketId id = admission.Enter(tenant, kStart, deadline).value();
  EXPECT_TRUE(admission.RunOnce(kStart).empty());
  return id;
}

TEST(Admission, FullQueueIsResourceExhaustedAndTheOtherTenantUnaffected) {
  Admission admission(100, Tenants(1, 1));
  Admit(admission, "alpha");
  Queue(admission, "alpha");
  const absl::Status full = admission.Enter("alpha", kStart, absl::InfiniteFuture()).status();
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  Admit(admission, "beta");
}

TEST(Admission, ZeroQueueAdmitsWhatFits) {
  Admission admission(100, Tenants(2, 0));
  Admit(admission, "alpha");
  const TicketId second = Admit(admission, "alpha");
  EXPECT_FALSE(admission.Enter("alpha", kStart, absl::InfiniteFuture()).ok());
  admission.Leave(second);
  Admit(admission, "alpha");
}

TEST(Admission, WaitersAreAdmittedInOrderOfArrival) {
  Admission admission(100, Tenants(1, 3));
  TicketId running = Admit(admission, "alpha");
  const std::vector<TicketId> waiting = {Queue(admission, "alpha"), Queue(admission, "alpha"),
                                         Queue(admission, "alpha")};
  for (TicketId expected : waiting) {
    admission.Leave(running);
    const std::vector<AdmissionDecision> decisions = admission.RunOnce(kStart);
    ASSERT_EQ(decisions.size(), 1);
    EXPECT_EQ(decisions[0].ticket, expected);
    running = expected;
  }
}

TEST(Admission, TenantsTakeTurnsWhenTheCommonLimitBinds) {
  Admission admission(2, Tenants(2, 8));
  std::vector<TicketId> running = {Admit(admission, "alpha"), Admit(admission, "alpha")};
  std::map<uint64_t, std::string> owner;
  for (int i = 0; i < 4; ++i) owner[Queue(admission, "alpha").value()] = "alpha";
  for (int i = 0; i < 2; ++i) owner[Queue(admission, "beta").value()] = "beta";
  std::vector<std::string> order;
  for (int i = 0; i < 4; ++i) {
    admission.Leave(running.front());
    running.erase(running.begin());
    for (const AdmissionDecision& decision : admission.RunOnce(kStart)) {
      order.push_back(owner.at(decision.ticket.value()));
      running.push_back(decision.ticket);
    }
  }
  std::sort(order.begin(), order.end());
  EXPECT_EQ(order, (std::vector<std::string>{"alpha", "alpha", "beta", "beta"}));
}

TEST(Admission, QueueTimeoutAndOwnDeadlineAreToldApart) {
  Admission admission(100, Tenants(1, 2));
  Admit(admission, "alpha");
  const TicketId hurried = Queue(admission, "alpha", kStart + absl::Seconds(1));
  const TicketId patient = Queue(admission, "alpha");
  EXPECT_EQ(admission.NextExpiry(), kStart + absl::Seconds(1));

  std::vector<AdmissionDecision> decisions = admission.RunOnce(kStart + absl::Seconds(1));
  ASSERT_EQ(decisions.size(), 1);
  EXPECT_EQ(decisions[0].ticket, hurried);
  EXPECT_TRUE(absl::IsDeadlineExceeded(decisions[0].status));

  decisions = admission.RunOnce(kStart + kTimeout);
  ASSERT_EQ(decisions.size(), 1);
  EXPECT_EQ(decisions[0].ticket, patient);
  EXPECT_TRUE(absl::IsResourceExhausted(decisions[0].status));
  EXPECT_EQ(admission.Load("alpha").waiting, 0);
  EXPECT_EQ(admission.NextExpiry(), absl::InfiniteFuture());
}

TEST(Admission, PastDeadlineAndUnknownTenantAreRefused) {
  Admission admission(100, Tenants(1, 2));
  EXPECT_TRUE(absl::IsDeadlineExceeded(admission.Enter("alpha", kStart, kStart).status()));
  EXPECT_TRUE(absl::IsNotFound(admission.Enter("gamma", kStart, absl::InfiniteFuture()).status()));
}

// Random arrivals, departures, abandonments and passing time, against what the caller can count.
class AdmissionModel {
 public:
  explicit AdmissionModel(uint32_t seed) : random_(seed) {
    for (const char* name : {"a", "b", "c"}) {
      limits_[name] = {Draw(1, 4), Draw(0, 5), absl::Seconds(Draw(1, 9))};
    }
    total_ = Draw(1, 8);
    admission_ = std::make_unique<Admission>(total_, limits_);
  }

  void Step() {
    switch (Draw(0, 3)) {
      case 0:
      case 1: {
        const std::string tenant(1, static_cast<char>('a' + Draw(0, 2)));
        const absl::Time deadline = now_ + absl::Seconds(Draw(0, 12));
        const absl::StatusOr<TicketId> id = admission_->Enter(tenant, now_, deadline);
        if (id.ok()) {
          waiting_[id->value()] = {tenant, deadline, now_ + limits_[tenant].queue_timeout};
        } else if (absl::IsResourceExhausted(id.status())) {
          EXPECT_EQ(CountWaiting(tenant), limits_[tenant].queue);
        } else {
          EXPECT_TRUE(absl::IsDeadlineExceeded(id.status()) && deadline <= now_);
        }
        break;
      }
      case 2: {
        std::vector<uint64_t> ids;
        for (const auto& [id, entry] : waiting_) ids.push_back(id);
        for (const auto& [id, tenant] : running_) ids.push_back(id);
        if (ids.empty()) break;
        const uint64_t id = ids[Draw(0, static_cast<int>(ids.size()) - 1)];
        admission_->Leave(TicketId(id));
        admission_->Leave(TicketId(id));  // twice is harmless
        waiting_.erase(id);
        running_.erase(id);
        break;
      }
      case 3:
        now_ += absl::Seconds(Draw(0, 3));
        break;
    }
    for (const AdmissionDecision& decision : admission_->RunOnce(now_)) Apply(decision);
    CheckInvariants();
  }

 private:
  struct Entry {
    std::string tenant;
    absl::Time deadline;
    absl::Time timeout;
  };

  int Draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  int CountWaiting(const std::string& tenant) const {
    return static_cast<int>(std::count_if(waiting_.begin(), waiting_.end(), [&](const auto& w) {
      return w.second.tenant == tenant;
    }));
  }
  int CountRunning(const std::string& tenant) const {
    return static_cast<int>(std::count_if(running_.begin(), running_.end(),
                                          [&](const auto& r) { return r.second == tenant; }));
  }

  void Apply(const AdmissionDecision& decision) {
    const auto found = waiting_.find(decision.ticket.value());
    ASSERT_NE(found, waiting_.end()) << "a decision for a ticket that does not wait";
    const Entry entry = found->second;
    if (decision.status.ok()) {
      EXPECT_GT(std::min(entry.deadline, entry.timeout), now_);
      for (const auto& [id, other] : waiting_) {
        const bool same_queue = other.tenant == entry.tenant;
        EXPECT_FALSE(same_queue && id < decision.ticket.value()) << "overtaken";
      }
      running_[decision.ticket.value()] = entry.tenant;
    } else {
      EXPECT_LE(std::min(entry.deadline, entry.timeout), now_);
    }
    waiting_.erase(found);
  }

  void CheckInvariants() {
    EXPECT_EQ(admission_->total_in_flight(), static_cast<int>(running_.size()));
    EXPECT_LE(admission_->total_in_flight(), total_);
    absl::Time next = absl::InfiniteFuture();
    for (const auto& [id, entry] : waiting_) {
      next = std::min({next, entry.deadline, entry.timeout});
    }
    EXPECT_EQ(admission_->NextExpiry(), next);
    EXPECT_GT(next, now_);
    for (const auto& [name, limits] : limits_) {
      const AdmissionLoad load = admission_->Load(name);
      EXPECT_EQ(load.in_flight, CountRunning(name));
      EXPECT_EQ(load.waiting, CountWaiting(name));
      EXPECT_LE(load.in_flight, limits.in_flight);
      EXPECT_LE(load.waiting, limits.queue);
      const bool room = load.in_flight < limits.in_flight && running_.size() < total_;
      EXPECT_FALSE(room && load.waiting > 0) << "a request waits although there is room";
    }
  }

  std::mt19937 random_;
  std::map<std::string, AdmissionLimits> limits_;
  int32_t total_ = 0;
  std::unique_ptr<Admission> admission_;
  absl::Time now_ = kStart;
  std::map<uint64_t, Entry> waiting_;
  std::map<uint64_t, std::string> running_;
};

TEST(AdmissionFuzz, InvariantsHoldUnderRandomActions) {
  for (uint32_t seed = 0; seed < 200 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    AdmissionModel model(seed);
    for (int step = 0; step < 300 && !testing::Test::HasFailure(); ++step) model.Step();
  }
}

}  // namespace
}  // namespace palimpsest::router
