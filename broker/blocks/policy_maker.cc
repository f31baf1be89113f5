#include "broker/blocks/policy_maker.h"

#include <algorithm>
#include <cassert>
#include <memory>
#include <string>
#include <utility>

#include "broker/core/cache/queue_policies.h"
#include "broker/core/cache/score_policies.h"
#include "broker/core/reuse/predictive_policy.h"

namespace palimpsest {
namespace {

std::unique_ptr<cache::EvictionPolicy> MakePolicy(absl::string_view name, size_t capacity) {
  if (name == "lru") return std::make_unique<cache::LruPolicy>();
  if (name == "lfu") return std::make_unique<cache::LfuPolicy>();
  if (name == "gdsf") return std::make_unique<cache::GdsfPolicy>();
  if (name == "arc") return std::make_unique<cache::ArcPolicy>(capacity);
  if (name == "s3fifo") return std::make_unique<cache::S3FifoPolicy>(capacity);
  if (name == "tinylfu") return std::make_unique<cache::TinyLfuPolicy>(capacity);
  assert(name == "predictive");
  return std::make_unique<reuse::PredictivePolicy>();
}

}  // namespace

blocks::PolicyMaker MakePolicies(absl::string_view name, std::vector<size_t> capacity) {
  return [name = std::string(name), capacity = std::move(capacity)](blocks::TierIndex tier) {
    const size_t blocks = tier.value() < capacity.size() ? capacity[tier.value()] : 0;
    return MakePolicy(name, std::max<size_t>(blocks, 1));
  };
}

}  // namespace palimpsest
