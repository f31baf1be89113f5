// Whether predicted probabilities are right: Brier score (Brier, "Verification of forecasts
// expressed in terms of probability", 1950) and a reliability diagram.
//
// Outcomes are shares in 0..1 of one vote. Threads: none.
#ifndef PALIMPSEST_BROKER_CORE_REUSE_CALIBRATION_H_
#define PALIMPSEST_BROKER_CORE_REUSE_CALIBRATION_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace palimpsest::reuse {

class Calibration {
 public:
  // Where bins of predictions end; they are finer where most predictions are.
  static constexpr std::array<double, 12> kBinEnds = {0.005, 0.01, 0.02, 0.04, 0.06, 0.1,
                                                      0.15,  0.2,  0.3,  0.5,  0.7,  1};
  struct Bin {
    int64_t votes = 0;
    double predicted = 0;  // sums
    double happened = 0;

    friend bool operator==(const Bin&, const Bin&) = default;
  };

  void Add(double predicted, double happened);

  int64_t votes() const { return votes_; }
  // Mean squared error; 0 without votes.
  double Brier() const;
  // That of who always predicts the mean of what happened.
  double BrierOfMean() const;
  const std::array<Bin, kBinEnds.size()>& bins() const { return bins_; }

  friend bool operator==(const Calibration&, const Calibration&) = default;

 private:
  std::array<Bin, kBinEnds.size()> bins_{};
  int64_t votes_ = 0;
  double squared_error_ = 0;
  double happened_ = 0;
  double happened_squared_ = 0;
};

}  // namespace palimpsest::reuse

#endif  // PALIMPSEST_BROKER_CORE_REUSE_CALIBRATION_H_
