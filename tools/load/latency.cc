#include "tools/load/latency.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace palimpsest::load {
namespace {

constexpr double kTailShare = 0.99;

// Up to the end of a request that was given up between two tokens.
std::vector<absl::Duration> Gaps(const RequestRecord& record) {
  std::vector<absl::Duration> gaps;
  for (size_t i = 1; i < record.tokens.size(); ++i) {
    gaps.push_back(record.tokens[i] - record.tokens[i - 1]);
  }
  if (record.outcome == Outcome::kUnfinished && !record.tokens.empty()) {
    gaps.push_back(record.end - record.tokens.back());
  }
  return gaps;
}

double Share(int64_t part, int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

struct Samples {
  std::vector<double> ttft, tbt, late;

  void Add(const RequestRecord& record) {
    late.push_back(absl::ToDoubleSeconds(record.sent - record.due));
    if (record.outcome == Outcome::kFailed) return;
    const absl::Duration first = record.tokens.empty() ? record.end : record.tokens.front();
    ttft.push_back(absl::ToDoubleSeconds(first - record.due));
    for (const absl::Duration gap : Gaps(record)) tbt.push_back(absl::ToDoubleSeconds(gap));
  }

  void Sort() {
    for (auto* values : {&ttft, &tbt, &late}) std::sort(values->begin(), values->end());
  }
};

// Of the sorted times those in [begin, end].
int64_t Within(const std::vector<absl::Duration>& times, absl::Duration begin, absl::Duration end) {
  return std::upper_bound(times.begin(), times.end(), end) -
         std::lower_bound(times.begin(), times.end(), begin);
}

void Count(const RequestRecord& record, const Objective& objective, LoadSummary& summary) {
  const bool finished = record.outcome == Outcome::kFinished;
  ++summary.requests;
  summary.finished += finished;
  summary.failed += record.outcome == Outcome::kFailed;
  summary.unfinished += record.outcome == Outcome::kUnfinished;
  summary.good += IsGood(record, objective);
  summary.preempted += finished && record.preemptions > 0;
  summary.prompt_tokens += finished ? record.prompt_tokens : 0;
  summary.cached_tokens += finished ? record.cached_tokens : 0;
  summary.output_tokens += static_cast<int64_t>(record.tokens.size());
  summary.makespan = std::max(summary.makespan, absl::ToDoubleSeconds(record.end));
}

}  // namespace

bool IsGood(const RequestRecord& record, const Objective& objective) {
  if (record.outcome != Outcome::kFinished || record.tokens.empty()) return false;
  if (record.tokens.front() - record.due > objective.ttft) return false;
  const std::vector<absl::Duration> gaps = Gaps(record);
  const auto within = std::count_if(gaps.begin(), gaps.end(),
                                    [&](absl::Duration gap) { return gap <= objective.tbt; });
  return static_cast<double>(within) >= kTailShare * static_cast<double>(gaps.size());
}

double Quantile(absl::Span<const double> sorted, double q) {
  if (sorted.empty()) return 0;
  // A product such as 0.99 * 100 lies a rounding error above 99.
  const double rank = std::ceil(q * static_cast<double>(sorted.size()) - 1e-9);
  return sorted[static_cast<size_t>(std::max(rank, 1.0)) - 1];
}

LoadSummary Summarize(absl::Span<const RequestRecord> records, const Objective& objective,
                      absl::Duration window, absl::Duration warm_up) {
  LoadSummary summary;
  Samples samples;
  int64_t in_window = 0;
  summary.digest = kEmptyDigest;
  for (const RequestRecord& record : records) {
    in_window += Within(record.tokens, warm_up, window);
    summary.digest = AddToDigest(summary.digest, record.digest);
    if (record.due < warm_up) continue;
    Count(record, objective, summary);
    samples.Add(record);
  }
  samples.Sort();
  const double seconds = absl::ToDoubleSeconds(window - warm_up);
  summary.goodput = static_cast<double>(summary.good) / seconds;
  summary.goodput_share = Share(summary.good, summary.requests);
  summary.output_tokens_per_second = static_cast<double>(in_window) / seconds;
  summary.preempted_share = Share(summary.preempted, summary.finished);
  summary.ttft_p50 = Quantile(samples.ttft, 0.5);
  summary.ttft_p90 = Quantile(samples.ttft, 0.9);
  summary.ttft_p99 = Quantile(samples.ttft, 0.99);
  if (!samples.ttft.empty()) {
    summary.ttft_mean = std::accumulate(samples.ttft.begin(), samples.ttft.end(), 0.0) /
                        static_cast<double>(samples.ttft.size());
  }
  summary.tbt_p50 = Quantile(samples.tbt, 0.5);
  summary.tbt_p90 = Quantile(samples.tbt, 0.9);
  summary.tbt_p99 = Quantile(samples.tbt, 0.99);
  summary.tbt_max = Quantile(samples.tbt, 1);
  summary.late_p99 = Quantile(samples.late, 0.99);
  summary.late_max = Quantile(samples.late, 1);
  return summary;
}

// FNV-1a over the value's bytes.
uint64_t AddToDigest(uint64_t digest, uint64_t value) {
  for (int byte = 0; byte < 8; ++byte) {
    digest ^= (value >> (8 * byte)) & 0xff;
    digest *= 0x100000001b3;
  }
  return digest;
}

}  // namespace palimpsest::load
