#include "worker/core/head_mass.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

constexpr int32_t kMostHeads = 1 << 20;
constexpr double kLeastMass = 0x1p-40;

absl::Status Refuse(absl::string_view option, absl::string_view expected, double got) {
  return absl::InvalidArgumentError(
      absl::StrCat("head mass: ", option, ": expected ", expected, ", got ", got));
}

}  // namespace

absl::StatusOr<HeadMass> HeadMass::Create(const HeadMassOptions& options) {
  if (options.layers < 1 || options.layers > kMostHeads) {
    return Refuse("layers", absl::StrCat("1 to ", kMostHeads), options.layers);
  }
  if (options.kv_heads < 1 || options.kv_heads > kMostHeads / options.layers) {
    return Refuse("kv_heads", absl::StrCat("1 to ", kMostHeads, " in all layers together"),
                  options.kv_heads);
  }
  if (!(options.sample_weight > 0 && options.sample_weight <= 1)) {
    return Refuse("sample_weight", "above 0 and at most 1", options.sample_weight);
  }
  return HeadMass(options);
}

HeadMass::HeadMass(const HeadMassOptions& options)
    : options_(options), mass_(static_cast<size_t>(options.layers * options.kv_heads), 0.0) {}

absl::Status HeadMass::Sample(absl::Span<const float> shares) {
  if (shares.size() != mass_.size()) {
    return Refuse("a sample's heads", absl::StrCat(mass_.size()),
                  static_cast<double>(shares.size()));
  }
  for (const float share : shares) {
    if (!(share >= 0 && share <= 1)) return Refuse("a head's share", "0 to 1", share);
  }
  // The first sample stands for all that came before it.
  const double weight = samples_ == 0 ? 1.0 : options_.sample_weight;
  for (size_t head = 0; head < mass_.size(); ++head) {
    mass_[head] += weight * (shares[head] - mass_[head]);
  }
  ++samples_;
  return absl::OkStatus();
}

std::vector<int32_t> HeadMass::Ranking() const {
  std::vector<int32_t> ranking(mass_.size());
  std::iota(ranking.begin(), ranking.end(), 0);
  std::stable_sort(ranking.begin(), ranking.end(),
                   [this](int32_t a, int32_t b) { return mass(a) < mass(b); });
  return ranking;
}

double HeadWorth::LogMass(double mass) { return std::log2(std::max(mass, kLeastMass)); }

absl::StatusOr<std::vector<std::vector<int32_t>>> GroupHeads(const HeadMass& mass, int32_t count) {
  const int32_t most = std::min(kMostHeadGroups, mass.heads());
  if (count < 1 || count > most) return Refuse("groups", absl::StrCat("1 to ", most), count);
  const std::vector<int32_t> ranking = mass.Ranking();
  std::vector<std::vector<int32_t>> groups;
  for (int64_t group = 0; group < count; ++group) {
    const int64_t first = mass.heads() * group / count;
    const int64_t last = mass.heads() * (group + 1) / count;
    groups.emplace_back(ranking.begin() + first, ranking.begin() + last);
  }
  return groups;
}

}  // namespace palimpsest
