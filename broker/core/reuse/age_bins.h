// Idle time cut into bins that grow by 2^(1/3): the time axis of every hazard.
//
// Threads: none; constants.
#ifndef PALIMPSEST_BROKER_CORE_REUSE_AGE_BINS_H_
#define PALIMPSEST_BROKER_CORE_REUSE_AGE_BINS_H_

#include <array>
#include <cstddef>

namespace palimpsest::reuse {

inline constexpr size_t kAgeBins = 40;
inline constexpr size_t kLastAgeBin = kAgeBins - 1;  // never closes

// Of each bin P(reuse before the bin ends | idle when it began).
using Hazards = std::array<float, kAgeBins>;

// When bin `bin` ends: 2 s x 2^(bin / 3). Bin 0 begins at 0, the last one would end after 4.5
// hours.
double AgeBinEnd(size_t bin);
double AgeBinWidth(size_t bin);

// What a block is worth at each age, in hits per second of holding it: the best rate over all
// horizons h >= a,
//
//   worth(a) = max_h  sum_{k=a..h} S_k hazard_k  /  sum_{k=a..h} S_k width_k (1 - hazard_k / 2)
//   S_a = 1,  S_{k+1} = S_k (1 - hazard_k)
//
// Gittins, "Bandit processes and dynamic allocation indices", 1979, for the job of holding a block
// until it is hit or given up; Beckmann, Chen and Cidon, "LHD: Improving Cache Hit Rate by
// Maximizing Hit Density", NSDI 2018.
std::array<float, kAgeBins> HitDensity(const Hazards& hazards);

// P(reuse before the last bin ends | idle until each bin began):
//
//   reuse(a) = 1 - prod_{k>=a} (1 - hazard_k)
std::array<float, kAgeBins> ReuseAtAll(const Hazards& hazards);

}  // namespace palimpsest::reuse

#endif  // PALIMPSEST_BROKER_CORE_REUSE_AGE_BINS_H_
