// What a worker does with its model's KV heads: which it drops, how it groups them, what it has
// seen of them.
#include <algorithm>
#include <utility>

#include "common/file.h"
#include "common/log.h"
#include "worker/core/head_mass.h"
#include "worker/core/head_profile.h"
#include "worker/server/worker_process.h"

namespace palimpsest {

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
  const auto groups = HeadGroups::Create(*mass, config_.heads.groups, Bytes(1));
  if (!groups.ok()) return groups.status();
  for (int32_t group = 0; group < groups->count(); ++group) {
    head_groups_.push_back(groups->members(group));
    // Neither the order nor the exact masses matter.
    std::sort(head_groups_.back().begin(), head_groups_.back().end());
  }
  return absl::OkStatus();
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
