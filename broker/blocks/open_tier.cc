#include "broker/blocks/open_tier.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "broker/tier/cxl/cxl_backend.h"
#include "broker/tier/directory/file_operations.h"
#include "broker/tier/encryption/sealed_backend.h"
#include "broker/tier/nvme/nvme_backend.h"
#include "broker/tier/threaded_backend.h"

namespace palimpsest {
namespace {

struct MakeBackend {
  const LowerTierConfig& config;
  const std::vector<std::string>& tenants;
  const Clock& clock;

  std::unique_ptr<TierBackend> operator()(const CxlOptions& cxl) const {
    return std::make_unique<ThreadedBackend>(std::make_unique<CxlBackend>(cxl, clock),
                                             config.store.max_in_flight);
  }
  std::unique_ptr<TierBackend> operator()(const RemoteBackend::Options& remote) const {
    return std::make_unique<RemoteBackend>(remote);
  }
  std::unique_ptr<TierBackend> operator()(const FileDeviceOptions& file) const {
    return std::make_unique<NvmeBackend>([file] { return OpenFileDevice(file); }, clock);
  }
  std::unique_ptr<TierBackend> operator()(const DirectoryBackend::Options& directory) const {
    static FileOperations files;
    DirectoryBackend::Options options = directory;
    options.tenants = tenants;
    return std::make_unique<ThreadedBackend>(
        std::make_unique<DirectoryBackend>(options, files, clock), config.store.max_in_flight);
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<TierStore>> OpenTier(const LowerTierConfig& config,
                                                    const std::vector<std::string>& tenants,
                                                    const TierWrapper& wrap, const Clock& clock,
                                                    TierStore::Observer* observer) {
  const auto named = [&config](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat("tiers.", config.name, ": ", status.message()));
  };
  std::unique_ptr<TierBackend> backend =
      std::visit(MakeBackend{config, tenants, clock}, config.medium);
  if (wrap != nullptr) backend = wrap(config.name, std::move(backend));
  if (!config.keys.empty()) {
    absl::StatusOr<TenantKeys> keys = TenantKeys::Load(config.keys, tenants);
    if (!keys.ok()) return named(keys.status());
    backend = std::make_unique<SealedBackend>(std::move(backend), *std::move(keys));
  }
  auto store = TierStore::Open(config.store, std::move(backend), clock, observer);
  if (!store.ok()) return named(store.status());
  return store;
}

}  // namespace palimpsest
