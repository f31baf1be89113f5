#include "broker/core/prefetch/return_times.h"

#include <algorithm>
#include <cassert>

namespace palimpsest::prefetch {
namespace {

absl::Duration BinBegin(size_t bin) {
  return bin == 0 ? absl::ZeroDuration() : absl::Seconds(reuse::AgeBinEnd(bin - 1));
}

}  // namespace

void ReturnTimes::OnEnd(cache::Ending how) {
  Evidence& evidence = by_ending_[static_cast<size_t>(how)];
  constexpr double kKeep = 1 - 1 / kMemory;
  evidence.ended = evidence.ended * kKeep + 1;
  evidence.returned *= kKeep;
  for (double& gap : evidence.gaps) gap *= kKeep;
}

void ReturnTimes::OnReturn(cache::Ending how, absl::Duration gap) {
  assert(gap >= absl::ZeroDuration());
  Evidence& evidence = by_ending_[static_cast<size_t>(how)];
  size_t bin = 0;
  while (bin < reuse::kLastAgeBin && gap >= absl::Seconds(reuse::AgeBinEnd(bin))) ++bin;
  evidence.returned += 1;
  evidence.gaps[bin] += 1;
}

std::optional<ReturnWindow> ReturnTimes::Expect(cache::Ending how) const {
  const Evidence& evidence = by_ending_[static_cast<size_t>(how)];
  if (evidence.returned < kLeastReturns) return std::nullopt;
  const double tail = kTail * evidence.returned;
  size_t first = 0, last = reuse::kLastAgeBin;
  double before = 0, behind = 0;
  while (first < last && before + evidence.gaps[first] <= tail) before += evidence.gaps[first++];
  while (last > first && behind + evidence.gaps[last] <= tail) behind += evidence.gaps[last--];
  const double within = evidence.returned - before - behind;
  return ReturnWindow{
      .probability = std::clamp(within / std::max(evidence.ended, evidence.returned), 0.0, 1.0),
      .early = BinBegin(first),
      .late = absl::Seconds(reuse::AgeBinEnd(last))};
}

}  // namespace palimpsest::prefetch
