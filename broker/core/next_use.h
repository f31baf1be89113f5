// When an idle tenant will be used next, from the lengths of its idle times so far.
//
// The estimate is a mean residual life (renewal theory: E[X - s | X > s] for an idle time X that
// has lasted s already), over the last kRemembered idle times, each weighted kDecay times its
// successor:
//
//   expected = (sum over x_i > s of w_i (x_i - s) + w_0 (max(m_0, 2 s) - s))
//              / (sum over x_i > s of w_i + w_0)
//
// The second term is what is assumed without evidence: an idle time of m_0, or one that lasts as
// long again as it has lasted. So turns that go round make the tenant that was used last the one
// that is needed last, while under bursty traffic one that has been idle for longer than its gaps
// is expected to stay so. Histories of idle times as predictors: Shahrad et al., "Serverless in the
// Wild", ATC 2020.
//
// Threads: none; plain data.
#ifndef PALIMPSEST_BROKER_CORE_NEXT_USE_H_
#define PALIMPSEST_BROKER_CORE_NEXT_USE_H_

#include <array>
#include <cstddef>
#include <optional>

#include "absl/time/time.h"

namespace palimpsest {

class NextUse {
 public:
  static constexpr size_t kRemembered = 32;
  static constexpr double kDecay = 0.9;
  static constexpr double kPriorWeight = 0.5;                      // w_0
  static constexpr absl::Duration kPriorIdle = absl::Seconds(60);  // m_0
  // Gaps between the requests of one busy period, which end before parameters could go and return.
  static constexpr absl::Duration kShortestIdle = absl::Milliseconds(500);

  // Whether the tenant has requests, as of `now`. Times must not run backwards; repetitions are
  // harmless.
  void Observe(bool active, absl::Time now);

  // From `now` until the tenant is active; zero while it is. Before the first Observe it counts as
  // idle for no time yet.
  absl::Duration Expected(absl::Time now) const;

 private:
  std::array<double, kRemembered> idle_seconds_{};  // a ring; next_ is the oldest when it is full
  size_t count_ = 0;
  size_t next_ = 0;
  bool active_ = false;
  std::optional<absl::Time> idle_since_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_NEXT_USE_H_
