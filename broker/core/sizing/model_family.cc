#include "broker/core/sizing/model_family.h"

#include <algorithm>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"

namespace palimpsest {
namespace {

constexpr ModelFamily kFamilies[] = {
    {.name = "cohere2", .window = 4096, .period = 4, .windows = WindowRule::kPeriodic},
    {.name = "falconh1", .layers = LayerRule::kBoth},
    {.name = "falconmamba", .layers = LayerRule::kRecurrent},
    {.name = "gemma", .head_dim = 256},
    {.name = "gemma2",
     .heads = 8,
     .kv_heads = 4,
     .head_dim = 256,
     .window = 4096,
     .period = 2,
     .windows = WindowRule::kPeriodic},
    {.name = "gemma3",
     .heads = 8,
     .kv_heads = 4,
     .head_dim = 256,
     .window = 4096,
     .period = 6,
     .windows = WindowRule::kPeriodic},
    {.name = "gptoss",
     .head_dim = 64,
     .window = 128,
     .period = 2,
     .windows = WindowRule::kPeriodic},
    {.name = "mamba", .layers = LayerRule::kRecurrent},
    {.name = "mamba2", .layers = LayerRule::kRecurrent},
    {.name = "mistral", .kv_heads = 8, .window = 4096, .windows = WindowRule::kAll},
    {.name = "mixtral", .kv_heads = 8, .windows = WindowRule::kAll},
    {.name = "phi3", .windows = WindowRule::kAll},
    {.name = "phimoe", .windows = WindowRule::kAll},
    {.name = "qwen2", .windows = WindowRule::kBehindFirst},
    {.name = "qwen2moe", .windows = WindowRule::kBehindFirst},
    {.name = "qwen2vl", .windows = WindowRule::kBehindFirst},
    {.name = "qwen25vl", .windows = WindowRule::kBehindFirst},
    {.name = "qwen3", .head_dim = 128, .windows = WindowRule::kBehindFirst},
    {.name = "qwen3moe", .windows = WindowRule::kBehindFirst},
    {.name = "qwen3next",
     .kv_heads = 2,
     .head_dim = 256,
     .period = 4,
     .layers = LayerRule::kPeriodicAttention},
    {.name = "recurrentgemma", .window = 2048, .windows = WindowRule::kAll},
    {.name = "starcoder2", .windows = WindowRule::kAll},
};

std::string Plain(absl::string_view name) {
  std::string plain = absl::AsciiStrToLower(absl::StripSuffix(name, "_text"));
  plain.erase(std::remove(plain.begin(), plain.end(), '_'), plain.end());
  return plain;
}

std::string FamilyName(const JsonFields& fields) {
  const nlohmann::json* type = fields.Find("model_type");
  if (type != nullptr && type->is_string()) return Plain(type->get<std::string>());
  const nlohmann::json* names = fields.Find("architectures");
  if (names == nullptr || !names->is_array() || names->empty() || !names->front().is_string()) {
    return "";
  }
  const std::string name = names->front().get<std::string>();
  return Plain(absl::string_view(name).substr(0, name.find("For")));
}

}  // namespace

const ModelFamily& FindModelFamily(const JsonFields& fields) {
  static constexpr ModelFamily kOther = {};
  const std::string name = FamilyName(fields);
  for (const ModelFamily& family : kFamilies) {
    if (family.name == name) return family;
  }
  return kOther;
}

}  // namespace palimpsest
