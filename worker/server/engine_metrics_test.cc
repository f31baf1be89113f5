// What the engine's metrics tell of the block store, counted by a scheduler.
#include "worker/server/engine_metrics.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/metrics.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/core/scheduler_store_fixture.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

class EngineMetricsTest : public SchedulerStoreTest {
 protected:
  void Expect(const std::string& metric, const std::string& kind, int count) {
    engine_metrics_.Update(scheduler_, MappedSlabs(), StepDurations());
    EXPECT_THAT(metrics_.Text(), HasSubstr(absl::StrCat("palimpsest_worker_store_", metric,
                                                        "{kind=\"", kind, "\"} ", count, "\n")));
  }

  Metrics metrics_{MetricProcess::kWorker};
  EngineMetrics engine_metrics_{metrics_};
};

TEST_F(EngineMetricsTest, WhatWasNotAwaitedAnyLongerIsCounted) {
  Remember(Tokens(18));
  // Computing four blocks takes 16 ms.
  scheduler_.SetLoadCosts({.token_seconds = 1e-3});
  Expect("late_total", "answer", 0);
  Expect("late_total", "load", 0);
  const auto wait = [&] {
    now_ += absl::Milliseconds(16);
    scheduler_.PollStore(now_);
    EXPECT_THAT(Step(), ::testing::ElementsAre(0));
    Clear();
  };
  Add(Tokens(18));
  Step();
  wait();
  Expect("late_total", "answer", 1);
  Expect("late_total", "load", 0);
  for (int loads = 1; loads <= 2; ++loads) {
    Add(Tokens(18));
    Step();
    store_.AnswerAll();
    scheduler_.PollStore(now_);
    Step();
    wait();
    Expect("late_total", "load", loads);
  }
  Expect("late_total", "answer", 1);
}

TEST_F(EngineMetricsTest, WhatTheStoreLostIsCounted) {
  Add(Tokens(14));
  Ask();
  Step();
  Settle();
  ASSERT_EQ(store_.blocks(), 3u);
  while (store_.blocks() > 0) store_.DropOne();
  Expect("blocks_total", "lost", 0);
  Add(Tokens(14), 3);
  Step();
  Settle();
  Step();
  Step();
  Expect("blocks_total", "lost", 3);
}

TEST_F(EngineMetricsTest, WhatHadNoRoomAndIsOfferedAgainIsCounted) {
  // The store has 50 places.
  for (TokenId first = 10; first < 26; ++first) Remember(Tokens(14, first));
  ASSERT_EQ(store_.blocks(), 48u);
  Add(Tokens(18, 40));
  Ask();
  Step();
  Settle();
  Expect("blocks_total", "retried", 0);
  for (int i = 0; i < 3; ++i) store_.DropOne();
  Add(Tokens(6, 60));
  Ask();
  Step();
  Settle();
  Expect("blocks_total", "retried", 2);
}

}  // namespace
}  // namespace palimpsest
