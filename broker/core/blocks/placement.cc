#include "broker/core/blocks/placement.h"

#include <algorithm>
#include <cassert>
#include <cmath>

namespace palimpsest::blocks {

double Worth(const cache::Outlook& outlook, const PlacementCosts& costs) {
  const double saved = absl::ToDoubleSeconds(costs.otherwise) - absl::ToDoubleSeconds(costs.load);
  const double worth = outlook.reuse * saved - absl::ToDoubleSeconds(costs.move);
  return std::max(0.0, worth);
}

double WorthRate(const cache::Outlook& outlook, const PlacementCosts& costs, Bytes bytes) {
  assert(bytes >= Bytes(1));
  if (outlook.reuse <= 0) return 0;
  return Worth(outlook, costs) * (outlook.hits_per_second / outlook.reuse) /
         static_cast<double>(bytes.count());
}

double TierPrice::MeanAt(absl::Time now) const {
  if (mean_ == 0) return 0;
  return mean_ * std::exp2(-absl::FDivDuration(now - updated_, kHalfLife));
}

void TierPrice::OnEvicted(double loss, absl::Time now) {
  const double mean = MeanAt(now);
  const double price = At(now);
  mean_ = updated_ == absl::InfinitePast() ? loss : mean + kWeight * (loss - mean);
  price_ = std::abs(mean_ - price) > kBand * price ? mean_ : price;
  updated_ = now;
}

// Inside the band as it was last; a price that no eviction supports falls with the mean.
double TierPrice::At(absl::Time now) const {
  const double mean = MeanAt(now);
  return mean < price_ * (1 - kBand) ? mean : price_;
}

void LinkUse::OnLoad(absl::Duration length, absl::Time now) {
  seconds_ = SecondsAt(now) + absl::ToDoubleSeconds(length);
  updated_ = now;
}

double LinkUse::SecondsAt(absl::Time now) const {
  return seconds_ == 0 ? 0 : seconds_ * std::exp(-absl::FDivDuration(now - updated_, kMemory));
}

double LinkUse::ShareAt(absl::Time now) const {
  return std::min(1.0, SecondsAt(now) / absl::ToDoubleSeconds(kMemory));
}

}  // namespace palimpsest::blocks
