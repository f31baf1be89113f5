#include "broker/core/reuse/calibration.h"

#include <algorithm>
#include <cassert>

namespace palimpsest::reuse {

void Calibration::Add(double predicted, double happened) {
  assert(predicted >= 0 && predicted <= 1 && happened >= 0 && happened <= 1);
  const auto end = std::lower_bound(kBinEnds.begin(), kBinEnds.end(), predicted);
  Bin& bin = bins_[static_cast<size_t>(end - kBinEnds.begin())];
  ++bin.votes;
  bin.predicted += predicted;
  bin.happened += happened;
  ++votes_;
  squared_error_ += (predicted - happened) * (predicted - happened);
  happened_ += happened;
  happened_squared_ += happened * happened;
}

double Calibration::Brier() const {
  return votes_ == 0 ? 0 : squared_error_ / static_cast<double>(votes_);
}

double Calibration::BrierOfMean() const {
  if (votes_ == 0) return 0;
  const auto votes = static_cast<double>(votes_);
  const double mean = happened_ / votes;
  return happened_squared_ / votes - mean * mean;
}

}  // namespace palimpsest::reuse
