// The metrics of this process: handles by name from metrics_table.h, and the HTTP endpoint that
// Prometheus scrapes.
//
//   Metrics metrics(MetricProcess::kBroker);
//   prometheus::Counter& misses =
//       metrics.Counter<"palimpsest_broker_revoke_deadline_misses_total">("alpha");
//   misses.Increment();
//
// A name that is not in the table, a handle of the wrong type or the wrong number of label values
// does not compile. Handles live as long as the Metrics and are thread-safe; getting one takes a
// lock and a look-up, so components keep them. Label values must come from a bounded set
// (configuration, enumerations), never from requests.
#ifndef PALIMPSEST_COMMON_METRICS_H_
#define PALIMPSEST_COMMON_METRICS_H_

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/metrics_table.h"

namespace prometheus {
class Exposer;
}

namespace palimpsest {

// A string as a template argument.
template <size_t N>
struct MetricName {
  consteval MetricName(const char (&name)[N]) { std::copy_n(name, N, text); }  // NOLINT: implicit
  constexpr std::string_view view() const { return {text, N - 1}; }
  char text[N];
};

class Metrics {
 public:
  // Registers the rows of `process`. Those without labels are exported from the start.
  explicit Metrics(MetricProcess process);
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Requires that the row belongs to this object's process.
  template <MetricName name, typename... Labels>
  prometheus::Counter& Counter(const Labels&... labels) {
    return GetCounter(Row<name, MetricType::kCounter, sizeof...(Labels)>(),
                      {std::string(labels)...});
  }
  template <MetricName name, typename... Labels>
  prometheus::Gauge& Gauge(const Labels&... labels) {
    return GetGauge(Row<name, MetricType::kGauge, sizeof...(Labels)>(), {std::string(labels)...});
  }
  template <MetricName name, typename... Labels>
  prometheus::Histogram& Histogram(const Labels&... labels) {
    return GetHistogram(Row<name, MetricType::kHistogram, sizeof...(Labels)>(),
                        {std::string(labels)...});
  }

  // What a scrape returns now, in Prometheus's text format.
  std::string Text() const;

  const std::shared_ptr<prometheus::Registry>& registry() const { return registry_; }

 private:
  template <MetricName name, MetricType type, size_t labels>
  static consteval size_t Row() {
    constexpr size_t row = FindMetric(name.view());
    static_assert(row < kMetricTable.size(), "no such metric in metrics_table.h");
    static_assert(kMetricTable[row].type == type, "the metric has another type");
    static_assert(kMetricTable[row].label_count() == labels, "wrong number of label values");
    return row;
  }

  prometheus::Counter& GetCounter(size_t row, const std::vector<std::string>& labels);
  prometheus::Gauge& GetGauge(size_t row, const std::vector<std::string>& labels);
  prometheus::Histogram& GetHistogram(size_t row, const std::vector<std::string>& labels);

  const MetricProcess process_;
  const std::shared_ptr<prometheus::Registry> registry_;
  // By row of the table; null for rows of other processes or types.
  std::vector<prometheus::Family<prometheus::Counter>*> counters_;
  std::vector<prometheus::Family<prometheus::Gauge>*> gauges_;
  std::vector<prometheus::Family<prometheus::Histogram>*> histograms_;
};

// Serves `metrics` under http://ADDRESS/metrics until destroyed.
class MetricsServer {
 public:
  // `address`: "127.0.0.1:9100"; port 0 takes a free one. FailedPrecondition when it cannot be
  // bound.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const Metrics& metrics,
                                                              const std::string& address);
  ~MetricsServer();

  // With the port that was taken.
  const std::string& address() const { return address_; }

 private:
  MetricsServer() = default;

  std::unique_ptr<prometheus::Exposer> exposer_;
  std::string address_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_METRICS_H_
