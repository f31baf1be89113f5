#include "router/core/worker_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

namespace palimpsest::router {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::vector<WorkerEndpoint> Endpoints() {
  return {{"alpha", "m", "a0"}, {"alpha", "m", "a1"}, {"beta", "m", "b0"}, {"alpha", "n", "a2"}};
}

WorkerDirectory Directory() {
  WorkerDirectory directory(Endpoints(), std::make_unique<LeastOutstanding>());
  for (size_t i = 0; i < Endpoints().size(); ++i) {
    directory.SetAddresses(i, {Endpoints()[i].address});
  }
  return directory;
}

void Poll(WorkerDirectory& directory, uint32_t worker, const PollResult& result = {}) {
  const WorkerId id(worker);
  directory.EndPoll(id, directory.BeginPoll(id), result);
}

void PollAll(WorkerDirectory& directory) {
  for (uint32_t i = 0; i < directory.size(); ++i) Poll(directory, i);
}

TEST(WorkerDirectory, NobodyIsChosenBeforeItsFirstCheck) {
  WorkerDirectory directory = Directory();
  const absl::Status status = directory.Choose("alpha", "m", {}, {}).status();
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_NE(status.message().find("a0: not checked yet"), absl::string_view::npos) << status;
  EXPECT_EQ(status.message().find("b0"), absl::string_view::npos)
      << "another tenant's worker is named: " << status;
}

TEST(WorkerDirectory, RequestsSpreadByOutstandingCount) {
  WorkerDirectory directory = Directory();
  PollAll(directory);
  std::map<uint32_t, int> chosen;
  for (int i = 0; i < 10; ++i) ++chosen[directory.Choose("alpha", "m", {}, {}).value().value()];
  EXPECT_EQ(chosen, (std::map<uint32_t, int>{{0, 5}, {1, 5}}));
}

TEST(WorkerDirectory, AConversationStaysWhereItWasUnlessThatIsBusy) {
  WorkerDirectory directory = Directory();
  PollAll(directory);
  const PlacementRequest turn = {.prompt = {}, .conversation = "chat-1"};
  const WorkerId home = directory.Choose("alpha", "m", turn, {}).value();
  const WorkerId other(1 - home.value());
  for (int i = 0; i < LeastOutstanding::kForgiven; ++i) {
    EXPECT_EQ(directory.Choose("alpha", "m", turn, {}).value(), home) << i;
  }
  EXPECT_EQ(directory.Choose("alpha", "m", turn, {}).value(), other) << "five against none";
  EXPECT_EQ(directory.Choose("alpha", "m", turn, {}).value(), other)
      << "which has the last turn now";
  EXPECT_EQ(directory.Choose("alpha", "m", {}, {}).value(), other) << "of no conversation";
  EXPECT_EQ(directory.Choose("beta", "m", turn, {}).value(), WorkerId(2))
      << "another tenant's conversation of that name";
  EXPECT_EQ(directory.Choose("alpha", "m", turn, {other}).value(), home);
}

TEST(WorkerDirectory, TiesGoToTheFreest) {
  WorkerDirectory directory = Directory();
  Poll(directory, 0, {.load = {.kv_blocks_free = 10, .kv_blocks_cached = 0}});
  Poll(directory, 1, {.load = {.kv_blocks_free = 5, .kv_blocks_cached = 20}});
  EXPECT_EQ(directory.Choose("alpha", "m", {}, {}).value(), WorkerId(1));
  EXPECT_EQ(directory.Choose("alpha", "m", {}, {}).value(), WorkerId(0));
}

TEST(WorkerDirectory, ExcludedWorkersAreNotTriedAgain) {
  WorkerDirectory directory = Directory();
  PollAll(directory);
  EXPECT_EQ(directory.Choose("alpha", "m", {}, {WorkerId(0)}).value(), WorkerId(1));
  EXPECT_FALSE(directory.Choose("alpha", "m", {}, {WorkerId(0), WorkerId(1)}).ok());
}

TEST(WorkerDirectory, FailureOutlivesAPollThatBeganBeforeIt) {
  WorkerDirectory directory = Directory();
  Poll(directory, 2);
  const uint64_t poll = directory.BeginPoll(WorkerId(2));
  directory.ReportFailure(WorkerId(2), absl::UnavailableError("socket closed"));
  directory.EndPoll(WorkerId(2), poll, {});
  EXPECT_FALSE(directory.Choose("beta", "m", {}, {}).ok());
  Poll(directory, 2);
  EXPECT_TRUE(directory.Choose("beta", "m", {}, {}).ok());
}

TEST(WorkerDirectory, DrainedWorkerReturnsOnlyAsAnotherProcess) {
  WorkerDirectory directory = Directory();
  Poll(directory, 2);
  directory.BeginDrain(WorkerId(2));
  Poll(directory, 2, {.draining = false});  // the worker has not heard of the drain yet
  EXPECT_FALSE(directory.Choose("beta", "m", {}, {}).ok());
  const uint64_t early = directory.BeginPoll(WorkerId(2));
  directory.EndDrain(WorkerId(2));
  directory.EndPoll(WorkerId(2), early, {.draining = false});
  EXPECT_FALSE(directory.Choose("beta", "m", {}, {}).ok());
  Poll(directory, 2, {.draining = true});
  EXPECT_FALSE(directory.Choose("beta", "m", {}, {}).ok());
  Poll(directory, 2, {.draining = false});
  EXPECT_TRUE(directory.Choose("beta", "m", {}, {}).ok());
}

TEST(WorkerDirectory, AWorkerIsSilentAfterTwoPollsWithoutAnyAnswer) {
  WorkerDirectory directory = Directory();
  const WorkerId id(0);
  const absl::Time t0 = absl::UnixEpoch();
  const PollResult nothing{absl::UnavailableError("deadline exceeded")};
  Poll(directory, 0, {.answered_at = t0});
  Poll(directory, 0, nothing);
  EXPECT_EQ(directory.SilentSince(id), absl::InfiniteFuture());
  Poll(directory, 0, nothing);
  EXPECT_EQ(directory.SilentSince(id), t0);
  // A worker that waits for its broker does not serve, but its streams go on.
  Poll(directory, 0, {absl::UnavailableError("it does not serve"), t0 + absl::Seconds(9)});
  EXPECT_EQ(directory.SilentSince(id), absl::InfiniteFuture());
  EXPECT_FALSE(directory.List()[0].healthy);
}

TEST(WorkerDirectory, ANameWithoutAddressesIsNamedInTheError) {
  WorkerDirectory directory({{"alpha", "m", "name:1"}, {"beta", "m", "other:1"}},
                            std::make_unique<LeastOutstanding>());
  const auto error = [&] {
    return std::string(directory.Choose("alpha", "m", {}, {}).status().message());
  };
  EXPECT_THAT(error(), HasSubstr("name:1: its name is not resolved yet"));
  directory.SetProblem(0, absl::UnavailableError("no such name"));
  EXPECT_THAT(error(), HasSubstr("name:1: no such name"));
  directory.SetAddresses(0, {});
  EXPECT_THAT(error(), AllOf(HasSubstr("no address"), Not(HasSubstr("other"))));
}

TEST(WorkerDirectory, EveryAddressOfANameIsAWorker) {
  WorkerDirectory directory({{"alpha", "m", "name:1"}, {"alpha", "m", "x"}},
                            std::make_unique<LeastOutstanding>());
  EXPECT_EQ(directory.SetAddresses(0, {"x", "y"}).size(), 2);
  EXPECT_TRUE(directory.SetAddresses(1, {"x"}).empty()) << "the same worker under two names";
  PollAll(directory);
  EXPECT_NE(directory.Choose("alpha", "m", {}, {}).value(),
            directory.Choose("alpha", "m", {}, {}).value());
  directory.SetAddresses(0, {});
  directory.Finished(WorkerId(1));
  EXPECT_THAT(directory.TakeGone(), ElementsAre(WorkerId(1))) << "x is still there by itself";
}

TEST(WorkerDirectory, AWorkerThatLeavesFinishesWhatItHas) {
  WorkerDirectory directory({{"alpha", "m", "name:1"}}, std::make_unique<LeastOutstanding>());
  directory.SetAddresses(0, {"x"});
  PollAll(directory);
  const WorkerId x = directory.Choose("alpha", "m", {}, {}).value();
  const uint64_t poll = directory.BeginPoll(x);
  const std::vector<NewWorker> added = directory.SetAddresses(0, {"y"});
  ASSERT_EQ(added.size(), 1);
  EXPECT_TRUE(directory.View(x).draining);
  EXPECT_THAT(std::string(directory.Choose("alpha", "m", {}, {}).status().message()),
              AllOf(HasSubstr("y: not checked yet"), Not(HasSubstr("x:"))));
  EXPECT_THAT(directory.TakeGone(), IsEmpty());
  directory.Finished(x);
  EXPECT_THAT(directory.TakeGone(), IsEmpty()) << "a poll runs";
  directory.EndPoll(x, poll, {});
  EXPECT_THAT(directory.TakeGone(), ElementsAre(x));
  directory.ReportFailure(x, absl::UnavailableError("late news"));
  EXPECT_NE(directory.SetAddresses(0, {"x", "y"}).front().id, x) << "ids do not return";
}

TEST(WorkerDirectory, AnAddressThatReturnsInTimeIsTheSameWorker) {
  WorkerDirectory directory({{"alpha", "m", "name:1"}}, std::make_unique<LeastOutstanding>());
  directory.SetAddresses(0, {"x"});
  PollAll(directory);
  const WorkerId x = directory.Choose("alpha", "m", {}, {}).value();
  directory.SetAddresses(0, {});
  EXPECT_TRUE(directory.SetAddresses(0, {"x"}).empty());
  EXPECT_EQ(directory.Choose("alpha", "m", {}, {}).value(), x);
}

TEST(WorkerDirectory, AListOfOneTenantHoldsNobodyElse) {
  WorkerDirectory directory = Directory();
  for (const WorkerView& view : directory.ListTenant("alpha")) {
    EXPECT_EQ(view.endpoint.tenant, "alpha");
  }
  EXPECT_EQ(directory.ListTenant("alpha").size(), 3);
  EXPECT_TRUE(directory.ListTenant("gamma").empty());
}

TEST(WorkerDirectoryFuzz, ChoicesAreAlwaysServableAndCountsAddUp) {
  std::mt19937 random(7);
  const auto draw = [&](int n) { return static_cast<uint32_t>(random() % n); };
  WorkerDirectory directory = Directory();
  std::vector<WorkerId> running;
  for (int step = 0; step < 20000; ++step) {
    const WorkerId id(draw(4));
    switch (draw(6)) {
      case 0:
        directory.ReportFailure(id, absl::UnavailableError("gone"));
        break;
      case 1:
      case 2:
        Poll(directory, id.value(), {.draining = draw(4) == 0, .load = {.kv_blocks_free = 3}});
        break;
      case 3:
        directory.BeginDrain(id);
        directory.EndDrain(id);
        break;
      case 4: {
        const std::string tenant = draw(2) == 0 ? "alpha" : "beta";
        const absl::StatusOr<WorkerId> chosen = directory.Choose(tenant, "m", {}, {id});
        if (!chosen.ok()) break;
        const WorkerView view = directory.List()[chosen->value()];
        ASSERT_EQ(view.endpoint.tenant, tenant);
        ASSERT_EQ(view.endpoint.model, "m");
        ASSERT_TRUE(view.healthy && !view.draining);
        ASSERT_NE(*chosen, id);
        running.push_back(*chosen);
        break;
      }
      case 5:
        if (running.empty()) break;
        directory.Finished(running.back());
        running.pop_back();
        break;
    }
    size_t outstanding = 0;
    for (const WorkerView& view : directory.List()) outstanding += view.outstanding;
    ASSERT_EQ(outstanding, running.size());
  }
}

}  // namespace
}  // namespace palimpsest::router
