#include "common/metrics.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <string>

#include "common/monotonic_time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(MetricTable, NamesFollowTheConventions) {
  std::set<std::string_view> names;
  for (const MetricDescriptor& row : kMetricTable) {
    const std::string name(row.name);
    EXPECT_TRUE(names.insert(row.name).second) << name << " occurs twice";
    const std::string prefix = "palimpsest_" + std::string(MetricProcessName(row.process)) + "_";
    EXPECT_EQ(name.rfind(prefix, 0), 0) << name;
    for (const char c : name) EXPECT_TRUE(std::islower(c) || c == '_') << name;
    EXPECT_EQ(name.ends_with("_total"), row.type == MetricType::kCounter) << name;
    const std::string base =
        row.type == MetricType::kCounter ? name.substr(0, name.size() - 6) : name;
    EXPECT_EQ(base.ends_with("_seconds"), row.unit == MetricUnit::kSeconds) << name;
    EXPECT_EQ(base.ends_with("_bytes"), row.unit == MetricUnit::kBytes) << name;
    EXPECT_EQ(row.buckets != MetricBuckets::kNone, row.type == MetricType::kHistogram) << name;
    EXPECT_TRUE(row.help.ends_with(".")) << name;
  }
}

TEST(Metrics, HandlesOfTheSameLabelsAreOneMetric) {
  Metrics metrics(MetricProcess::kBroker);
  metrics.Counter<"palimpsest_broker_transfers_total">("grant", "kv_demand").Increment();
  metrics.Counter<"palimpsest_broker_transfers_total">("grant", "kv_demand").Increment(2);
  metrics.Gauge<"palimpsest_broker_slabs">("free").Set(7);
  metrics.Histogram<"palimpsest_broker_transfer_seconds">("grant", "kv_demand").Observe(0.003);
  const std::string text = metrics.Text();
  EXPECT_THAT(text, HasSubstr("# TYPE palimpsest_broker_transfers_total counter"));
  EXPECT_THAT(
      text, HasSubstr("palimpsest_broker_transfers_total{kind=\"grant\",reason=\"kv_demand\"} 3"));
  EXPECT_THAT(text, HasSubstr("palimpsest_broker_slabs{state=\"free\"} 7"));
  EXPECT_THAT(text, HasSubstr("le=\"0.005\"} 1"));
}

TEST(Metrics, RowsWithoutLabelsAreThereFromTheStartAndOthersProcessesAreNot) {
  const std::string text = Metrics(MetricProcess::kWorker).Text();
  EXPECT_THAT(text, HasSubstr("palimpsest_worker_swap_failures_total 0"));
  EXPECT_THAT(text, Not(HasSubstr("palimpsest_broker")));
  EXPECT_THAT(text, Not(HasSubstr("palimpsest_router")));
}

TEST(MetricsDeathTest, RowOfAnotherProcessAborts) {
  Metrics metrics(MetricProcess::kRouter);
  EXPECT_DEATH(metrics.Gauge<"palimpsest_broker_sessions">(), "not a metric of the router");
}

TEST(MetricsServer, TakesAFreePortAndSaysWhich) {
  Metrics metrics(MetricProcess::kRouter);
  absl::StatusOr<std::unique_ptr<MetricsServer>> server =
      MetricsServer::Start(metrics, "127.0.0.1:0");
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_THAT((*server)->address(), HasSubstr("127.0.0.1:"));
  EXPECT_FALSE((*server)->address().ends_with(":0"));

  const absl::Status taken = MetricsServer::Start(metrics, (*server)->address()).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(taken));
  EXPECT_THAT(std::string(taken.message()), HasSubstr((*server)->address()));
}

TEST(MetricsServer, StopsAtOnce) {
  Metrics metrics(MetricProcess::kRouter);
  absl::Duration fastest = absl::InfiniteDuration();
  for (int i = 0; i < 3; ++i) {
    auto server = MetricsServer::Start(metrics, "127.0.0.1:0").value();
    const absl::Time begin = MonotonicNow();
    server.reset();
    fastest = std::min(fastest, MonotonicNow() - begin);
  }
  EXPECT_LT(fastest, absl::Milliseconds(500));
}

}  // namespace
}  // namespace palimpsest
