#include "broker/core/reuse/age_bins.h"

#include <cassert>
#include <cmath>

namespace palimpsest::reuse {
namespace {

struct Bins {
  std::array<double, kAgeBins> end;
  std::array<float, kAgeBins> width;

  Bins() {
    for (size_t i = 0; i < kAgeBins; ++i) {
      end[i] = 2 * std::exp2(static_cast<double>(i) / 3);
      width[i] = static_cast<float>(i == 0 ? end[0] : end[i] - end[i - 1]);
    }
  }
};

const Bins& AllBins() {
  static const Bins bins;
  return bins;
}

}  // namespace

double AgeBinEnd(size_t bin) {
  assert(bin < kAgeBins);
  return AllBins().end[bin];
}

double AgeBinWidth(size_t bin) {
  assert(bin < kAgeBins);
  return AllBins().width[bin];
}

std::array<float, kAgeBins> HitDensity(const Hazards& hazards) {
  const std::array<float, kAgeBins>& width = AllBins().width;
  // From the last bin to the first, a stack of stretches of bins whose rates fall with age: a bin
  // joins the stretch behind it as long as that has the better rate, and the rate of the first
  // stretch then is the best over all horizons.
  struct Stretch {
    float hits, seconds, survival;
  };
  std::array<Stretch, kAgeBins> stack;
  size_t size = 0;
  std::array<float, kAgeBins> worth;
  for (size_t bin = kAgeBins; bin-- > 0;) {
    const float hazard = hazards[bin];
    Stretch first{hazard, width[bin] * (1 - hazard / 2), 1 - hazard};
    while (size > 0 &&
           stack[size - 1].hits * first.seconds > first.hits * stack[size - 1].seconds) {
      const Stretch& behind = stack[--size];
      first.hits += first.survival * behind.hits;
      first.seconds += first.survival * behind.seconds;
      first.survival *= behind.survival;
    }
    stack[size++] = first;
    worth[bin] = first.hits / first.seconds;
  }
  return worth;
}

std::array<float, kAgeBins> ReuseAtAll(const Hazards& hazards) {
  std::array<float, kAgeBins> reuse;
  float survival = 1;
  for (size_t bin = kAgeBins; bin-- > 0;) {
    survival *= 1 - hazards[bin];
    reuse[bin] = 1 - survival;
  }
  return reuse;
}

}  // namespace palimpsest::reuse
