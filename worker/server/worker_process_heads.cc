// What a worker does with its model's KV heads: which it drops, how it groups them, what it has
// seen of them.
#include <algorithm>
#include <utility>

#include "common/clock.h"
#include "common/file.h"
#include "common/log.h"
#include "worker/core/head_mass.h"
#include "worker/core/head_profile.h"
#include "worker/core/tier_one_parts.h"
#include "worker/server/worker_process.h"

namespace palimpsest {
namespace {

// What lengths are rounded up to in the broker's arena (BlockExtent).
constexpr Bytes kTierOneUnit = KiB(4);

}  // namespace

absl::Status WorkerProcess::ReadHeads() {
  const WorkerConfig::Heads& heads = config_.heads;
  if (model_.latent.has_value() && (heads.sample_every > 0 || heads.lossy || heads.groups > 1)) {
    return absl::InvalidArgumentError(
        "engine.heads: the model has latent attention, one vector for all heads: there are no KV "
        "heads to sample, to group or to drop");
  }
  if (!heads.lossy && heads.groups == 1) return absl::OkStatus();
  const auto text = ReadFile(heads.profile, MiB(16));
  if (!text.ok()) return text.status();
  const auto profile = HeadProfile::Parse(*text);
  if (!profile.ok()) return profile.status();
  absl::Status fits = profile->CheckModel(model_.num_layers, model_.num_kv_heads);
  if (!fits.ok()) return fits;
  if (heads.groups > 1) {
    if (absl::Status status = DivideHeads(*profile); !status.ok()) return status;
  }
  if (!heads.lossy) return absl::OkStatus();
  auto lossy = ChooseLossyHeads(*profile, heads.keep);
  if (!lossy.ok()) return lossy.status();
  lossy_heads_ = *std::move(lossy);
  engine_metrics_.SetLossyHeads(lossy_heads_.count());
  Log(LogLevel::kWarning, "lossy: this worker drops the far keys of KV heads",
      {{"heads", lossy_heads_.count()},
       {"of", profile->mass.size()},
       {"recent_tokens", lossy_heads_.recent_tokens},
       {"profile", heads.profile}});
  return absl::OkStatus();
}

absl::Status WorkerProcess::DivideHeads(const HeadProfile& profile) {
  auto mass = HeadMass::Create({.layers = profile.layers, .kv_heads = profile.kv_heads});
  if (!mass.ok()) return mass.status();
  if (absl::Status status = mass->Sample(profile.mass); !status.ok()) return status;
  auto groups = GroupHeads(*mass, config_.heads.groups);
  if (!groups.ok()) return groups.status();
  head_groups_ = *std::move(groups);
  // Neither the order nor the exact masses matter to who reads these blocks.
  for (std::vector<int32_t>& group : head_groups_) std::sort(group.begin(), group.end());
  profile_mass_ = *std::move(mass);
  return absl::OkStatus();
}

GroupedBlockStore::TierOne WorkerProcess::TierOneOf(const SchedulerConfig& scheduler,
                                                    Bytes part_bytes) {
  if (config_.heads.tier_1_bytes == Bytes(0)) return {};
  TierOneParts::Options options = {.groups = head_groups_,
                                   .root = scheduler.root_key,
                                   .block_tokens = scheduler.geometry.block_tokens,
                                   .part_bytes = RoundUp(part_bytes, kTierOneUnit),
                                   .limit = config_.heads.tier_1_bytes};
  const auto masses = [this]() -> const HeadMass* {
    const Engine::Heads* const heads = engine_ == nullptr ? nullptr : engine_->heads();
    return heads == nullptr ? nullptr : &heads->mass;
  };
  return {.parts = std::make_unique<TierOneParts>(std::move(options), *profile_mass_),
          .clock = &Clock::Real(),
          .masses = masses,
          .demote = [store = store_.get()](const BlockChain& chain, int32_t first) {
            store->Demote(chain, first);
          }};
}

void WorkerProcess::WriteMeasuredHeads() const {
  const std::string& file = config_.heads.measured_file;
  if (file.empty() || engine_ == nullptr || engine_->heads() == nullptr) return;
  const HeadProfile profile = HeadProfile::Of(engine_->heads()->mass, engine_->heads()->effect,
                                              rank_model_.num_layers, config_.heads.recent_tokens);
  const absl::Status status = WriteFileAtomically(file, profile.ToJson());
  Log(status.ok() ? LogLevel::kInfo : LogLevel::kWarning, "masses of heads written",
      {{"file", file}, {"samples", profile.samples}, {"status", status}});
}

}  // namespace palimpsest
