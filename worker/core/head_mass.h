// Which KV heads matter for tokens that are long past, and what their KV in idle blocks is worth.
// Pure; one thread at a time.
//
// Attention weights of a query sum to one, so what tells heads apart is where they fall. Some heads
// look back over the whole context, others at the last tokens alone (Xiao et al., DuoAttention,
// arXiv:2410.10819). A sample is the share of a step's weights that each KV head's queries gave to
// far keys (far_keys.h); the mass m of a head is its exponential average. What the KV of a head is
// worth in a block that has been idle for t and lies d tokens behind its sequence's end:
//
//   m * 2^(-t / half_life) / (1 + d / distance_scale)
//
// The order of two such worths does not change while both blocks stay idle and masses are the same.
//
// A model with latent attention has one vector for all heads and thus nothing to divide.
#ifndef PALIMPSEST_WORKER_CORE_HEAD_MASS_H_
#define PALIMPSEST_WORKER_CORE_HEAD_MASS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace palimpsest {

struct HeadMassOptions {
  int32_t layers = 0;
  int32_t kv_heads = 0;         // of a layer on this rank
  double sample_weight = 0.05;  // of a new sample in the average, above 0 and at most 1
};

// A head is numbered layer * kv_heads + KV head.
class HeadMass {
 public:
  // InvalidArgument names the option.
  static absl::StatusOr<HeadMass> Create(const HeadMassOptions& options);

  // `shares`: one for each head, from 0 to 1. A sample of another size or with other numbers (NaN
  // among them) is refused as a whole, InvalidArgument, and changes nothing.
  absl::Status Sample(absl::Span<const float> shares);

  int32_t heads() const { return static_cast<int32_t>(mass_.size()); }
  int64_t samples() const { return samples_; }
  // 0 before the first sample.
  double mass(int32_t head) const { return mass_[static_cast<size_t>(head)]; }

  // Least mass first; equal ones by number.
  std::vector<int32_t> Ranking() const;

 private:
  explicit HeadMass(const HeadMassOptions& options);

  HeadMassOptions options_;
  std::vector<double> mass_;
  int64_t samples_ = 0;
};

// The worth above, by its factors.
struct HeadWorth {
  absl::Duration half_life = absl::Minutes(1);
  double distance_scale = 4096;  // tokens

  // Logarithms to base 2. A mass below 2^-40 counts as that, so that time and distance still order
  // what has none.
  static double LogMass(double mass);
  double LogRecency(absl::Duration idle) const { return -absl::FDivDuration(idle, half_life); }
  // From 0 to 1.
  double Nearness(int64_t distance) const {
    return 1 / (1 + static_cast<double>(distance) / distance_scale);
  }
};

inline constexpr int32_t kMostHeadGroups = 64;

// Heads in `count` groups, neighbours in the ranking, those of least mass first; sizes differ by
// one head at most. InvalidArgument unless count is 1 to kMostHeadGroups and at most the number of
// heads.
absl::StatusOr<std::vector<std::vector<int32_t>>> GroupHeads(const HeadMass& mass, int32_t count);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_HEAD_MASS_H_
