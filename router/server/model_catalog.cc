#include "router/server/model_catalog.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "worker/model/model_config.h"

namespace palimpsest::router {
namespace {

absl::Status InFolder(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("model folder '", path, "': ", status.message()));
}

absl::StatusOr<std::shared_ptr<const ModelFolder>> ReadFolder(const std::string& path) {
  absl::StatusOr<ModelConfig> config = ReadModelConfig(path);
  if (!config.ok()) return InFolder(path, config.status());
  auto folder = std::make_shared<ModelFolder>();
  folder->vocab_size = config->vocab_size;
  folder->max_position = config->max_position;
  folder->eos_token_ids = config->eos_token_ids;
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Load(path);
  if (!tokenizer.ok()) return InFolder(path, tokenizer.status());
  folder->tokenizer = *std::move(tokenizer);
  if (folder->tokenizer->vocab_size() > folder->vocab_size) {
    return InFolder(path, absl::InvalidArgumentError(
                              absl::StrCat("the tokenizer knows ", folder->tokenizer->vocab_size(),
                                           " tokens, the model only ", folder->vocab_size)));
  }
  absl::StatusOr<std::unique_ptr<ChatTemplate>> chat = ChatTemplate::Load(path);
  folder->chat_template_status = chat.status();
  if (chat.ok()) folder->chat_template = *std::move(chat);
  return std::shared_ptr<const ModelFolder>(std::move(folder));
}

}  // namespace

absl::StatusOr<ModelCatalog> ModelCatalog::Load(const std::vector<CatalogEntry>& entries) {
  ModelCatalog catalog;
  std::map<std::string, std::shared_ptr<const ModelFolder>> folders;
  for (const CatalogEntry& entry : entries) {
    std::shared_ptr<const ModelFolder>& folder = folders[entry.path];
    if (folder == nullptr) {
      absl::StatusOr<std::shared_ptr<const ModelFolder>> read = ReadFolder(entry.path);
      if (!read.ok()) return read.status();
      folder = *std::move(read);
    }
    catalog.models_[entry.tenant].push_back({entry.model, folder});
  }
  return catalog;
}

const std::vector<ServedModel>& ModelCatalog::ModelsOf(absl::string_view tenant) const {
  static const auto* const kNone = new std::vector<ServedModel>;
  const auto found = models_.find(tenant);
  return found == models_.end() ? *kNone : found->second;
}

absl::StatusOr<const ServedModel*> ModelCatalog::Find(absl::string_view tenant,
                                                      absl::string_view name) const {
  const std::vector<ServedModel>& models = ModelsOf(tenant);
  if (name.empty() && models.size() == 1) return &models.front();
  for (const ServedModel& model : models) {
    if (model.name == name) return &model;
  }
  const auto names = [](std::string* out, const ServedModel& model) { out->append(model.name); };
  const std::string known = absl::StrJoin(models, ", ", names);
  if (name.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the request must name a model; tenant '", tenant, "' has: ", known));
  }
  return absl::NotFoundError(absl::StrCat("tenant '", tenant, "' has no model '",
                                          absl::CHexEscape(name.substr(0, 100)),
                                          "'; it has: ", known));
}

}  // namespace palimpsest::router
