#include "tools/load/schedule.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace palimpsest::load {
namespace {

// SplitMix64 (Steele, Lea, Flood 2014). The distributions of <random> differ between libraries.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  // Of 0 .. bound - 1; the bias is below bound / 2^64.
  uint64_t Below(uint64_t bound) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(Next()) * bound) >> 64);
  }

  // Of [0, 1).
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

// Time since the trace's beginning of arrival `index`, which may be past its end: the trace goes
// round, a mean gap behind its last arrival.
absl::Duration ArrivalAt(absl::Span<const absl::Duration> arrivals, size_t index) {
  const absl::Duration mean = arrivals.back() / static_cast<double>(arrivals.size() - 1);
  const auto rounds = static_cast<int64_t>(index / arrivals.size());
  return arrivals[index % arrivals.size()] + rounds * (arrivals.back() + mean);
}

// When the requests of a tenant are due.
std::vector<absl::Duration> Dues(absl::Span<const absl::Duration> arrivals,
                                 const ScheduleOptions& options, size_t tenant) {
  const auto count = static_cast<size_t>(
      std::llround(options.rates[tenant] * absl::ToDoubleSeconds(options.duration)));
  const size_t shift = Random(options.seed).Below(arrivals.size());
  const size_t begin = (shift + tenant * arrivals.size() / options.rates.size()) % arrivals.size();
  // Up to the arrival behind the last one: the last gap counts too.
  const absl::Duration first = ArrivalAt(arrivals, begin);
  const absl::Duration span = ArrivalAt(arrivals, begin + count) - first;
  std::vector<absl::Duration> dues(count);
  for (size_t i = 0; i < count; ++i) {
    const double place = span > absl::ZeroDuration()
                             ? absl::FDivDuration(ArrivalAt(arrivals, begin + i) - first, span)
                             : static_cast<double>(i) / static_cast<double>(count);
    dues[i] = std::min(options.duration * place, options.duration - absl::Nanoseconds(1));
  }
  return dues;
}

// Seeds of prompts, of one tenant at one point.
uint64_t PromptSeed(const ScheduleOptions& options, size_t tenant) {
  return MixSeeds(MixSeeds(options.seed, tenant + 1), options.point);
}

absl::Duration DrawWait(Random& drawn, const ConversationRules& rules) {
  const absl::Duration mean =
      drawn.Uniform() < rules.tool_share ? rules.tool_wait : rules.human_wait;
  return mean * -std::log1p(-drawn.Uniform());
}

}  // namespace

uint64_t MixSeeds(uint64_t a, uint64_t b) { return Random(a ^ Random(b).Next()).Next(); }

std::vector<std::vector<ScheduledRequest>> MakeSchedule(absl::Span<const absl::Duration> arrivals,
                                                        absl::Span<const RequestLengths> lengths,
                                                        const ScheduleOptions& options) {
  std::vector<std::vector<ScheduledRequest>> schedule;
  for (size_t tenant = 0; tenant < options.rates.size(); ++tenant) {
    Random drawn(MixSeeds(options.seed, tenant));
    std::vector<ScheduledRequest>& requests = schedule.emplace_back();
    for (const absl::Duration due : Dues(arrivals, options, tenant)) {
      ScheduledRequest request;
      request.due = due;
      request.lengths = lengths[drawn.Below(lengths.size())];
      if (options.prompt_tokens > 0) request.lengths.prompt_tokens = options.prompt_tokens;
      request.seed = MixSeeds(PromptSeed(options, tenant), requests.size());
      requests.push_back(request);
    }
  }
  return schedule;
}

std::vector<std::vector<ScheduledRequest>> MakeConversations(
    absl::Span<const absl::Duration> arrivals, absl::Span<const Conversation> conversations,
    const ScheduleOptions& options, const ConversationRules& rules) {
  std::vector<std::vector<ScheduledRequest>> schedule;
  for (size_t tenant = 0; tenant < options.rates.size(); ++tenant) {
    Random drawn(MixSeeds(options.seed, tenant));
    const uint64_t prompts = PromptSeed(options, tenant);
    std::vector<ScheduledRequest>& requests = schedule.emplace_back();
    for (const absl::Duration due : Dues(arrivals, options, tenant)) {
      const size_t first = requests.size();
      for (const RequestLengths& turn : conversations[drawn.Below(conversations.size())]) {
        ScheduledRequest request{.due = due, .lengths = turn};
        request.seed = MixSeeds(prompts, requests.size());
        if (requests.size() == first) {
          request.lengths.prompt_tokens += rules.context_tokens;
          request.system_tokens = rules.system_tokens;
          request.system_seed = MixSeeds(prompts, UINT64_MAX);
        } else {
          request.due = DrawWait(drawn, rules);
          request.continues = requests.size() - 1;
        }
        requests.push_back(request);
      }
    }
  }
  return schedule;
}

std::vector<int32_t> RandomPrompt(uint64_t seed, int32_t tokens, int32_t vocabulary) {
  Random random(seed);
  std::vector<int32_t> prompt(static_cast<size_t>(tokens));
  for (int32_t& id : prompt) {
    id = static_cast<int32_t>(random.Below(static_cast<uint64_t>(vocabulary)));
  }
  return prompt;
}

}  // namespace palimpsest::load
