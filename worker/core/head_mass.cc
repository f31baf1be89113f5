#include "worker/core/head_mass.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

constexpr int32_t kMostHeads = 1 << 20;
constexpr double kLeastMass = 0x1p-40;

absl::Status Refuse(absl::string_view option, absl::string_view expected, double got) {
  return absl::InvalidArgumentError(
      absl::StrCat("head mass: ", option, ": expected ", expected, ", got ", got));
}

bool Has(uint64_t resident, int32_t group) { return (resident >> group & 1) != 0; }

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
  if (options.recency_half_life <= absl::ZeroDuration() ||
      options.recency_half_life == absl::InfiniteDuration()) {
    return Refuse("recency_half_life", "seconds above 0",
                  absl::ToDoubleSeconds(options.recency_half_life));
  }
  if (!(options.distance_scale > 0) || !std::isfinite(options.distance_scale)) {
    return Refuse("distance_scale", "tokens above 0", options.distance_scale);
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

double HeadMass::LogWorth(double mass, absl::Duration idle, int64_t distance) const {
  return std::log2(std::max(mass, kLeastMass)) -
         absl::FDivDuration(idle, options_.recency_half_life) -
         std::log2(1 + static_cast<double>(distance) / options_.distance_scale);
}

absl::StatusOr<HeadGroups> HeadGroups::Create(const HeadMass& mass, int32_t count,
                                              Bytes head_bytes) {
  const int32_t most = std::min(kMost, mass.heads());
  if (count < 1 || count > most) return Refuse("groups", absl::StrCat("1 to ", most), count);
  if (head_bytes <= Bytes(0)) {
    return Refuse("bytes of a head", "above 0", static_cast<double>(head_bytes.count()));
  }
  const std::vector<int32_t> ranking = mass.Ranking();
  std::vector<std::vector<int32_t>> members;
  for (int64_t group = 0; group < count; ++group) {
    const int64_t first = mass.heads() * group / count;
    const int64_t last = mass.heads() * (group + 1) / count;
    members.emplace_back(ranking.begin() + first, ranking.begin() + last);
  }
  return HeadGroups(std::move(members), head_bytes);
}

HeadGroups::HeadGroups(std::vector<std::vector<int32_t>> members, Bytes head_bytes)
    : members_(std::move(members)), head_bytes_(head_bytes) {}

Bytes HeadGroups::ExtentBytes(int32_t group) const {
  return head_bytes_ * static_cast<int64_t>(members(group).size());
}

Bytes HeadGroups::BlockBytes() const { return MissingBytes(0); }

Bytes HeadGroups::MissingBytes(uint64_t resident) const {
  Bytes missing;
  for (int32_t group = 0; group < count(); ++group) {
    if (!Has(resident, group)) missing += ExtentBytes(group);
  }
  return missing;
}

std::vector<HeadMove> ChooseHeadMoves(const HeadMass& mass, const HeadGroups& groups,
                                      absl::Span<const IdleBlock> blocks, Bytes wanted) {
  std::vector<double> means;
  for (int32_t group = 0; group < groups.count(); ++group) {
    double sum = 0;
    for (const int32_t head : groups.members(group)) sum += mass.mass(head);
    means.push_back(sum / static_cast<double>(groups.members(group).size()));
  }
  struct Candidate {
    double log_worth;
    HeadMove move;
  };
  std::vector<Candidate> candidates;
  for (size_t block = 0; block < blocks.size(); ++block) {
    for (int32_t group = 0; group < groups.count(); ++group) {
      if (!Has(blocks[block].resident, group)) continue;
      const double log_worth = mass.LogWorth(means[static_cast<size_t>(group)], blocks[block].idle,
                                             blocks[block].distance);
      candidates.push_back({log_worth, {block, group, groups.ExtentBytes(group)}});
    }
  }
  // A heap, since few of many are wanted as a rule.
  const auto worth_more = [](const Candidate& a, const Candidate& b) {
    return std::tie(a.log_worth, a.move.block, a.move.group) >
           std::tie(b.log_worth, b.move.block, b.move.group);
  };
  std::make_heap(candidates.begin(), candidates.end(), worth_more);
  std::vector<HeadMove> moves;
  for (Bytes freed; freed < wanted && !candidates.empty(); candidates.pop_back()) {
    std::pop_heap(candidates.begin(), candidates.end(), worth_more);
    moves.push_back(candidates.back().move);
    freed += moves.back().bytes;
  }
  return moves;
}

}  // namespace palimpsest
