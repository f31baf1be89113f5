// The models of each tenant as the router sees them: tokenizer, chat template and limits, read from
// the model folders at start. Immutable, so thread-safe.
#ifndef PALIMPSEST_ROUTER_SERVER_MODEL_CATALOG_H_
#define PALIMPSEST_ROUTER_SERVER_MODEL_CATALOG_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"

namespace palimpsest::router {

// What is read from one model folder.
struct ModelFolder {
  std::unique_ptr<Tokenizer> tokenizer;
  // Null, with the reason, if the folder has no usable template: chat requests are refused.
  std::unique_ptr<ChatTemplate> chat_template;
  absl::Status chat_template_status;
  int32_t vocab_size = 0;
  int32_t max_position = 0;  // longest sequence in tokens
  std::vector<TokenId> eos_token_ids;
};

struct ServedModel {
  std::string name;
  std::shared_ptr<const ModelFolder> folder;
};

// One model of one tenant to be served from a folder.
struct CatalogEntry {
  std::string tenant;
  std::string model;
  std::string path;
};

class ModelCatalog {
 public:
  // Reads every folder once, also where several tenants share it.
  static absl::StatusOr<ModelCatalog> Load(const std::vector<CatalogEntry>& entries);

  // NOT_FOUND names the tenant's own models. An empty name means the only model.
  absl::StatusOr<const ServedModel*> Find(absl::string_view tenant, absl::string_view name) const;

  // In the order of the configuration; empty for unknown tenants.
  const std::vector<ServedModel>& ModelsOf(absl::string_view tenant) const;

 private:
  std::map<std::string, std::vector<ServedModel>, std::less<>> models_;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_MODEL_CATALOG_H_
