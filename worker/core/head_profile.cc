#include "worker/core/head_profile.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/json_fields.h"
#include "common/json_text.h"
#include "nlohmann/json.hpp"
#include "worker/core/far_keys.h"

namespace palimpsest {
namespace {

constexpr int64_t kMostHeads = 1 << 20;

absl::Status ReadNumbers(absl::string_view key, const nlohmann::json* list, size_t heads,
                         std::vector<float>& numbers) {
  const auto refuse = [&](absl::string_view got) {
    return absl::InvalidArgumentError(absl::StrCat("head profile: ", key, ": expected ", heads,
                                                   " numbers from 0 to 1, got ", got));
  };
  if (list == nullptr || !list->is_array()) return refuse("no list");
  if (list->size() != heads) return refuse(absl::StrCat(list->size()));
  for (const nlohmann::json& value : *list) {
    if (!value.is_number() || !(value.get<double>() >= 0 && value.get<double>() <= 1)) {
      return refuse(value.dump());
    }
    numbers.push_back(value.get<float>());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<HeadProfile> HeadProfile::Parse(absl::string_view json) {
  const auto parsed = ParseJson(json);
  if (!parsed.ok()) return parsed.status();
  JsonFields fields("head profile", *parsed);
  HeadProfile profile;
  profile.layers = fields.Int("layers", 1, kMostHeads);
  profile.kv_heads = fields.Int("kv_heads", 1, kMostHeads / profile.layers);
  profile.recent_tokens = fields.Int("recent_tokens", 1, 1 << 24);
  profile.samples = fields.Int("samples", 1, INT32_MAX);
  if (!fields.status().ok()) return fields.status();
  const auto heads = static_cast<size_t>(profile.layers) * static_cast<size_t>(profile.kv_heads);
  absl::Status status = ReadNumbers("mass", fields.Find("mass"), heads, profile.mass);
  status.Update(ReadNumbers("effect", fields.Find("effect"), heads, profile.effect));
  if (!status.ok()) return status;
  return profile;
}

HeadProfile HeadProfile::Of(const HeadMass& mass, const HeadMass& effect, int32_t layers,
                            int32_t recent_tokens) {
  HeadProfile profile;
  profile.layers = layers;
  profile.kv_heads = mass.heads() / layers;
  profile.recent_tokens = recent_tokens;
  profile.samples = std::min<int64_t>(mass.samples(), INT32_MAX);
  for (int32_t head = 0; head < mass.heads(); ++head) {
    profile.mass.push_back(static_cast<float>(mass.mass(head)));
    profile.effect.push_back(static_cast<float>(effect.mass(head)));
  }
  return profile;
}

std::string HeadProfile::ToJson() const {
  const nlohmann::json json = {
      {"layers", layers},   {"kv_heads", kv_heads}, {"recent_tokens", recent_tokens},
      {"samples", samples}, {"mass", mass},         {"effect", effect}};
  return json.dump() + "\n";
}

absl::Status HeadProfile::CheckModel(int32_t model_layers, int32_t model_kv_heads) const {
  if (layers == model_layers && kv_heads == model_kv_heads) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("head profile: expected ", model_layers, " layers of ", model_kv_heads,
                   " KV heads, as the model has, got ", layers, " of ", kv_heads,
                   "; measure one for this model (palctl bench heads --profile)"));
}

int32_t LossyHeads::count() const {
  return static_cast<int32_t>(dropped.size()) -
         static_cast<int32_t>(std::count(dropped.begin(), dropped.end(), 0));
}

Bytes LossyHeads::FreedBytes(int32_t tokens, int32_t block_tokens, Bytes head_bytes) const {
  if (!any() || tokens == 0) return Bytes(0);
  const int32_t first = (kFarKeyTile + block_tokens - 1) / block_tokens;
  const int32_t last = FarKeysEnd(tokens - 1, recent_tokens) / block_tokens;
  return head_bytes * (int64_t{count()} * std::max(0, last - first));
}

absl::StatusOr<LossyHeads> ChooseLossyHeads(const HeadProfile& profile, double keep) {
  if (!(keep >= 0 && keep <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("lossy heads: keep: expected a share from 0 to 1, got ", keep));
  }
  LossyHeads heads;
  const auto count =
      static_cast<size_t>(std::lround((1 - keep) * static_cast<double>(profile.effect.size())));
  if (count == 0) return heads;
  std::vector<size_t> ranking(profile.effect.size());
  std::iota(ranking.begin(), ranking.end(), size_t{0});
  std::stable_sort(ranking.begin(), ranking.end(), [&profile](size_t a, size_t b) {
    return profile.effect[a] < profile.effect[b];
  });
  heads.recent_tokens = profile.recent_tokens;
  heads.dropped.assign(ranking.size(), 0);
  for (size_t i = 0; i < count; ++i) heads.dropped[ranking[i]] = 1;
  return heads;
}

}  // namespace palimpsest
