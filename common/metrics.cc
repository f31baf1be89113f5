#include "common/metrics.h"

#include <netdb.h>
#include <prometheus/exposer.h>
#include <prometheus/text_serializer.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/fd.h"

namespace palimpsest {
namespace {

// 1, 2, 5, 10, ... times `first`, up to `last`.
std::vector<double> Decades(double first, double last) {
  std::vector<double> bounds;
  for (double decade = first; decade <= last * 1.001; decade *= 10) {
    for (const double step : {1.0, 2.0, 5.0}) {
      if (decade * step <= last * 1.001) bounds.push_back(decade * step);
    }
  }
  return bounds;
}

std::vector<double> Bounds(MetricBuckets buckets) {
  switch (buckets) {
    case MetricBuckets::kNone:
      return {};
    case MetricBuckets::kShort:
      return Decades(1e-5, 10);
    case MetricBuckets::kLong:
      return Decades(1e-3, 100);
    case MetricBuckets::kCounts:
      return {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024};
  }
  return {};
}

std::map<std::string, std::string> LabelMap(size_t row, const std::vector<std::string>& values) {
  std::map<std::string, std::string> labels;
  for (size_t i = 0; i < values.size(); ++i) {
    labels.emplace(kMetricTable[row].labels[i], values[i]);
  }
  return labels;
}

template <typename Family>
Family& OfThisProcess(Family* family, size_t row, MetricProcess process) {
  if (family == nullptr) {
    std::fprintf(stderr, "%s is not a metric of the %s\n", kMetricTable[row].name.data(),
                 MetricProcessName(process).data());
    std::abort();
  }
  return *family;
}

// Opens a TCP connection to HOST:PORT of this machine and closes it, without waiting.
void TouchListener(const std::string& address) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (absl::StartsWith(host, "[")) host = host.substr(1, host.size() - 2);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  if (getaddrinfo(host.empty() ? nullptr : host.c_str(), address.c_str() + colon + 1, &hints,
                  &list) != 0) {
    return;
  }
  const UniqueFd fd(socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd.valid()) static_cast<void>(connect(fd.get(), list->ai_addr, list->ai_addrlen));
  freeaddrinfo(list);
}

template <typename Builder>
auto* Register(Builder builder, const MetricDescriptor& row, prometheus::Registry& registry) {
  return &builder.Name(std::string(row.name)).Help(std::string(row.help)).Register(registry);
}

}  // namespace

Metrics::Metrics(MetricProcess process)
    : process_(process),
      registry_(std::make_shared<prometheus::Registry>()),
      counters_(kMetricTable.size()),
      gauges_(kMetricTable.size()),
      histograms_(kMetricTable.size()) {
  for (size_t i = 0; i < kMetricTable.size(); ++i) {
    const MetricDescriptor& row = kMetricTable[i];
    if (row.process != process) continue;
    const bool export_now = row.label_count() == 0;
    switch (row.type) {
      case MetricType::kCounter:
        counters_[i] = Register(prometheus::BuildCounter(), row, *registry_);
        if (export_now) GetCounter(i, {});
        break;
      case MetricType::kGauge:
        gauges_[i] = Register(prometheus::BuildGauge(), row, *registry_);
        if (export_now) GetGauge(i, {});
        break;
      case MetricType::kHistogram:
        histograms_[i] = Register(prometheus::BuildHistogram(), row, *registry_);
        if (export_now) GetHistogram(i, {});
        break;
    }
  }
}

std::string Metrics::Text() const {
  return prometheus::TextSerializer().Serialize(registry_->Collect());
}

prometheus::Counter& Metrics::GetCounter(size_t row, const std::vector<std::string>& labels) {
  return OfThisProcess(counters_[row], row, process_).Add(LabelMap(row, labels));
}

prometheus::Gauge& Metrics::GetGauge(size_t row, const std::vector<std::string>& labels) {
  return OfThisProcess(gauges_[row], row, process_).Add(LabelMap(row, labels));
}

prometheus::Histogram& Metrics::GetHistogram(size_t row, const std::vector<std::string>& labels) {
  return OfThisProcess(histograms_[row], row, process_)
      .Add(LabelMap(row, labels), Bounds(kMetricTable[row].buckets));
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(const Metrics& metrics,
                                                                    const std::string& address) {
  std::unique_ptr<MetricsServer> server(new MetricsServer);
  try {
    server->exposer_ = std::make_unique<prometheus::Exposer>(address, /*num_threads=*/1);
  } catch (const std::exception& error) {
    return absl::FailedPreconditionError(absl::StrCat("cannot serve metrics on ", address, ": ",
                                                      error.what(),
                                                      "; choose another address or port"));
  }
  server->exposer_->RegisterCollectable(metrics.registry());
  const std::vector<int> ports = server->exposer_->GetListeningPorts();
  server->address_ =
      absl::StrCat(address.substr(0, address.rfind(':')), ":", ports.empty() ? 0 : ports.front());
  return server;
}

// civetweb looks at its stop flag after each connection, else every two seconds: connections that
// say nothing make it look.
MetricsServer::~MetricsServer() {
  if (exposer_ == nullptr) return;
  std::atomic<bool> stopped{false};
  std::thread waker([&] {
    while (!stopped) {
      TouchListener(address_);
      absl::SleepFor(absl::Milliseconds(5));
    }
  });
  exposer_.reset();
  stopped = true;
  waker.join();
}

}  // namespace palimpsest
